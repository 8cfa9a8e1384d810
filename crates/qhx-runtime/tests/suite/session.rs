//! Sessions on tiny models with every kind of state: whatever happens to a session, its next logits are those of an undisturbed one.

use crate::common::{self, KINDS, Kind, VOCABULARY, device_choices, ids, model};
use qhx_runtime::{Cancel, DeviceChoice, Error, Model, Session};

const CONTEXT: usize = 40;

fn run(session: &mut Session, ids: &[u32]) -> Vec<f32> {
    session.append(ids, &Cancel::new()).unwrap().to_vec()
}

/// The logits after `ids` on a session that knows nothing else.
fn fresh(model: &Model, ids: &[u32]) -> Vec<f32> {
    run(&mut model.session().unwrap(), ids)
}

#[track_caller]
fn assert_same(at: (Kind, DeviceChoice), a: &[f32], b: &[f32], what: &str) {
    let largest = a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
    assert!(a.len() == b.len() && largest <= at.0.tolerance(at.1), "{what}, {at:?}: differs by {largest}");
}

fn everywhere(mut test: impl FnMut(Kind, DeviceChoice)) {
    for device in device_choices() {
        for kind in KINDS {
            test(kind, device);
        }
    }
}

#[test]
fn chunks_do_not_change_a_result() {
    everywhere(|kind, device| {
        for length in [1, 6, 7, 8, 30] {
            let prompt = ids(length as u64, length);
            let whole = fresh(&model(kind, device, CONTEXT, CONTEXT), &prompt);
            for chunk in [1, 7, 29] {
                let model = model(kind, device, chunk, CONTEXT);
                let mut session = model.session().unwrap();
                assert_same((kind, device), &run(&mut session, &prompt), &whole, &format!("{kind:?}, {length} rows in chunks of {chunk}"));
                assert_eq!(session.work().calls, length.div_ceil(chunk));
            }
        }
    });
}

#[test]
fn a_row_at_a_time_is_the_same_as_all_at_once() {
    everywhere(|kind, device| {
        let model = model(kind, device, 16, CONTEXT);
        let prompt = ids(3, 31);
        let mut session = model.session().unwrap();
        for (n, id) in prompt.iter().enumerate() {
            let logits = run(&mut session, &[*id]);
            assert_same((kind, device), &logits, &fresh(&model, &prompt[..=n]), &format!("{kind:?} after {} rows", n + 1));
        }
    });
}

#[test]
fn all_wanted_rows_are_shown() {
    for kind in KINDS {
        let prompt = ids(4, 19);
        for (chunk, wanted) in [(5, 5), (5, 2), (19, 1), (7, 3)] {
            let options = qhx_runtime::LoadOptions { wanted, ..common::options(DeviceChoice::Reference, chunk, CONTEXT) };
            let model = Model::from_parts(common::parts(kind), &options).unwrap();
            let mut shown = Vec::new();
            let mut show = |row, logits: &[f32]| shown.push((row, logits.to_vec()));
            let mut session = model.session().unwrap();
            session.append_showing(&prompt, 9, &Cancel::new(), &mut show).unwrap();
            let rows: Vec<_> = shown.iter().map(|(row, _)| *row).collect();
            assert_eq!(rows, (10..19).collect::<Vec<_>>());
            // Beyond a change of constants a row's logits depend on the whole length, so only the last row has a fresh twin.
            if !matches!(kind, Kind::Epochs | Kind::RecurrentEpochs) {
                for (row, logits) in &shown {
                    assert_eq!(*logits, fresh(&model, &prompt[..=*row]), "{kind:?}, row {row}");
                }
            }
            assert_eq!(session.logits().unwrap(), fresh(&model, &prompt));
        }
    }
}

#[test]
fn rollback_and_go_on_elsewhere() {
    everywhere(|kind, device| {
        for chunk in [4, 16] {
            let model = model(kind, device, chunk, CONTEXT);
            let (prompt, more) = (ids(5, 26), ids(6, 9));
            for keep in [0, 1, 11, 13, 20, 25] {
                let mut session = model.session().unwrap();
                run(&mut session, &prompt[..10]);
                run(&mut session, &prompt[10..20]);
                for id in &prompt[20..] {
                    run(&mut session, &[*id]);
                }
                session.rollback(keep).unwrap();
                assert_eq!(session.ids(), &prompt[..keep]);
                assert!(session.logits().is_none(), "logits of a row that is gone");
                let logits = run(&mut session, &more);
                let expected = fresh(&model, &[&prompt[..keep], &more].concat());
                assert_same((kind, device), &logits, &expected, &format!("{kind:?} back to {keep}"));
            }
        }
    });
}

