//! Whether a row has the same bits alone and in the company that a device promises to bear: drafts behind it, of which any number is committed, and rows of other sessions.

use super::{
    Outcome,
    build::Case,
    cuts::{Results, can_be_cut},
    plan::{CallPlan, Piece, Plan, exact_divisor},
    rng::Rng,
    session::{Cancel, Session},
};
use crate::{Checked, Device, DeviceError, KvType, Name, Slot, SlotData, State};
use half::f16;
use std::collections::BTreeMap;

const SESSIONS: usize = 3;
/// Rows of each session that are computed in several ways.
const ROWS: usize = 12;
/// Rows that sessions have before: next to the edges of pages, of blocks of keys, and of whatever else a device divides keys by.
const BEFORE: [usize; 11] = [0, 3, 52, 60, 64, 117, 124, 250, 300, 507, 1020];
const LONG: usize = 4090;

pub(crate) fn judge(device: &dyn Device, case: &Case, rng: &mut Rng, calls: &mut String) -> Outcome {
    let program = match Checked::new(case.program.clone()) {
        Ok(program) => program,
        Err(e) => return Outcome::Failed(format!("the suite's own program is wrong: {e}")),
    };
    let mut before = [(); SESSIONS].map(|()| if program.slots.is_empty() { 0 } else { rng.pick(&BEFORE) });
    // Long sessions have their own cases.
    if case.rows.most > 200 {
        before[0] = LONG;
    }
    *calls = format!("sessions of {before:?} rows and {ROWS} more");
    match compare(device, case, &program, before, rng) {
        Ok(()) => Outcome::Passed { worst: 0.0 },
        Err(reason) => Outcome::Failed(reason),
    }
}

/// Some calls that compute all rows of the sessions, and what they are like.
type Way = (String, Vec<CallPlan>);

fn compare(device: &dyn Device, case: &Case, program: &Checked, before: [usize; SESSIONS], rng: &mut Rng) -> Result<(), String> {
    let step = program.limits().segment_step * case.rows.multiple * exact_divisor(program);
    let ways: Vec<Way> = match can_be_cut(program) {
        true => cut(before, step),
        // What a row is depends on the others of its segment: these stay together.
        false => whole(case, step),
    };
    let plan = Plan { sessions: SESSIONS, calls: ways.iter().flat_map(|(_, calls)| calls.clone()).collect() };
    let mut session = Session::new(device, case, program, &plan).map_err(|e| e.to_string())?;
    let promised = session.executable.invariant_rows();
    if promised == 0 || !session.executable.commits_partly() {
        return Err("the device promises nothing about rows in company".into());
    }
    let contents = before.map(|rows| content(program, rows, rng));
    let mut expected: Option<[Results; SESSIONS]> = None;
    for (way, mut calls) in ways {
        // With more rows than that, some have to be drafts.
        calls.iter_mut().for_each(|call| call.partial |= call.rows > promised);
        let found = results(&mut session, &contents, before, &calls).map_err(|e| format!("{way}: {e}"))?;
        let Some(expected) = &expected else {
            expected = Some(found);
            continue;
        };
        for (number, (expected, found)) in expected.iter().zip(&found).enumerate() {
            expected.same_bits(found).map_err(|what| format!("{way}: session {number} has other bits than alone in {what}"))?;
        }
    }
    Ok(())
}

