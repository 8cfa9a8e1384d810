//! Sessions on a device that is stopped, fails, or cannot go back: a step that does not come to its end never happened.

use crate::common::{KINDS, Kind, devices::Troubled, ids, parts};
use qhx_runtime::{Cancel, Error, LoadOptions, Model, Session};
use std::sync::Arc;

const CONTEXT: usize = 40;

fn troubled(kind: Kind, chunk: usize) -> (Model, Troubled) {
    let device = Troubled::default();
    let options = LoadOptions { chunk, context: Some(CONTEXT), ..LoadOptions::default() };
    (Model::on_device(parts(kind), Arc::new(device.clone()), &options).unwrap(), device)
}

fn run(session: &mut Session, ids: &[u32]) -> Vec<f32> {
    session.append(ids, &Cancel::new()).unwrap().to_vec()
}

fn fresh(model: &Model, ids: &[u32]) -> Vec<f32> {
    run(&mut model.session().unwrap(), ids)
}

#[test]
fn cancelled_in_any_call_of_a_prefill_or_a_decode() {
    for kind in KINDS {
        for chunk in [3, 16] {
            let (model, device) = troubled(kind, chunk);
            let (start, rest) = (ids(1, 9), ids(2, 21));
            for (first, second) in [(&start[..], &rest[..]), (&[], &rest[..]), (&start[..], &rest[..1]), (&ids(3, 12), &rest[..1])] {
                for call in 1.. {
                    let mut session = model.session().unwrap();
                    if !first.is_empty() {
                        run(&mut session, first);
                    }
                    let before = session.logits().map(<[f32]>::to_vec);
                    let cancel = Cancel::new();
                    device.set(|t| (t.cancel_in_call, t.cancel) = (call, cancel.clone()));
                    let result = session.append(second, &cancel).map(drop);
                    let calls = device.calls();
                    device.set(|t| t.cancel_in_call = 0);
                    if result.is_ok() {
                        assert!(call > calls, "call {call} was stopped and yet the step succeeded");
                        break;
                    }
                    assert!(matches!(result, Err(Error::Cancelled)));
                    assert_eq!(calls, call, "nothing runs after the call that was stopped");
                    assert_eq!((session.ids(), session.logits()), (first, before.as_deref()), "as it was");
                    let expected = fresh(&model, &[first, second].concat());
                    assert_eq!(run(&mut session, second), expected, "{kind:?}, chunk {chunk}, stopped in call {call}, then undisturbed");
                }
            }
        }
    }
}

#[test]
fn a_request_to_stop_is_honoured_before_anything_runs() {
    let (model, device) = troubled(Kind::Dense, 8);
    let mut session = model.session().unwrap();
    let cancel = Cancel::new();
    cancel.cancel();
    assert!(matches!(session.append(&ids(1, 5), &cancel), Err(Error::Cancelled)));
    assert_eq!(device.calls(), 0);
    cancel.clear();
    assert!(session.append(&ids(1, 5), &cancel).is_ok());
}

#[test]
fn stopped_between_two_ops_of_a_call() {
    for kind in KINDS {
        let (model, _) = troubled(kind, 4);
        let (start, rest) = (ids(4, 6), ids(5, 10));
        let mut session = model.session().unwrap();
        run(&mut session, &start);
        let cancel = Cancel::new();
        let mut taps = |first, tap: qhx_ir::Tap<'_>| {
            if first >= 8 && tap.stage == "layers.0.ffn" {
                cancel.cancel();
            }
        };
        let result = session.append_traced(&rest, 1, &cancel, &mut |_, _| {}, &mut taps);
        assert!(matches!(result, Err(Error::Cancelled)));
        assert_eq!(session.ids(), start);
        assert_eq!(run(&mut session, &rest), fresh(&model, &[start, rest].concat()), "{kind:?}");
    }
}

#[test]
fn a_failing_device_leaves_the_session_as_it_was() {
    for kind in KINDS {
        let (model, device) = troubled(kind, 4);
        let (start, rest) = (ids(6, 10), ids(7, 14));
        for call in 1..=3 {
            let mut session = model.session().unwrap();
            run(&mut session, &start);
            device.set(|t| t.fail_in_call = call);
            let error = session.append(&rest, &Cancel::new()).unwrap_err();
            assert!(error.to_string().contains("went away"), "{error}");
            device.set(|t| t.fail_in_call = 0);
            assert_eq!(session.ids(), start);
            assert_eq!(run(&mut session, &rest), fresh(&model, &[&start[..], &rest].concat()), "{kind:?}");
        }
    }
}

#[test]
fn a_stopped_prepare_leaves_the_rows_as_they_were() {
    for kind in KINDS {
        let (model, device) = troubled(kind, 4);
        let (old, tail) = (ids(8, 18), ids(9, 12));
        let new = [&old[..7], &tail].concat();
        let mut session = model.session().unwrap();
        let logits = run(&mut session, &old);
        let cancel = Cancel::new();
        device.set(|t| (t.cancel_in_call, t.cancel) = (2, cancel.clone()));
        assert!(matches!(session.prepare(&new, &cancel), Err(Error::Cancelled)));
        device.set(|t| t.cancel_in_call = 0);
        assert_eq!((session.ids(), session.logits()), (&old[..], Some(&logits[..])), "as it was");
        assert_eq!(run(&mut session, &[5]), fresh(&model, &[&old[..], &[5]].concat()), "{kind:?}: on with the old rows");
        cancel.clear();
        session.prepare(&new, &cancel).unwrap();
        assert_eq!(session.logits().unwrap(), fresh(&model, &new), "{kind:?}: the same prompt again");
    }
}

#[test]
fn a_state_that_cannot_go_back_is_computed_again() {
    for kind in KINDS {
        let (model, device) = troubled(kind, 8);
        let prompt = ids(10, 30);
        for refuse_import in [false, true] {
            let mut session = model.session().unwrap();
            run(&mut session, &prompt);
            device.set(|t| (t.truncate_limit, t.refuse_import) = (Some(4), refuse_import));
            session.rollback(11).unwrap();
            assert_eq!(run(&mut session, &[2]), fresh(&model, &[&prompt[..11], &[2]].concat()), "{kind:?}");
            device.set(|t| (t.truncate_limit, t.refuse_import) = (None, false));
        }
    }
}
