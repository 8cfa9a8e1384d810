//! Sessions as files: what is restored goes on bit for bit as what was saved, and a wrong file is refused with a reason.

use crate::common::{
    KINDS, Kind, device_choices, ids,
    media::{IMAGE, image, seeing_model},
    model,
};
use qhx_bundle::Digest;
use qhx_runtime::{Cancel, DeviceChoice, Prompt, Session};
use serde_json::{Value, json};
use std::{fs, path::Path};

fn run(session: &mut Session, ids: &[u32]) -> Vec<f32> {
    session.append(ids, &Cancel::new()).unwrap().to_vec()
}

#[test]
fn a_restored_session_goes_on_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("session");
    for device in device_choices() {
        for kind in KINDS {
            for rolled_back in [false, true] {
                let first = model(kind, device, 8, 40);
                let mut session = first.session().unwrap();
                run(&mut session, &ids(1, 14));
                run(&mut session, &ids(2, 3));
                if rolled_back {
                    session.rollback(15).unwrap();
                }
                session.save(&file).unwrap();
                // Another process: the model is loaded again.
                let second = model(kind, device, 8, 40);
                let mut restored = second.restore(&file).unwrap();
                assert_eq!((restored.ids(), restored.logits()), (session.ids(), session.logits()));
                for step in [ids(3, 1), ids(4, 9)] {
                    let before = (restored.work().rows, session.work().rows);
                    assert_eq!(run(&mut restored, &step), run(&mut session, &step), "{kind:?} on {device}");
                    let read = (restored.work().rows - before.0, session.work().rows - before.1);
                    assert_eq!(read.0, read.1, "{kind:?} on {device}: nothing is computed again that the file holds");
                }
                for to in [16, 14, 6] {
                    let to = to.min(session.len());
                    session.rollback(to).unwrap();
                    restored.rollback(to).unwrap();
                    assert_eq!(run(&mut restored, &[7]), run(&mut session, &[7]), "{kind:?} on {device}, back to {to}");
                }
            }
        }
    }
}

#[test]
fn an_empty_session_can_be_saved() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("session");
    let model = model(Kind::Recurrent, DeviceChoice::Reference, 8, 40);
    model.session().unwrap().save(&file).unwrap();
    let mut restored = model.restore(&file).unwrap();
    assert!(restored.is_empty() && restored.logits().is_none());
    assert_eq!(run(&mut restored, &[1, 2]), run(&mut model.session().unwrap(), &[1, 2]));
}

#[test]
fn wrong_files_are_refused_with_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("session");
    let refused = |model: &qhx_runtime::Model, expected: &str| {
        let error = model.restore(&file).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains(expected), "expected `{expected}`, found `{error}`");
    };
    let own = model(Kind::Recurrent, DeviceChoice::Reference, 8, 40);
    refused(&own, "cannot read");
    let mut session = own.session().unwrap();
    run(&mut session, &ids(1, 12));
    session.save(&file).unwrap();
    let good = fs::read(&file).unwrap();

    refused(&model(Kind::Dense, DeviceChoice::Reference, 8, 40), "another model");
    refused(&model(Kind::Recurrent, DeviceChoice::Reference, 8, 11), "context of 11");
    for at in [0, 8, 20, good.len() / 2, good.len() - 1] {
        let mut damaged = good.clone();
        damaged[at] ^= 4;
        fs::write(&file, &damaged).unwrap();
        refused(&own, if at < 8 { "not a session saved" } else { "damaged" });
    }
    for length in [0, 7, 31, 40, good.len() - 1] {
        fs::write(&file, &good[..length]).unwrap();
        assert!(own.restore(&file).is_err(), "cut to {length} bytes");
    }
    // Files whose sum is right but which lie.
    type Lie = fn(&mut Value);
    let lies: [(Lie, &str); 9] = [
        (|h| h["ids"][3] = json!(23), "vocabulary"),
        (|h| h["state_rows"] = json!(13), "claims 13 computed rows of 12"),
        (|h| h["state_rows"] = json!(11), "must have"),
        (|h| h["epoch"] = json!(1), "epoch 1"),
        (|h| h["slots"][0]["bytes"] = json!(u64::MAX), "must have"),
        (|h| h["slots"][0]["name"] = json!("nose"), "slots of this model"),
        (|h| h["checkpoints"][0]["rows"] = json!(13), "checkpoint at row 13"),
        (|h| h["logits"] = json!(false), "left over"),
        (|h| h["surprise"] = json!(1), "surprise"),
    ];
    for (lie, expected) in lies {
        rewrite(&file, &good, lie);
        refused(&own, expected);
    }
    rewrite(&file, &good, |_| {});
    assert!(own.restore(&file).is_ok(), "rewriting alone breaks nothing");
}

#[test]
fn media_that_lie_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("session");
    let own = seeing_model(Kind::Dense, DeviceChoice::Reference, 8, 40);
    let mut session = own.session().unwrap();
    let mixed = [vec![1; 3], vec![IMAGE; 6], vec![2; 2]].concat();
    let prompt = Prompt::from_ids_with_media(&own, mixed, &[image(1, 2, 3)]).unwrap();
    session.append_prompt(&prompt, &Cancel::new()).unwrap();
    session.save(&file).unwrap();
    let good = fs::read(&file).unwrap();
    type Lie = fn(&mut Value);
    let lies: [(Lie, &str); 11] = [
        (|m| m["first"] = json!(9), "from row 9 on"),
        (|m| m["first"] = json!(u64::MAX), "of 11 rows"),
        (|m| m["rows"] = json!(0), "claims 0 of 6 rows"),
        (|m| m["rows"] = json!(7), "claims 7 of 6 rows"),
        (|m| (m["rows"], m["all_rows"]) = (json!(4), json!(4)), "claims 4 of 4 rows"),
        (|m| m["grid"] = json!([0, 6]), "claims 6 of 6 rows"),
        (|m| m["grid"] = json!([u64::MAX, 2]), "claims 6 of 6 rows"),
        (|m| (m["all_rows"], m["grid"]) = (json!(12), json!([4, 3])), "ends within the rows of a medium"),
        (|m| (m["all_rows"], m["grid"]) = (json!(u64::MAX / 2), json!([1, u64::MAX / 2])), "beyond all bounds"),
        (|m| m["kind"] = json!("audio"), "claims 6 of 6 rows"),
        (|m| m["kind"] = json!("smell"), "smell"),
    ];
    for (lie, expected) in lies {
        rewrite(&file, &good, |header| lie(&mut header["media"][0]));
        let error = own.restore(&file).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains(expected), "expected `{expected}`, found `{error}`");
    }
    rewrite(&file, &good, |header| header["media"] = json!([header["media"][0], header["media"][0]]));
    assert!(own.restore(&file).is_err(), "two media in one place");
    rewrite(&file, &good, |_| {});
    assert!(own.restore(&file).is_ok());
}

/// Changes the header of a snapshot and makes its sum right again.
fn rewrite(file: &Path, good: &[u8], change: impl FnOnce(&mut Value)) {
    let length = u64::from_le_bytes(good[8..16].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&good[16..16 + length]).unwrap();
    change(&mut header);
    let header = serde_json::to_vec(&header).unwrap();
    let mut bytes = [&good[..8], &(header.len() as u64).to_le_bytes(), &header, &good[16 + length..good.len() - 32]].concat();
    let sum = Digest::of(&bytes);
    bytes.extend_from_slice(sum.as_bytes());
    fs::write(file, bytes).unwrap();
}
