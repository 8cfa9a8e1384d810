//! Whether the results of a session depend on how its rows are cut into calls, or on who else is in them.

use super::{
    Outcome,
    build::Case,
    plan::{CallPlan, Piece, Plan, exact_divisor},
    rng::Rng,
    session::{Cancel, Made, Session},
};
use crate::{Checked, Device, DeviceError, Mask, Name, OpKind, SlotData};
use std::collections::BTreeMap;

/// Runs the rows of two sessions, cut in several ways, and demands the same bits of outputs, taps and states.
pub(crate) fn judge(device: &dyn Device, case: &Case, rng: &mut Rng, calls: &mut String) -> Outcome {
    let program = match Checked::new(case.program.clone()) {
        Ok(program) => program,
        Err(e) => return Outcome::Failed(format!("the suite's own program is wrong: {e}")),
    };
    let step = program.limits().segment_step * case.rows.multiple * exact_divisor(&program);
    let lengths: &[usize] = match program.slots.is_empty() {
        true => &[20, 40],
        // Keys and recurrent rows are taken by blocks of whatever length.
        false if case.rows.most > 200 => &[70, 530, 600],
        false => &[40, 80, 140],
    };
    let rows = [0, 1].map(|_| rng.pick(lengths).max(case.rows.least).next_multiple_of(step));
    *calls = format!("sessions of {} and {} rows", rows[0], rows[1]);
    match compare(device, case, &program, rows, step) {
        Ok(()) => Outcome::Passed { worst: 0.0 },
        Err(reason) => Outcome::Failed(reason),
    }
}

/// Rows of a session in a call: which session, its first row, how many.
type SessionRows = (usize, usize, usize);
/// The calls that compute all rows of the sessions.
type Calls = Vec<Vec<SessionRows>>;

fn compare(device: &dyn Device, case: &Case, program: &Checked, rows: [usize; 2], step: usize) -> Result<(), String> {
    let alone = |session: usize, size: usize| pieces(rows[session], size).map(move |(from, rows)| vec![(session, from, rows)]);
    let whole = alone(0, rows[0]).chain(alone(1, rows[1])).collect();
    let expected = results(device, case, program, whole).map_err(|e| e.to_string())?;
    let mut ways: Vec<(String, Calls)> = vec![];
    for order in [[0, 1], [1, 0]] {
        let both = order.map(|session| (session, 0, rows[session])).to_vec();
        ways.push((format!("both whole, session {} first", order[0]), vec![both]));
    }
    if can_be_cut(program) {
        for size in [1, 3, 64] {
            let size = size * step;
            ways.push((format!("cut by {size}"), alone(0, size).chain(alone(1, size)).collect()));
        }
        // Side by side: one in small pieces, the other in large ones.
        for sizes in [[step, 100 * step], [5 * step, 2 * step]] {
            let mut cuts = [0, 1].map(|session| pieces(rows[session], sizes[session]));
            let next = || -> Option<Vec<SessionRows>> {
                let some: Vec<_> = [0, 1].into_iter().filter_map(|s| cuts[s].next().map(|(from, rows)| (s, from, rows))).collect();
                (!some.is_empty()).then_some(some)
            };
            ways.push((format!("side by side, cut by {sizes:?}"), std::iter::from_fn(next).collect()));
        }
    }
    for (way, calls) in ways {
        let found = results(device, case, program, calls).map_err(|e| format!("{way}: {e}"))?;
        for (session, (expected, found)) in expected.iter().zip(&found).enumerate() {
            expected.same_bits(found).map_err(|what| format!("{way}: session {session} has other bits than alone and whole in {what}"))?;
        }
    }
    Ok(())
}

/// `rows` rows in pieces of `size`.
fn pieces(rows: usize, size: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).step_by(size).map(move |from| (from, (rows - from).min(size)))
}

/// Whether a row's result is stated by the rows before it: not where an op joins rows of a segment without a state that goes on, or looks ahead.
pub(super) fn can_be_cut(program: &Checked) -> bool {
    program.ops.iter().all(|op| match &op.op {
        OpKind::Attend { slot, mask, .. } => slot.is_some() && *mask != Mask::Full,
        OpKind::ShortConv { slot, .. } => slot.is_some(),
        OpKind::Conv2d { .. } | OpKind::Pool { .. } => false,
        _ => true,
    })
}

/// All that a session gave.
#[derive(Default)]
pub(super) struct Results {
    /// Outputs and taps, row after row.
    numbers: BTreeMap<String, Vec<f32>>,
    pub(super) slots: BTreeMap<Name, SlotData>,
}

impl Results {
    /// Adds what a call made of those rows of a session that count.
    pub(super) fn add(&mut self, call: &CallPlan, piece: &Piece, made: &Made) {
        // One row of a value may stand for several of the call.
        let Some(per_row) = call.rows.checked_div(made.numbers.len() / made.width) else { return };
        let counted = piece.commit.unwrap_or(piece.rows);
        let rows = piece.first_row / per_row * made.width..(piece.first_row + counted) / per_row * made.width;
        self.numbers.entry(made.name.clone()).or_default().extend(&made.numbers[rows]);
    }

    pub(super) fn same_bits(&self, other: &Self) -> Result<(), String> {
        for (name, numbers) in &self.numbers {
            let found = other.numbers.get(name).map_or(&[][..], Vec::as_slice);
            if found.len() != numbers.len() {
                return Err(format!("{name}: {} numbers, not {}", found.len(), numbers.len()));
            }
            if let Some(at) = numbers.iter().zip(found).position(|(a, b)| a.to_bits() != b.to_bits()) {
                return Err(format!("{name}: number {at} is {:e}, not {:e}", found[at], numbers[at]));
            }
        }
        let slot = self.slots.keys().find(|name| self.slots.get(*name) != other.slots.get(*name));
        slot.map_or(Ok(()), |name| Err(format!("slot `{name}`")))
    }
}

/// Runs calls, each of which takes rows `(session, from, rows)` of one or both sessions.
fn results(device: &dyn Device, case: &Case, program: &Checked, calls: Calls) -> Result<[Results; 2], DeviceError> {
    let call = |(number, pieces): (usize, Vec<SessionRows>)| {
        let mut first_row = 0;
        let place = |(session, from, rows)| {
            let piece = Piece { session, from, first_row, rows, commit: Some(rows) };
            first_row += rows;
            piece
        };
        let pieces = pieces.into_iter().map(place).collect();
        CallPlan { number, rows: first_row, pieces, all_wanted: true, partial: false }
    };
    let plan = Plan { sessions: 2, calls: calls.into_iter().enumerate().map(call).collect() };
    let mut session = Session::new(device, case, program, &plan)?;
    let mut results = [(); 2].map(|()| Results::default());
    for call in &plan.calls {
        for made in session.run(call, 0, Cancel::Never)? {
            call.pieces.iter().for_each(|piece| results[piece.session].add(call, piece, &made));
        }
        session.commit(call)?;
    }
    for (number, results) in results.iter_mut().enumerate() {
        results.slots = session.export(number)?;
    }
    Ok(results)
}
