//! Seeded randomness, the same on every machine.

use qhx_runtime::sample::random::mix;

/// SplitMix64.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// The generator of one case: equal for equal arguments, unrelated for any others.
    pub(crate) fn of_case(seed: u64, class: &str, number: u64) -> Self {
        let mut state = Self(seed);
        for byte in class.bytes() {
            state.0 = state.next() ^ u64::from(byte);
        }
        state.0 = state.next() ^ number;
        state.next();
        state
    }

    /// The next 64 bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `n`; 0 where there is none.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        if n == 0 { 0 } else { (self.next() % n as u64) as usize }
    }

    /// True once in `n` times.
    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// One of these.
    pub(crate) fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }

    /// One of these words.
    pub(crate) fn word<'a>(&mut self, words: &[&'a str]) -> &'a str {
        words[self.below(words.len())]
    }

    /// A length that is usually small, sometimes as large as `most`: each power of two is as likely as the next.
    pub(crate) fn length(&mut self, most: usize) -> usize {
        let bits = usize::BITS - most.leading_zeros();
        let limit = 1usize << self.below(bits as usize + 1);
        self.below(limit.min(most)) + 1
    }
}
