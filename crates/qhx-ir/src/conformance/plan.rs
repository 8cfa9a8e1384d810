//! The calls of a case: which rows of which sessions, in which segments, with which padding; and their inputs.

use super::{
    Options,
    build::{Case, Fill, RowRules},
    rng::Rng,
};
use crate::{Bindings, Checked, Dim, InputData, Slot};

/// One call.
#[derive(Clone, Debug)]
pub(crate) struct CallPlan {
    pub(crate) number: usize,
    /// `T`, padding included.
    pub(crate) rows: usize,
    pub(crate) pieces: Vec<Piece>,
    /// Whether all valid rows are wanted, in order; else some are drawn.
    pub(crate) all_wanted: bool,
    /// Whether fewer rows than all may be committed with recurrent slots.
    pub(crate) partial: bool,
}

/// One segment: rows `from .. from + rows` of a session, at `first_row` of the call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) session: usize,
    pub(crate) from: usize,
    pub(crate) first_row: usize,
    pub(crate) rows: usize,
    /// How many of them are committed; none: its session has no use for the call any more, while others have.
    pub(crate) commit: Option<usize>,
}

/// All calls of a case, and how many sessions they serve.
pub(crate) struct Plan {
    pub(crate) sessions: usize,
    pub(crate) calls: Vec<CallPlan>,
}

impl Plan {
    pub(crate) fn draw(rng: &mut Rng, case: &Case, program: &Checked, options: &Options) -> Self {
        let crowd = options.max_segments > 3 && rng.one_in(5);
        let sessions = match crowd {
            true => rng.between(4, options.max_segments),
            false if rng.one_in(2) => 1,
            false => rng.between(1, options.max_segments.clamp(1, 3)),
        };
        let stateful = !program.slots.is_empty();
        let recurrent = program.slots.values().any(Slot::is_recurrent);
        let partial = stateful && (!recurrent || options.partial_commits) && rng.one_in(4);
        let padded = rng.one_in(3);
        let (step, rules) = (program.limits().segment_step, case.rows);
        let mut next = vec![0; sessions];
        let calls = rng.between(1, rules.calls);
        let calls = (0..calls).map(|number| {
            let mut pieces = Vec::new();
            let mut row = 0;
            let first = rng.below(sessions);
            for i in 0..rng.between(1, sessions) {
                if padded && rng.one_in(2) {
                    row += rng.below(4);
                }
                let session = (first + i) % sessions;
                row = row.next_multiple_of(step);
                let rows = match crowd {
                    // Many sessions that decode, and some that have just begun.
                    true if next[session] > 0 => 1,
                    true => rng.between(rules.least, rules.most.min(rules.least + 8)),
                    false => draw_rows(rng, next[session] == 0, &rules),
                };
                let rows = rows.next_multiple_of(rules.multiple);
                let commit = match partial {
                    true => Some(rng.between(0, rows)),
                    false => Some(rows).filter(|_| !stateful || !rng.one_in(12)),
                };
                pieces.push(Piece { session, from: next[session], first_row: row, rows, commit });
                next[session] += commit.unwrap_or(0);
                row += rows;
            }
            if padded {
                row += rng.below(8);
            }
            CallPlan { number, rows: row.next_multiple_of(exact_divisor(program)), pieces, all_wanted: false, partial }
        });
        Self { sessions, calls: calls.collect() }
    }

    /// The most rows a session is ever asked to hold.
    pub(crate) fn context(&self) -> usize {
        self.calls.iter().flat_map(|c| &c.pieces).map(|p| p.from + p.rows).max().unwrap_or(0)
    }
}

/// Prefill is usually long; later calls are short, mostly single rows.
fn draw_rows(rng: &mut Rng, first: bool, rules: &RowRules) -> usize {
    let rows = match rng.below(if first { 4 } else { 8 }) {
        0 => rng.between(2, 9),
        1 | 2 if first => rng.between(1, rules.most),
        3 => rng.between(1, rules.most),
        4 => rng.pick(&[16, 17, 31, 32, 33]),
        _ => 1,
    };
    rows.clamp(if first { rules.least } else { 1 }, rules.most)
}

/// What `T` must be a multiple of.
pub(crate) fn exact_divisor(program: &Checked) -> usize {
    let values = program.ops.iter().flat_map(|op| op.outputs());
    let divisors = values.flat_map(|value| program.value_type(&value).shape.clone()).filter_map(|dim| match dim {
        Dim::Exact(_, n) => Some(n),
        _ => None,
    });
    divisors.fold(1, |a, b| if a % b == 0 { a } else { a * b })
}