#[test]
fn rollback_computes_only_what_recurrent_slots_need() {
    for (kind, again) in [(Kind::Dense, 0), (Kind::Windowed, 0), (Kind::Recurrent, 3)] {
        let model = model(kind, DeviceChoice::Reference, 16, CONTEXT);
        let mut session = model.session().unwrap();
        run(&mut session, &ids(7, 12));
        for id in ids(8, 6) {
            run(&mut session, &[id]);
        }
        let before = session.work().rows;
        // The nearest checkpoint is the prompt's end at row 12.
        session.rollback(15).unwrap();
        run(&mut session, &[3]);
        assert_eq!(session.work().rows - before, 1 + again, "{kind:?}");
        // A checkpoint of one's own saves even that.
        session.rollback(14).unwrap();
        run(&mut session, &[3]);
        session.checkpoint().unwrap();
        run(&mut session, &[4]);
        run(&mut session, &[5]);
        let before = session.work().rows;
        session.rollback(15).unwrap();
        run(&mut session, &[9]);
        assert_eq!(session.work().rows - before, 1, "{kind:?} with a checkpoint");
    }
}

#[test]
fn forks_live_apart() {
    everywhere(|kind, device| {
        let model = model(kind, device, 8, CONTEXT);
        let prompt = ids(9, 10);
        let mut first = model.session().unwrap();
        run(&mut first, &prompt);
        let mut second = first.fork().unwrap();
        assert_eq!((second.ids(), second.logits()), (first.ids(), first.logits()));
        let (a, b) = (ids(10, 5), ids(11, 12));
        let logits = (run(&mut first, &a), run(&mut second, &b));
        assert_same((kind, device), &logits.0, &fresh(&model, &[&prompt[..], &a].concat()), "the first");
        assert_same((kind, device), &logits.1, &fresh(&model, &[&prompt[..], &b].concat()), "the second");
        second.rollback(4).unwrap();
        assert_same((kind, device), &run(&mut second, &a), &fresh(&model, &[&prompt[..4], &a].concat()), "the second, rolled back");
    });
}

#[test]
fn reset_forgets_everything() {
    everywhere(|kind, device| {
        let model = model(kind, device, 8, CONTEXT);
        let mut session = model.session().unwrap();
        run(&mut session, &ids(12, 30));
        session.reset();
        assert!(session.is_empty() && session.logits().is_none());
        assert_same((kind, device), &run(&mut session, &ids(13, 9)), &fresh(&model, &ids(13, 9)), &format!("{kind:?}"));
    });
}

#[test]
fn prepare_keeps_the_common_prefix() {
    for device in device_choices() {
        let model = model(Kind::Dense, device, 16, CONTEXT);
        let mut session = model.session().unwrap();
        let prompt = ids(14, 12);
        let prepared = session.prepare(&prompt, &Cancel::new()).unwrap();
        assert_eq!((prepared.kept, prepared.read, prepared.calls), (0, 12, 1));
        for (other, kept) in [
            (prompt.clone(), 11),                                         // the last row is always read
            ([&prompt[..], &[1, 2, 3]].concat(), 12),                     // longer
            (prompt[..5].to_vec(), 4),                                    // shorter
            ([&prompt[..3], &[prompt[3] ^ 1], &prompt[4..]].concat(), 3), // different in the middle
            (vec![prompt[0] ^ 1, 2], 0),                                  // different from the start
        ] {
            let before = session.work().rows;
            let prepared = session.prepare(&other, &Cancel::new()).unwrap();
            assert_eq!((prepared.kept, prepared.read), (kept, other.len() - kept), "{other:?}");
            assert_eq!(session.work().rows - before, prepared.read);
            assert_eq!(session.ids(), other);
            assert_same((Kind::Dense, device), session.logits().unwrap(), &fresh(&model, &other), "prepared");
            session.prepare(&prompt, &Cancel::new()).unwrap();
        }
    }
}

