//! Tests a device on one case: runs its calls next to the reference's, with interruptions that must leave no trace.

use super::{
    Options, Outcome,
    build::Case,
    compare::{Bound, compare, slot_rows},
    plan::{CallPlan, Plan},
    rng::Rng,
    session::{self, Cancel, Session},
};
use crate::{Checked, Device, DeviceError, Name, SlotData, State, reference::ReferenceDevice};
use std::collections::BTreeMap;

/// What happens before a call that both devices then run.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Trouble {
    None,
    /// Another call runs and is not committed.
    Discard,
    /// The call is cancelled before it starts.
    Cancel,
    /// The call is cancelled when the first stage is done.
    CancelInside,
    /// The last call is undone and repeated.
    Redo,
    /// A copy continues differently; then a second copy takes over.
    Fork,
    /// The state moves to a fresh one of the same device.
    Move,
    /// The state moves to the device from the reference.
    FromReference,
    /// The state moves to the reference from the device.
    ToReference,
}

const TROUBLES: [Trouble; 9] = [
    Trouble::None,
    Trouble::Discard,
    Trouble::Cancel,
    Trouble::CancelInside,
    Trouble::Redo,
    Trouble::Fork,
    Trouble::Move,
    Trouble::FromReference,
    Trouble::ToReference,
];

/// A salt for inputs whose results must leave no trace.
const ELSEWHERE: u64 = 77;

/// Runs the case; writes to `calls` which plan was drawn.
pub(crate) fn judge(device: &dyn Device, case: &Case, rng: &mut Rng, options: &Options, calls: &mut String) -> Outcome {
    let program = match Checked::new(case.program.clone()) {
        Ok(program) => program,
        Err(e) => return Outcome::Failed(format!("the suite's own program is wrong: {e}")),
    };
    let plan = Plan::draw(rng, case, &program, options);
    let troubles: Vec<Trouble> = plan.calls.iter().map(|_| if rng.one_in(2) { rng.pick(&TROUBLES) } else { Trouble::None }).collect();
    *calls = describe(&plan, &troubles);
    if let Some(refusal) = program.ops.iter().find_map(|op| device.accepts(&program, op).err()) {
        return Outcome::Refused(refusal.to_string());
    }
    match both(device, case, &program, &plan, &troubles, options) {
        Ok(worst) => Outcome::Passed { worst },
        Err(Stop::Refused(reason)) => Outcome::Refused(reason),
        Err(Stop::Wrong(reason)) => Outcome::Failed(reason),
    }
}

/// A call, and the content of all sessions before it.
struct Before<'p> {
    call: &'p CallPlan,
    exports: Vec<BTreeMap<Name, SlotData>>,
}

enum Stop {
    Refused(String),
    Wrong(String),
}

impl From<String> for Stop {
    fn from(reason: String) -> Self {
        Self::Wrong(reason)
    }
}

fn both(device: &dyn Device, case: &Case, program: &Checked, plan: &Plan, troubles: &[Trouble], options: &Options) -> Result<f64, Stop> {
    let mut reference = Session::new(&ReferenceDevice, case, program, plan).map_err(|e| format!("the reference does not load: {e}"))?;
    let mut session = Session::new(device, case, program, plan).map_err(|e| match e {
        DeviceError::Refused { .. } => Stop::Refused(e.to_string()),
        _ => Stop::Wrong(format!("does not load: {e}")),
    })?;
    if options.partial_commits && !session.executable.commits_partly() {
        return Err(Stop::Wrong("recurrent slots cannot commit a part of a call's rows".into()));
    }
    let factor = options.tolerance_factor;
    let bound = Bound { tolerance: options.tolerance(case), floor: case.floor, flips: case.flips.map(|f| f * factor.max(1.0)) };
    let mut worst = 0.0f64;
    let mut previous = None;
    for (number, call) in plan.calls.iter().enumerate() {
        let at = |e: String| format!("call {number}: {e}");
        trouble(troubles[number], &mut session, &mut reference, call, previous.as_ref())
            .map_err(|e| at(format!("{:?}: {e}", troubles[number])))?;
        let exports = (0..plan.sessions).map(|n| session.export(n)).collect::<Result<_, _>>();
        previous = Some(Before { call, exports: exports.map_err(|e| at(text(e)))? });
        let expected = reference.run(call, 0, Cancel::Never).map_err(|e| at(format!("the reference fails: {e}")))?;
        let found = session.run(call, 0, Cancel::Never).map_err(|e| at(format!("fails: {e}")))?;
        worst = worst.max(compare(&expected, &found, bound).map_err(at)?);
        if options.repeats {
            session.wants(call, number as u64).map_err(at)?;
        }
        reference.commit(call).map_err(|e| at(format!("the reference does not commit: {e}")))?;
        session.commit(call).map_err(|e| at(format!("does not commit: {e}")))?;
    }
    for number in 0..plan.sessions {
        let at = |e: String| format!("session {number} at the end: {e}");
        worst = worst.max(compare_states(&reference, &session, number, bound).map_err(at)?);
    }
    Ok(worst)
}

fn compare_states(reference: &Session<'_>, session: &Session<'_>, number: usize, bound: Bound) -> Result<f64, String> {
    let len = reference.states[number].len();
    if session.states[number].len() != len {
        return Err(format!("{} rows are committed, expected {len}", session.states[number].len()));
    }
    let (expected, found) = (reference.export(number).map_err(text)?, session.export(number).map_err(text)?);
    let mut worst = 0.0f64;
    for (name, expected) in &expected {
        let [expected, found] = [expected, &found[name]].map(|data| slot_rows(&reference.program, name, data, len));
        worst = worst.max(compare(&expected?, &found?, bound)?);
    }
    Ok(worst)
}