/// Row by row, each session for itself; then in company.
fn cut(before: [usize; SESSIONS], step: usize) -> Vec<Way> {
    // Each session goes on by pieces of so many rows, of which so many count; several sessions side by side.
    let way = |name: String, together: bool, sizes: [(usize, usize); SESSIONS]| {
        let (mut done, mut calls) = ([0; SESSIONS], Vec::new());
        while let Some(first) = (0..SESSIONS).find(|&session| done[session] < ROWS) {
            let mut pieces = Vec::new();
            for session in first..if together { SESSIONS } else { first + 1 } {
                let left = ROWS - done[session];
                if left == 0 {
                    continue;
                }
                let (rows, commit) = (sizes[session].0.min(left), sizes[session].1.min(left));
                pieces.push((session, before[session] + done[session] * step, rows * step, commit * step));
                done[session] += commit;
            }
            let drafts = sizes.iter().any(|(rows, _)| *rows > 1);
            calls.push(call(calls.len(), &pieces, drafts));
        }
        (name, calls)
    };
    let mut ways = vec![way("alone".into(), false, [(1, 1); SESSIONS])];
    for rows in 2..=9 {
        ways.push(way(format!("{rows} rows at once"), false, [(rows, rows); SESSIONS]));
    }
    ways.push(way("9 rows, of which 4 count".into(), false, [(9, 4); SESSIONS]));
    ways.push(way("side by side".into(), true, [(1, 1); SESSIONS]));
    for sizes in [[(1, 1), (4, 4), (9, 9)], [(2, 1), (8, 3), (1, 1)], [(5, 5), (1, 1), (3, 1)]] {
        ways.push(way(format!("side by side, so many rows, of which so many count: {sizes:?}"), true, sizes));
    }
    ways
}

/// Each session's rows alone; then all of them in one call, in any order.
fn whole(case: &Case, step: usize) -> Vec<Way> {
    let rows = [3, 1, 9].map(|rows: usize| rows.max(case.rows.least).next_multiple_of(step));
    let piece = |session: usize| (session, 0, rows[session], rows[session]);
    let alone = (0..SESSIONS).map(|session| call(session, &[piece(session)], false)).collect();
    let all = |order: [usize; SESSIONS]| (format!("all in one call, {order:?}"), vec![call(0, &order.map(piece), false)]);
    vec![("alone".into(), alone), all([0, 1, 2]), all([2, 0, 1])]
}

/// A call of pieces: session, first row, rows, how many of them count.
fn call(number: usize, pieces: &[(usize, usize, usize, usize)], partial: bool) -> CallPlan {
    let mut first_row = 0;
    let place = |&(session, from, rows, commit): &(usize, usize, usize, usize)| {
        let piece = Piece { session, from, first_row, rows, commit: Some(commit) };
        first_row += rows;
        piece
    };
    let pieces = pieces.iter().map(place).collect();
    CallPlan { number, rows: first_row, pieces, all_wanted: true, partial }
}

/// What the slots of a session of so many rows could contain.
fn content(program: &Checked, rows: usize, rng: &mut Rng) -> BTreeMap<Name, SlotData> {
    let kv = |rng: &mut Rng, dtype: KvType, count: usize| -> Vec<u8> {
        let numbers = rng.normals(count, 1.0).into_iter();
        match dtype {
            KvType::F32 => numbers.flat_map(f32::to_le_bytes).collect(),
            KvType::F16 => numbers.flat_map(|n| f16::from_f32(n).to_le_bytes()).collect(),
        }
    };
    let content = |slot: &Slot, rng: &mut Rng| match *slot {
        Slot::Kv { kv_heads, head_dim, dtype, .. } => {
            let count = rows * kv_heads * head_dim;
            SlotData::Kv { dtype, rows, keys: kv(rng, dtype, count), values: kv(rng, dtype, count) }
        }
        Slot::Fifo { rows, channels } => SlotData::Recurrent(rng.normals(rows * channels, 1.0)),
        Slot::Delta { heads, key_dim, value_dim } => SlotData::Recurrent(rng.normals(heads * key_dim * value_dim, 0.3)),
    };
    program.slots.iter().map(|(name, slot)| (name.clone(), content(slot, rng))).collect()
}

/// Runs calls from the same states on.
fn results(
    session: &mut Session<'_>,
    contents: &[BTreeMap<Name, SlotData>; SESSIONS],
    before: [usize; SESSIONS],
    calls: &[CallPlan],
) -> Result<[Results; SESSIONS], DeviceError> {
    for (number, content) in contents.iter().enumerate() {
        let mut state: Box<dyn State> = session.new_state()?;
        if before[number] > 0 {
            content.iter().try_for_each(|(name, data)| state.import(name, data))?;
            state.set_len(before[number])?;
        }
        session.states[number] = state;
    }
    let mut results = [(); SESSIONS].map(|()| Results::default());
    for call in calls {
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
