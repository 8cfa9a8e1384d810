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

/// How many buffers an average buffer may have to be compared with; a model's layers need some ten. Beyond it buffers are put behind all others,
/// so that no program makes planning slow: one with that many values alive at once does not fit into memory either.
const COMPARED: usize = 256;

/// Gives each buffer a place, such that buffers needed at the same time do not overlap; and the size of the whole. `None` where that overflows.
///
/// Large ones first, each at the lowest gap that fits: simple, and close to the least that is possible for layered models.
pub(crate) fn plan(buffers: &[Buffer]) -> Option<(Vec<usize>, usize)> {
    let mut order: Vec<usize> = (0..buffers.len()).collect();
    order.sort_by_key(|&b| (std::cmp::Reverse(buffers[b].numbers), buffers[b].first));
    let mut offsets = vec![0; buffers.len()];
    let mut placed = Placed::new(buffers);
    let mut total = 0usize;
    let mut compared = 0;
    for b in order {
        let buffer = buffers[b];
        let mut at = 0usize;
        if compared > COMPARED.saturating_mul(buffers.len()) {
            at = total.checked_next_multiple_of(LINE)?;
        } else {
            let mut taken: Vec<(usize, usize)> = Vec::new();
            compared += placed.for_each_with(buffer, |other| taken.push((offsets[other], offsets[other] + buffers[other].numbers)));
            taken.sort_unstable();
            for (start, end) in taken {
                if at.checked_add(buffer.numbers)? <= start {
                    break;
                }
                at = at.max(end.checked_next_multiple_of(LINE)?);
            }
            placed.add(b, buffer);
        }
        offsets[b] = at;
        total = total.max(at.checked_add(buffer.numbers)?);
    }
    Some((offsets, total.checked_next_multiple_of(LINE)?))
}

/// The buffers that have a place, found by the steps that need them.
struct Placed {
    /// Steps, each of which is looked at by itself.
    steps: usize,
    /// A segment tree: node `n` covers the steps of nodes `2n` and `2n + 1`, the leaf of step `s` is `steps + s`. A buffer stands at the nodes that
    /// together cover its steps.
    nodes: Vec<Vec<usize>>,
    /// Buffers by their first step.
    first: Vec<Vec<usize>>,
}

impl Placed {
    fn new(buffers: &[Buffer]) -> Self {
        // Outputs are needed after the last step.
        let ends = buffers.iter().flat_map(|buffer| [buffer.first, buffer.last]).filter(|&step| step != usize::MAX);
        let steps = ends.max().map_or(0, |last| last + 1) + 1;
        Self { steps, nodes: vec![Vec::new(); 2 * steps], first: vec![Vec::new(); steps] }
    }

    /// The steps of a buffer; none where no step needs it.
    fn steps_of(&self, buffer: Buffer) -> Option<(usize, usize)> {
        (buffer.first <= buffer.last).then(|| (buffer.first.min(self.steps - 1), buffer.last.min(self.steps - 1)))
    }

    fn add(&mut self, number: usize, buffer: Buffer) {
        let Some((first, last)) = self.steps_of(buffer) else { return };
        self.first[first].push(number);
        let (mut low, mut high) = (self.steps + first, self.steps + last + 1);
        while low < high {
            if low % 2 == 1 {
                self.nodes[low].push(number);
                low += 1;
            }
            if high % 2 == 1 {
                high -= 1;
                self.nodes[high].push(number);
            }
            (low, high) = (low / 2, high / 2);
        }
    }

    /// Tells every buffer that is needed together with this one: those needed at its first step, and those whose first step is a later one of its own.
    /// Gives how many steps that took.
    fn for_each_with(&self, buffer: Buffer, mut tell: impl FnMut(usize)) -> usize {
        let Some((first, last)) = self.steps_of(buffer) else { return 0 };
        let above = std::iter::successors(Some(self.steps + first), |&node| (node > 1).then_some(node / 2));
        let lists = above.map(|node| &self.nodes[node]).chain(&self.first[first + 1..=last]);
        lists.fold(0, |count, list| {
            list.iter().for_each(|&other| tell(other));
            count + 1 + list.len()
        })
    }
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
        let unused = Buffer { numbers: 5, first: usize::MAX, last: 0 };
        let output = Buffer { numbers: 16, first: 3, last: usize::MAX };
        let early = Buffer { numbers: 16, first: 0, last: 2 };
        assert_eq!(plan(&[unused, output, early, Buffer { first: 2, ..early }]).unwrap(), (vec![0, 0, 0, 16], 32));
        assert_eq!(plan(&[]).unwrap(), (vec![], 0));
    }

    /// A model of very many layers, and a program that keeps all it makes: both in the time of a few looks at each buffer.
    #[test]
    fn many_buffers_are_planned_in_linear_time() {
        const COUNT: usize = 200_000;
        let started = std::time::Instant::now();
        let layered: Vec<Buffer> = (0..COUNT).map(|i| Buffer { numbers: 16, first: i, last: i + 8 }).collect();
        assert_eq!(plan(&layered).unwrap().1, 9 * 16);
        let kept: Vec<Buffer> = (0..COUNT).map(|i| Buffer { numbers: 16, first: i, last: COUNT }).collect();
        let (offsets, total) = plan(&kept).unwrap();
        assert_eq!(total, 16 * COUNT);
        assert_eq!(offsets.into_iter().collect::<std::collections::HashSet<_>>().len(), COUNT);
        assert!(started.elapsed() < std::time::Duration::from_secs(15), "{:?}", started.elapsed());
    }
}