fn text(e: DeviceError) -> String {
    e.to_string()
}

fn trouble(
    trouble: Trouble,
    session: &mut Session<'_>,
    reference: &mut Session<'_>,
    call: &CallPlan,
    previous: Option<&Before<'_>>,
) -> Result<(), String> {
    let stateful = !session.program.slots.is_empty();
    let cancelled = |session: &mut Session<'_>, cancel| match session.run(call, ELSEWHERE, cancel) {
        Err(DeviceError::Cancelled) => Ok(()),
        Err(e) => Err(format!("expected `cancelled`, found: {e}")),
        // A device may be done with the last op when the flag is seen.
        Ok(_) if cancel == Cancel::AtFirstTap => Ok(()),
        Ok(_) => Err("the call was run to its end".into()),
    };
    match trouble {
        Trouble::None => Ok(()),
        Trouble::Discard => session.run(call, ELSEWHERE, Cancel::Never).map(drop).map_err(text),
        Trouble::Cancel => cancelled(session, Cancel::BeforeStart),
        Trouble::CancelInside => cancelled(session, Cancel::AtFirstTap),
        _ if !stateful => Ok(()),
        Trouble::Redo => previous.map_or(Ok(()), |previous| redo(session, previous)),
        Trouble::Fork => fork(session, call),
        Trouble::Move => (0..session.states.len()).try_for_each(|number| {
            let (before, fresh) = (session.export(number).map_err(text)?, session.new_state().map_err(text)?);
            session.states[number] = moved(session, number, fresh)?;
            let after = session.export(number).map_err(text)?;
            if visible(session, number, &before)? == visible(session, number, &after)? {
                Ok(())
            } else {
                Err("the copy's export differs".into())
            }
        }),
        Trouble::FromReference => (0..session.states.len()).try_for_each(|number| {
            let fresh = session.new_state().map_err(text)?;
            session.states[number] = moved(reference, number, fresh)?;
            Ok(())
        }),
        Trouble::ToReference => (0..session.states.len()).try_for_each(|number| {
            let fresh = reference.new_state().map_err(text)?;
            reference.states[number] = moved(session, number, fresh)?;
            Ok(())
        }),
    }
}

/// `fresh` with what `session` holds.
fn moved(session: &Session<'_>, number: usize, mut fresh: Box<dyn State>) -> Result<Box<dyn State>, String> {
    let len = session.states[number].len();
    session::copy(&session.program, &*session.states[number], &mut *fresh).map_err(text)?;
    match fresh.len() == len {
        true => Ok(fresh),
        false => Err(format!("set_len({len}) left {} rows", fresh.len())),
    }
}

/// The part of an export that the next call can see, bit for bit.
fn visible(session: &Session<'_>, number: usize, slots: &BTreeMap<Name, SlotData>) -> Result<Vec<(String, Vec<u32>)>, String> {
    let len = session.states[number].len();
    let rows = slots.iter().map(|(name, data)| slot_rows(&session.program, name, data, len)).collect::<Result<Vec<_>, _>>()?;
    Ok(rows.into_iter().flatten().map(|m| (m.name, m.numbers.iter().map(|x| x.to_bits()).collect())).collect())
}

/// Undoes the last call, runs something else, undoes that too and repeats the call.
fn redo(session: &mut Session<'_>, previous: &Before<'_>) -> Result<(), String> {
    for salt in [ELSEWHERE, 0] {
        for piece in &previous.call.pieces {
            let state = &mut session.states[piece.session];
            state.truncate(piece.from).map_err(text)?;
            if state.len() != piece.from {
                return Err(format!("truncate({}) left {} rows", piece.from, state.len()));
            }
            // The state does not know its recurrent slots at that length: the caller keeps them.
            let recurrent = previous.exports[piece.session].iter().filter(|(_, data)| matches!(data, SlotData::Recurrent(_)));
            recurrent.into_iter().try_for_each(|(name, data)| state.import(name, data)).map_err(text)?;
        }
        session.run(previous.call, salt, Cancel::Never).map_err(text)?;
        session.commit(previous.call).map_err(text)?;
    }
    Ok(())
}

/// Lets copies continue differently; the first copies then become the session's states.
fn fork(session: &mut Session<'_>, call: &CallPlan) -> Result<(), String> {
    let copies = |states: &[Box<dyn State>]| states.iter().map(|s| s.fork()).collect::<Result<Vec<_>, _>>().map_err(text);
    let kept = copies(&session.states)?;
    let originals = std::mem::replace(&mut session.states, copies(&kept)?);
    session.run(call, ELSEWHERE, Cancel::Never).map_err(text)?;
    session.commit(call).map_err(text)?;
    // The originals must be untouched by what the copies did, and the copies by what the originals do.
    session.states = originals;
    session.run(call, ELSEWHERE + 1, Cancel::Never).map_err(text)?;
    session.commit(call).map_err(text)?;
    session.states = kept;
    Ok(())
}

fn describe(plan: &Plan, troubles: &[Trouble]) -> String {
    let calls = plan.calls.iter().zip(troubles).map(|(call, trouble)| {
        let pieces: Vec<_> = call.pieces.iter().map(|p| format!("{}:{}+{}@{}", p.session, p.from, p.rows, p.first_row)).collect();
        let before = if *trouble == Trouble::None { String::new() } else { format!("{trouble:?} ") };
        format!("{before}T={} [{}]{}", call.rows, pieces.join(" "), if call.partial { ", partly committed" } else { "" })
    });
    format!("calls {}", calls.collect::<Vec<_>>().join(", "))
}
