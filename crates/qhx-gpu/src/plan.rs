//! Places of intermediate values in one arena, by their lifetimes.

use std::ops::Range;

/// A buffer that is made and used by steps.
#[derive(Clone, Debug)]
pub(crate) struct Lifetime {
    pub(crate) bytes: u64,
    /// The steps during which it is needed, from the first that writes it to the last that reads it.
    pub(crate) steps: Range<usize>,
}

/// Buffers begin at multiples of this.
const ALIGNMENT: u64 = 256;

/// The first byte of each buffer, and the size of the arena: the largest buffers are placed first, each in the lowest gap that is free all its life.
pub(crate) fn place(buffers: &[Lifetime]) -> (Vec<u64>, u64) {
    let size = |place: usize| buffers[place].bytes.max(1).next_multiple_of(ALIGNMENT);
    let mut order: Vec<usize> = (0..buffers.len()).collect();
    order.sort_by_key(|&place| (std::cmp::Reverse(size(place)), place));
    let mut offsets = vec![0; buffers.len()];
    let (mut placed, mut end): (Vec<usize>, u64) = (Vec::new(), 0);
    for &place in &order {
        let own = &buffers[place].steps;
        let meets = |other: &&usize| buffers[**other].steps.start < own.end && own.start < buffers[**other].steps.end;
        let mut taken: Vec<(u64, u64)> = placed.iter().filter(meets).map(|&other| (offsets[other], offsets[other] + size(other))).collect();
        taken.sort_unstable();
        let mut offset = 0;
        for (first, last) in taken {
            if first >= offset + size(place) {
                break;
            }
            offset = offset.max(last);
        }
        offsets[place] = offset;
        end = end.max(offset + size(place));
        placed.push(place);
    }
    (offsets, end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_that_live_together_lie_apart() {
        let life = |bytes, steps| Lifetime { bytes, steps };
        let buffers = [life(1000, 0..2), life(500, 1..3), life(1000, 2..4), life(300, 0..4), life(0, 3..4)];
        let (offsets, end) = place(&buffers);
        for (i, a) in buffers.iter().enumerate() {
            for (j, b) in buffers.iter().enumerate().skip(i + 1) {
                let together = a.steps.start < b.steps.end && b.steps.start < a.steps.end;
                let apart = offsets[i] + a.bytes <= offsets[j] || offsets[j] + b.bytes <= offsets[i];
                assert!(!together || apart, "{i} and {j}");
            }
        }
        assert_eq!(offsets[0], offsets[2], "one after the other in the same place");
        assert_eq!(end, 1024 + 512 + 512);
    }
}
