//! Which expert lies in which slot of the accelerator.

use super::counts::Counts;

/// Experts and slots of one kind. Most slots are for the experts that are chosen most often; the last few are for experts that a call needs.
#[derive(Debug)]
pub(super) struct Residency {
    pub(super) counts: Counts,
    /// The slot of each expert.
    slots: Vec<Option<usize>>,
    /// The expert in each slot.
    experts: Vec<Option<usize>>,
    /// Slots from this one on are for calls.
    staging: usize,
    /// Where the next slot for a call is looked for, from `staging` on.
    next: usize,
}

/// Slots for calls: a share of all, so many at most.
const STAGING_SHARE: usize = 8;
const MOST_STAGING: usize = 8;
/// An expert takes the place of another that was chosen less often by more than this.
const CLEARLY: f64 = 1.5;
const AND_BY: f64 = 4.0;

impl Residency {
    /// So many slots, the first of which hold the experts that were chosen most often; at equal counts those that come first in `order`. Without `transfers` for calls
    /// they all do.
    pub(super) fn new(counts: Counts, slots: usize, order: &[usize], transfers: bool) -> Self {
        let of = order.len();
        // Where everything fits nothing has to be transferred.
        let staging = if slots >= of || !transfers { 0 } else { (slots / STAGING_SHARE).min(MOST_STAGING) };
        let mut hottest = order.to_vec();
        hottest.sort_by(|&a, &b| counts.of(b).total_cmp(&counts.of(a)));
        hottest.truncate(slots - staging);
        let mut residency = Self { counts, slots: vec![None; of], experts: vec![None; slots], staging: slots - staging, next: 0 };
        hottest.into_iter().enumerate().for_each(|(slot, expert)| residency.put(expert, slot));
        residency
    }

    /// The slot of an expert, if it has one.
    pub(super) fn slot(&self, expert: usize) -> Option<usize> {
        self.slots[expert]
    }

    /// The expert in each slot.
    pub(super) fn experts(&self) -> &[Option<usize>] {
        &self.experts
    }

    /// Experts that may be transferred at once for calls: the other slots hold those of the call before.
    pub(super) fn at_once(&self) -> usize {
        (self.experts.len() - self.staging).div_ceil(2)
    }

    /// Takes a slot for a call and gives it to an expert; none where all of them are `busy`.
    pub(super) fn stage(&mut self, expert: usize, busy: &[usize]) -> Option<usize> {
        let count = self.experts.len() - self.staging;
        let slot = (0..count).map(|step| self.staging + (self.next + step) % count).find(|slot| !busy.contains(slot))?;
        self.next = (slot - self.staging + 1) % count;
        self.put(expert, slot);
        Some(slot)
    }

    /// Gives the slot of the expert that is chosen least often to the one that is chosen most often of those without a lasting one, if that is clearly more often. Gives
    /// both the expert and the slot.
    pub(super) fn swap(&mut self) -> Option<(usize, usize)> {
        let lasts = |expert: usize| self.slots[expert].is_some_and(|slot| slot < self.staging);
        let by_count = |a: &usize, b: &usize| self.counts.of(*a).total_cmp(&self.counts.of(*b));
        let hottest = (0..self.slots.len()).filter(|&expert| !lasts(expert)).max_by(by_count)?;
        let coldest = self.experts[..self.staging].iter().copied().flatten().min_by(by_count)?;
        let (hot, cold) = (self.counts.of(hottest), self.counts.of(coldest));
        let slot = self.slots[coldest].filter(|_| hot > CLEARLY * cold + AND_BY)?;
        self.put(hottest, slot);
        Some((hottest, slot))
    }

    /// Nobody is in a slot any more.
    pub(super) fn forget(&mut self, slot: usize) {
        if let Some(expert) = self.experts[slot].take() {
            self.slots[expert] = None;
        }
    }

    fn put(&mut self, expert: usize, slot: usize) {
        self.forget(slot);
        if let Some(old) = self.slots[expert].replace(slot) {
            self.experts[old] = None;
        }
        self.experts[slot] = Some(expert);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn residency(counts: &[f64], slots: usize) -> Residency {
        Residency::new(Counts::new(counts.to_vec()), slots, &(0..counts.len()).collect::<Vec<_>>(), true)
    }

    fn check(residency: &Residency) {
        for (expert, slot) in residency.slots.iter().enumerate() {
            assert!(slot.is_none_or(|slot| residency.experts[slot] == Some(expert)), "{residency:?}");
        }
        let held = residency.experts.iter().flatten().count();
        assert_eq!(held, residency.slots.iter().flatten().count(), "{residency:?}");
    }

    #[test]
    fn the_hottest_stay() {
        let found = residency(&[1.0, 9.0, 3.0, 9.0], 2);
        assert_eq!((0..4).map(|expert| found.slot(expert)).collect::<Vec<_>>(), [None, Some(0), None, Some(1)]);
        assert_eq!(found.at_once(), 0, "two slots are too few to keep some for calls");
        let all = residency(&[1.0; 16], 16);
        assert!((0..16).all(|expert| all.slot(expert).is_some()) && all.at_once() == 0);
        check(&all);
        let still = Residency::new(Counts::new(vec![1.0; 40]), 32, &(0..40).collect::<Vec<_>>(), false);
        assert_eq!(((0..40).filter(|&expert| still.slot(expert).is_some()).count(), still.at_once()), (32, 0), "no slot is kept free");
        check(&still);
    }

    #[test]
    fn a_cold_one_makes_room_for_a_hot_one() {
        let mut found = residency(&[10.0, 2.0, 3.0, 0.0], 2);
        assert_eq!(found.swap(), None, "3 is not clearly more than 2");
        found.counts.add(3, 50);
        let slot = found.slot(2).unwrap();
        assert_eq!(found.swap(), Some((3, slot)));
        assert_eq!((found.slot(2), found.slot(3), found.swap()), (None, Some(slot), None));
        check(&found);
    }

    #[test]
    fn calls_take_turns_with_their_slots() {
        let mut found = residency(&[1.0; 40], 32);
        assert_eq!((found.staging, found.at_once()), (28, 2));
        let first: Vec<usize> = (30..32).map(|expert| found.stage(expert, &[]).unwrap()).collect();
        let second: Vec<usize> = (32..34).map(|expert| found.stage(expert, &first).unwrap()).collect();
        assert_eq!((&first[..], &second[..]), (&[28, 29][..], &[30, 31][..]));
        let third = found.stage(35, &second).unwrap();
        assert_eq!((third, found.slot(30)), (28, None));
        assert_eq!(found.stage(36, &[28, 29, 30, 31]), None);
        // One that was there for a call may come to stay.
        found.counts.add(35, 100);
        let (expert, slot) = found.swap().unwrap();
        assert!(expert == 35 && slot < 28 && found.experts[28].is_none());
        check(&found);
    }
}