/// An input's data.
pub(crate) enum Owned {
    F32(Vec<f32>),
    I32(Vec<i32>),
}

impl Owned {
    pub(crate) fn data(&self) -> InputData<'_> {
        match self {
            Self::F32(x) => InputData::F32(x),
            Self::I32(x) => InputData::I32(x),
        }
    }
}

/// The inputs of a call. A row depends only on the case, the session and its index (and on `salt`, for calls whose results
/// must leave no trace), so that any division into calls feeds the same rows. Padding rows contain large garbage.
pub(crate) fn inputs(case: &Case, program: &Checked, plan: &CallPlan, salt: u64) -> (Bindings, Vec<Owned>) {
    let stream = |place: usize, session: usize, row: usize| Rng::new(&[case.seed, salt, place as u64, session as u64, row as u64]);
    let valid: Vec<(usize, usize, usize)> =
        plan.pieces.iter().flat_map(|p| (0..p.rows).map(move |i| (p.first_row + i, p.session, p.from + i))).collect();
    let is_soft = |session, row| case.soft_one_in > 0 && stream(1000, session, row).one_in(case.soft_one_in);
    let soft: Vec<_> = valid.iter().copied().filter(|&(_, session, row)| is_soft(session, row)).collect();
    let mut rng = Rng::new(&[case.seed, salt, 2000, plan.number as u64]);
    let mut wanted: Vec<i32> = valid.iter().map(|v| v.0 as i32).collect();
    match rng.below(4) {
        _ if plan.all_wanted => {}
        0 => wanted = wanted.split_off(wanted.len() - 1),
        1 => wanted.retain(|_| rng.one_in(3)),
        // A chunk of a prompt before its last: none of its rows are wanted.
        2 => wanted.clear(),
        _ => {}
    }
    let bindings = Bindings { rows: plan.rows, soft_rows: soft.len(), wanted: wanted.len() };
    let mut all = Vec::new();
    for (place, (input, &fill)) in program.inputs.iter().zip(&case.fills).enumerate() {
        let width: usize = input.shape[1..].iter().map(|d| d.bind(&bindings).expect("the suite's inputs have no quotients")).product();
        let integers = |below: usize, distinct: bool| {
            let mut y: Vec<i32> = (0..plan.rows * width).map(|i| (i % width % below) as i32).collect();
            for &(at, session, row) in &valid {
                let mut rng = stream(place, session, row);
                let mut left: Vec<i32> = (0..below as i32).collect();
                for y in &mut y[at * width..][..width] {
                    let i = rng.below(left.len());
                    *y = if distinct { left.swap_remove(i) } else { left[i] };
                }
            }
            Owned::I32(y)
        };
        all.push(match fill {
            Fill::Rows(f) => {
                let mut y: Vec<f32> = (0..plan.rows * width).map(|_| rng.normal() * 1e3).collect();
                valid.iter().for_each(|&(at, session, row)| f(&mut stream(place, session, row), &mut y[at * width..][..width]));
                Owned::F32(y)
            }
            Fill::Index(below) => integers(below, false),
            Fill::Choice(below) => integers(below, true),
            Fill::Positions(random) => {
                let streams = input.shape[0].bind(&bindings).expect("a number");
                let mut y = vec![0; streams * plan.rows];
                for &(at, session, row) in &valid {
                    let mut rng = stream(place, session, row);
                    (0..streams).for_each(|s| y[s * plan.rows + at] = random.map_or(row, |below| rng.below(below)) as i32);
                }
                Owned::I32(y)
            }
            Fill::SoftRows => {
                Owned::F32(soft.iter().flat_map(|&(_, session, row)| stream(place, session, row).normals(width, 1.0)).collect())
            }
            Fill::SoftAt => Owned::I32(soft.iter().map(|s| s.0 as i32).collect()),
            Fill::Wanted => Owned::I32(wanted.clone()),
            Fill::Held(there, mask) => {
                let experts = input.shape[0].bind(&bindings).expect("a number");
                let mut places = (0..there as i32).rev();
                Owned::I32((0..experts).map(|expert| if mask >> expert & 1 == 0 { -1 } else { places.next().unwrap_or(-1) }).collect())
            }
        });
    }
    (bindings, all)
}
