//! The static memory plan: which buffers share which bytes of the arena, from the steps between which each is needed.

/// A buffer and the steps, first and last, that need it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Buffer {
    /// Size in f32 numbers for the largest call.
    pub(crate) numbers: usize,
    /// The step that fills it.
    pub(crate) first: usize,
    /// The last step that reads it.
    pub(crate) last: usize,
}

/// Buffers start at multiples of this many numbers: a cache line.
const LINE: usize = 16;

/// Gives each buffer a place, such that buffers needed at the same time do not overlap; and the size of the whole. `None` where that overflows.
///
/// Large ones first, each at the lowest gap that fits: simple, and close to the least that is possible for layered models.
pub(crate) fn plan(buffers: &[Buffer]) -> Option<(Vec<usize>, usize)> {
    let mut order: Vec<usize> = (0..buffers.len()).collect();
    order.sort_by_key(|&b| (std::cmp::Reverse(buffers[b].numbers), buffers[b].first));
    let mut offsets = vec![0; buffers.len()];
    let mut placed: Vec<usize> = Vec::new();
    let mut total = 0usize;
    for b in order {
        let buffer = buffers[b];
        let together = |&&other: &&usize| buffers[other].first <= buffer.last && buffer.first <= buffers[other].last;
        let mut taken: Vec<(usize, usize)> =
            placed.iter().filter(together).map(|&o| (offsets[o], offsets[o] + buffers[o].numbers)).collect();
        taken.sort_unstable();
        let mut at = 0usize;
        for (start, end) in taken {
            if at.checked_add(buffer.numbers)? <= start {
                break;
            }
            at = at.max(end.checked_next_multiple_of(LINE)?);
        }
        offsets[b] = at;
        total = total.max(at.checked_add(buffer.numbers)?);
        placed.push(b);
    }
    Some((offsets, total.checked_next_multiple_of(LINE)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn live_buffers_do_not_overlap_and_dead_ones_are_reused() {
        let mut state = 7u64;
        let mut draw = |n: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % n
        };
        for _ in 0..200 {
            let buffers: Vec<Buffer> = (0..30)
                .map(|_| {
                    let first = draw(40) as usize;
                    Buffer { numbers: 1 + draw(1000) as usize, first, last: first + draw(8) as usize }
                })
                .collect();
            let (offsets, total) = plan(&buffers).unwrap();
            for (i, a) in buffers.iter().enumerate() {
                assert!(offsets[i] % LINE == 0 && offsets[i] + a.numbers <= total);
                for (j, b) in buffers.iter().enumerate().skip(i + 1) {
                    let apart = offsets[i] + a.numbers <= offsets[j] || offsets[j] + b.numbers <= offsets[i];
                    assert!(apart || a.last < b.first || b.last < a.first);
                }
            }
        }
        let chain: Vec<Buffer> = (0..50).map(|i| Buffer { numbers: 160, first: i, last: i + 1 }).collect();
        assert_eq!(plan(&chain).unwrap().1, 320);
        assert!(plan(&[Buffer { numbers: usize::MAX, first: 0, last: 1 }; 2]).is_none());
    }
}