#[test]
fn an_epoch_is_chosen_from_the_whole_length_and_crossing_it_reads_everything_again() {
    for device in device_choices() {
        for kind in [Kind::Epochs, Kind::RecurrentEpochs] {
            let model = model(kind, device, 5, CONTEXT);
            let prompt = ids(15, 24);
            let mut session = model.session().unwrap();
            run(&mut session, &prompt[..11]);
            assert_eq!(session.work().rows, 11);
            run(&mut session, &prompt[11..12]);
            assert_eq!(session.work().rows, 12, "12 rows are not beyond 12");
            let crossed = run(&mut session, &prompt[12..13]);
            assert_eq!(session.work().rows, 12 + 13, "row 13 changes the constants of all rows");
            assert_same((kind, device), &crossed, &fresh(&model, &prompt[..13]), "across the first limit");
            let crossed = run(&mut session, &prompt[13..24]);
            assert_eq!(session.work().rows, 25 + 24);
            assert_same((kind, device), &crossed, &fresh(&model, &prompt), "across the second limit");
            // Back below both limits the old constants hold again.
            session.rollback(8).unwrap();
            assert_same((kind, device), &run(&mut session, &[1]), &fresh(&model, &[&prompt[..8], &[1]].concat()), "back again");
        }
    }
    // The constants do matter: the same rows in another epoch give other logits.
    let model = model(Kind::Epochs, DeviceChoice::Reference, 40, CONTEXT);
    let mut long = model.session().unwrap();
    let mut shown = Vec::new();
    long.append_showing(&ids(15, 24), 24, &Cancel::new(), &mut |_, logits| shown.push(logits.to_vec())).unwrap();
    assert_ne!(shown[5], fresh(&model, &ids(15, 6)));
}

#[test]
fn the_context_may_be_filled_to_the_last_row_and_no_further() {
    everywhere(|kind, device| {
        let model = model(kind, device, 8, 24);
        let prompt = ids(16, 24);
        let mut session = model.session().unwrap();
        assert_eq!(session.context(), 24);
        let full = run(&mut session, &prompt);
        let error = session.append(&[1], &Cancel::new()).unwrap_err();
        assert!(matches!(error, Error::ContextFull { rows: 24, more: 1, context: 24 }), "{error}");
        assert_eq!((session.len(), session.logits()), (24, Some(&full[..])), "as it was");
        session.rollback(23).unwrap();
        assert_same((kind, device), &run(&mut session, &prompt[23..]), &full, "full again");

        let mut other = model.session().unwrap();
        let error = other.append(&ids(16, 25), &Cancel::new()).unwrap_err().to_string();
        assert!(error.contains("25 tokens") && error.contains("24") && error.contains("up to 64"), "{error}");
        assert!(other.is_empty());
        run(&mut other, &prompt[..20]);
        assert!(matches!(other.append(&prompt[..5], &Cancel::new()), Err(Error::ContextFull { rows: 20, more: 5, context: 24 })));
        assert_eq!(other.len(), 20);
    });
}

#[test]
fn wrong_ids_are_named() {
    let model = model(Kind::Dense, DeviceChoice::Reference, 8, CONTEXT);
    let mut session = model.session().unwrap();
    assert!(matches!(session.append(&[], &Cancel::new()), Err(Error::EmptyPrompt)));
    assert!(matches!(session.prepare(&[], &Cancel::new()), Err(Error::EmptyPrompt)));
    let error = session.append(&[1, VOCABULARY as u32], &Cancel::new()).unwrap_err().to_string();
    assert!(error.contains("id 23") && error.contains("0 to 22"), "{error}");
    assert!(matches!(session.rollback(1), Err(Error::Rollback { to: 1, rows: 0 })));
    assert!(session.is_empty());
}

#[test]
fn sessions_of_one_model_take_turns() {
    let model = model(Kind::Recurrent, DeviceChoice::Reference, 8, CONTEXT);
    let (a, b) = (ids(17, 20), ids(18, 20));
    let (mut first, mut second) = (model.session().unwrap(), model.session().unwrap());
    let mut logits = (vec![], vec![]);
    for n in 0..20 {
        logits = (run(&mut first, &a[n..=n]), run(&mut second, &b[n..=n]));
    }
    assert_eq!(logits, (fresh(&model, &a), fresh(&model, &b)));
    let threads: Vec<_> =
        [a, b].map(|ids| (ids, model.clone())).into_iter().map(|(ids, m)| std::thread::spawn(move || fresh(&m, &ids))).collect();
    let together: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
    assert_eq!((together[0].clone(), together[1].clone()), logits);
}
