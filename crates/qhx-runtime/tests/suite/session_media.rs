//! Sessions with images and sounds on tiny models: whatever happens to a session, its next logits are those of an undisturbed one, and those of a
//! single call whose inputs are written down by hand.

use crate::common::{
    self, KINDS, Kind, VOCABULARY, device_choices,
    devices::Troubled,
    media::{AUDIO, BEGIN, END, IMAGE, image, media, seeing, seeing_model, sound, words},
    options,
};
use qhx_ir::{Bindings, Call, Device, Generator, InputData, Outputs, Segment, reference::ReferenceDevice};
use qhx_runtime::{Cancel, DeviceChoice, Error, LoadOptions, LoadPlan, MediaKind, Medium, Model, Prompt, Session};
use std::sync::Arc;

const CONTEXT: usize = 90;
const CHUNKS: [usize; 5] = [1, 7, 16, 29, CONTEXT];

/// What stands in a prompt.
enum Part {
    Words(u64, usize),
    Medium(Medium),
}

/// Text, an image of 2 x 3, text, a sound, an image of 4 x 2 directly behind it, text.
fn parts() -> Vec<Part> {
    vec![
        Part::Words(1, 5),
        Part::Medium(image(1, 2, 3)),
        Part::Words(2, 2),
        Part::Medium(sound(2, 330)),
        Part::Medium(image(3, 4, 2)),
        Part::Words(4, 6),
    ]
}

/// The prompt of these parts, and where media begin.
fn prompt(model: &Model, parts: &[Part]) -> (Prompt, Vec<usize>) {
    let (mut ids, mut media, mut places) = (Vec::new(), Vec::new(), Vec::new());
    for part in parts {
        match part {
            Part::Words(seed, count) => ids.extend(words(*seed, *count)),
            Part::Medium(medium) => {
                places.push(ids.len());
                let token = if medium.kind() == MediaKind::Image { IMAGE } else { AUDIO };
                ids.extend(std::iter::repeat_n(token, model.soft_rows(medium).unwrap()));
                media.push(medium.clone());
            }
        }
    }
    (Prompt::from_ids_with_media(model, ids, &media).unwrap(), places)
}

fn read(session: &mut Session, prompt: &Prompt) -> Vec<f32> {
    session.append_prompt(prompt, &Cancel::new()).unwrap().to_vec()
}

fn more(session: &mut Session, ids: &[u32]) -> Vec<f32> {
    session.append(ids, &Cancel::new()).unwrap().to_vec()
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

/// The last row's logits from one call of the interpreter, all inputs made here in the plainest way.
fn by_hand(kind: Kind, model: &Model, ids: &[u32], media: &[(usize, Medium)]) -> Vec<f32> {
    let parts = seeing(kind);
    let rows = ids.len();
    let (mut soft, mut deepstack, mut at) = (Vec::new(), Vec::new(), Vec::new());
    let mut positions = vec![[0i32; 3]; rows];
    let (mut row, mut next) = (0, 0);
    while row < rows {
        let Some((_, medium)) = media.iter().find(|(first, _)| *first == row) else {
            positions[row] = [next; 3];
            (row, next) = (row + 1, next + 1);
            continue;
        };
        let encoded = model.encode(medium, &Cancel::new()).unwrap();
        let count = encoded.rows();
        soft.extend_from_slice(encoded.soft_rows(0..count));
        deepstack.extend_from_slice(encoded.deepstack_rows(0, 0..count));
        at.extend((row..row + count).map(|row| row as i32));
        match encoded.grid() {
            Some([down, across]) => {
                for y in 0..down {
                    for x in 0..across {
                        positions[row + y * across + x] = [next, next + y as i32, next + x as i32];
                    }
                }
                next += down.max(across) as i32;
            }
            None => {
                (0..count).for_each(|n| positions[row + n] = [next + n as i32; 3]);
                next += count as i32;
            }
        }
        row += count;
    }
    let ids: Vec<i32> = ids.iter().map(|&id| if id == IMAGE || id == AUDIO { 0 } else { id as i32 }).collect();
    let positions: Vec<i32> = (0..3).flat_map(|stream| positions.iter().map(move |p| p[stream])).collect();
    let wanted = [rows as i32 - 1];
    let inputs = parts.program.inputs.iter().map(|input| match input.generator {
        Generator::IdsMediaAsPad => InputData::I32(&ids),
        Generator::PositionsMrope => InputData::I32(&positions),
        Generator::WantedRows => InputData::I32(&wanted),
        Generator::SoftRows => InputData::F32(&soft),
        Generator::DeepstackRows(0) => InputData::F32(&deepstack),
        Generator::SoftRowsAt => InputData::I32(&at),
        _ => panic!("{input:?}"),
    });
    let inputs: Vec<_> = inputs.collect();
    let load = qhx_ir::LoadOptions {
        max_rows: rows,
        max_soft_rows: rows,
        max_wanted: 1,
        max_segments: 1,
        max_state_bytes: None,
        replaceable: Vec::new(),
        pauses: Vec::new(),
        scratch_group: None,
        history: None,
        artifacts: None,
        progress: None,
        timeline: None,
    };
    let mut executable = ReferenceDevice.load(&parts.program, &parts.weights, &load).unwrap();
    let mut state = executable.new_state(CONTEXT).unwrap();
    let mut segments = [Segment { epoch: parts.program.epoch(rows), ..Segment::new(Some(&mut *state), 0, rows) }];
    let mut outputs = Outputs::new();
    let bindings = Bindings { rows, soft_rows: at.len(), wanted: 1 };
    executable.run(&mut Call::new(bindings, &inputs, &mut segments, &mut outputs)).unwrap();
    outputs.value("logits").unwrap().to_vec()
}

#[test]
fn any_chunks_give_what_a_call_by_hand_gives() {
    everywhere(|kind, device| {
        let model = seeing_model(kind, device, CONTEXT, CONTEXT);
        let (prompt, places) = prompt(&model, &parts());
        let media: Vec<_> = places.iter().copied().zip(prompt.media().iter().map(|placed| placed.medium().clone())).collect();
        assert_eq!(media.len(), 3);
        let mut ids = prompt.ids().to_vec();
        let by_hand_first = by_hand(kind, &model, &ids, &media);
        ids.extend(words(9, 1));
        let by_hand_second = by_hand(kind, &model, &ids, &media);
        let blind = more(&mut model.session().unwrap(), prompt.ids());
        assert!(blind.iter().zip(&by_hand_first).any(|(a, b)| (a - b).abs() > 1e-2), "media must matter");
        for chunk in CHUNKS {
            let model = seeing_model(kind, device, chunk, CONTEXT);
            let mut session = model.session().unwrap();
            assert_same((kind, device), &read(&mut session, &prompt), &by_hand_first, &format!("in chunks of {chunk}"));
            assert_eq!(session.work().calls, prompt.ids().len().div_ceil(chunk));
            assert_eq!((session.work().images, session.work().sounds), (2, 1));
            assert_same((kind, device), &more(&mut session, &words(9, 1)), &by_hand_second, "and a token more");
        }
    });
}

#[test]
fn a_session_can_be_cut_anywhere() {
    everywhere(|kind, device| {
        let model = seeing_model(kind, device, 8, CONTEXT);
        let (prompt, places) = prompt(&model, &parts());
        let expected = read(&mut model.session().unwrap(), &prompt);
        let mut session = model.session().unwrap();
        read(&mut session, &prompt);
        let length = prompt.ids().len();
        for cut in [length - 1, places[2] + 3, places[2], places[1] + 1, places[0] + 4, places[0], 2] {
            // Back to the cut, something else for a while, and the prompt again: what follows is the same.
            session.rollback(cut).unwrap();
            let forked = more(&mut session.fork().unwrap(), &words(7, 3));
            assert_same((kind, device), &more(&mut session, &words(7, 3)), &forked, &format!("a fork at {cut}"));
            session.rollback(cut).unwrap();
            let work = session.work();
            let prepared = session.prepare_prompt(&prompt, &Cancel::new()).unwrap();
            assert_same((kind, device), session.logits().unwrap(), &expected, &format!("cut at {cut}"));
            assert_eq!(session.ids(), prompt.ids());
            assert_eq!((session.work().images, session.work().sounds), (work.images, work.sounds), "nothing is encoded again");
            if !kind.is_recurrent() && kind != Kind::Epochs {
                assert_eq!(prepared.read, length - cut, "{kind:?} at {cut}");
            }
        }
    });
}

#[test]
fn media_are_kept_by_their_content() {
    let model = seeing_model(Kind::Dense, DeviceChoice::Reference, 16, CONTEXT);
    let (first, places) = prompt(&model, &parts());
    let mut session = model.session().unwrap();
    session.prepare_prompt(&first, &Cancel::new()).unwrap();
    let length = first.ids().len();

    // The same pictures, opened again: all is kept but the last row.
    let (again, _) = prompt(&model, &parts());
    let prepared = session.prepare_prompt(&again, &Cancel::new()).unwrap();
    assert_eq!((prepared.kept, prepared.read), (length - 1, 1));
    assert_eq!((session.work().images, session.work().sounds), (2, 1));

    // Another picture of the same size in the third place: equal ids, and yet it is read from there on.
    let mut changed = parts();
    changed[4] = Part::Medium(image(8, 4, 2));
    let (other, _) = prompt(&model, &changed);
    assert_eq!(other.ids(), first.ids());
    let prepared = session.prepare_prompt(&other, &Cancel::new()).unwrap();
    assert_eq!((prepared.kept, prepared.read), (places[2], length - places[2]));
    assert_eq!((session.work().images, session.work().sounds), (3, 1));
    assert_eq!(session.logits().unwrap(), read(&mut model.session().unwrap(), &other));

    // Placeholders that stand for nothing are not the picture.
    let prepared = session.prepare(first.ids(), &Cancel::new()).unwrap();
    assert_eq!(prepared.kept, places[0]);
    assert_eq!(session.logits().unwrap(), more(&mut model.session().unwrap(), first.ids()));

    // What was encoded is still known to the model.
    session.prepare_prompt(&first, &Cancel::new()).unwrap();
    assert_eq!((session.work().images, session.work().sounds), (3, 1));
}

#[test]
fn a_cancelled_read_within_an_image_changes_nothing() {
    for kind in KINDS {
        let device = Troubled::default();
        let model = Model::on_device(seeing(kind), Arc::new(device.clone()), &LoadOptions { chunk: 4, ..LoadOptions::default() }).unwrap();
        let (prompt, places) = prompt(&model, &parts());
        let expected = read(&mut model.session().unwrap(), &prompt);
        for (call, before) in [(2, 0), (3, 0), (places[2] / 4 + 1, 3), (1, 3)] {
            let mut session = model.session().unwrap();
            if before > 0 {
                more(&mut session, &words(1, before));
            }
            let (ids, logits) = (session.ids().to_vec(), session.logits().map(<[f32]>::to_vec));
            let cancel = Cancel::new();
            device.set(|t| (t.cancel_in_call, t.cancel) = (call, cancel.clone()));
            assert!(matches!(session.prepare_prompt(&prompt, &cancel), Err(Error::Cancelled)), "{kind:?} in call {call}");
            device.set(|t| t.cancel_in_call = 0);
            assert_eq!((session.ids(), session.logits()), (&ids[..], logits.as_deref()), "{kind:?} in call {call}");
            session.prepare_prompt(&prompt, &Cancel::new()).unwrap();
            assert_eq!(session.logits().unwrap(), expected, "{kind:?} after call {call}");
        }
        // A session that holds pictures and is asked for others keeps its own.
        let mut changed = parts();
        changed[4] = Part::Medium(image(8, 4, 2));
        let (other, _) = self::prompt(&model, &changed);
        let mut session = model.session().unwrap();
        read(&mut session, &prompt);
        let expected = more(&mut session.fork().unwrap(), &words(5, 2));
        let cancel = Cancel::new();
        device.set(|t| (t.cancel_in_call, t.cancel) = (2, cancel.clone()));
        assert!(matches!(session.prepare_prompt(&other, &cancel), Err(Error::Cancelled)), "{kind:?}");
        device.set(|t| t.cancel_in_call = 0);
        assert_eq!(more(&mut session, &words(5, 2)), expected, "{kind:?}");
        // Before anything is encoded.
        let cancel = Cancel::new();
        cancel.cancel();
        let mut session = model.session().unwrap();
        let (fresh, _) = self::prompt(&model, &[Part::Medium(image(77, 1, 1)), Part::Words(1, 1)]);
        assert!(matches!(session.prepare_prompt(&fresh, &cancel), Err(Error::Cancelled)));
        assert!(session.is_empty() && session.work().images == 0);
    }
}

#[test]
fn a_restored_session_has_its_media() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("session");
    everywhere(|kind, device| {
        for rolled_back in [None, Some(9), Some(20)] {
            let model = seeing_model(kind, device, 8, CONTEXT);
            let (prompt, _) = prompt(&model, &parts());
            let mut session = model.session().unwrap();
            read(&mut session, &prompt);
            if let Some(to) = rolled_back {
                session.rollback(to).unwrap();
            }
            session.save(&file).unwrap();
            let other = seeing_model(kind, device, 8, CONTEXT);
            let mut restored = other.restore(&file).unwrap();
            assert_eq!((restored.ids(), restored.logits()), (session.ids(), session.logits()));
            for step in [words(3, 1), words(4, 9)] {
                assert_eq!(more(&mut restored, &step), more(&mut session, &step), "{kind:?} on {device}, {rolled_back:?}");
            }
            // From the rows alone, too.
            for to in [14, 7] {
                session.rollback(to).unwrap();
                restored.rollback(to).unwrap();
                assert_eq!(more(&mut restored, &[7]), more(&mut session, &[7]), "{kind:?} on {device}, back to {to}");
            }
            let prepared = restored.prepare_prompt(&prompt, &Cancel::new()).unwrap();
            assert!(prepared.read > 0 && restored.ids() == prompt.ids());
            assert_same((kind, device), restored.logits().unwrap(), &read(&mut other.session().unwrap(), &prompt), "after a restore");
        }
    });
}

#[test]
fn ids_and_media_must_fit() {
    let model = seeing_model(Kind::Dense, DeviceChoice::Reference, 16, CONTEXT);
    let (picture, noise) = (image(1, 2, 3), sound(1, 330));
    let seen = std::slice::from_ref(&picture);
    let heard = model.soft_rows(&noise).unwrap();
    let with = |images: usize, sounds: usize, media: &[Medium]| {
        let ids = [vec![1; 2], vec![IMAGE; images], vec![2], vec![AUDIO; sounds]].concat();
        Prompt::from_ids_with_media(&model, ids, media)
    };
    let text = |result: Result<Prompt, Error>| result.unwrap_err().to_string();
    assert_eq!(with(6, heard, &[noise.clone(), picture.clone()]).unwrap().media().len(), 2);
    assert_eq!(with(6, 0, &[]).unwrap().media().len(), 0, "placeholders without media are ids");
    let wrong = text(with(5, 0, seen));
    assert_eq!(wrong, "placeholders for images: found 5 in the prompt, expected 6 (noise 1 takes 6)");
    assert!(text(with(6, 1, seen)).contains("placeholders for sounds: found 1 in the prompt, expected 0 (no sound is given)"));
    let torn = [vec![IMAGE; 2], vec![1], vec![IMAGE; 4]].concat();
    assert!(text(Prompt::from_ids_with_media(&model, torn, seen)).contains("must stand together, from id 0 on"));
    let two = [image(1, 1, 2), image(2, 2, 2)];
    let prompt = Prompt::from_ids_with_media(&model, vec![IMAGE; 6], &two).unwrap();
    assert_eq!(prompt.media().iter().map(|placed| placed.first()).collect::<Vec<_>>(), [0, 2]);

    // A model without eyes, one without ears, and a picture made ready for another.
    let mut parts = seeing(Kind::Dense);
    parts.media.image = None;
    let deaf = Model::from_parts(parts.clone(), &options(DeviceChoice::Reference, 8, 40)).unwrap();
    let refused = text(Prompt::from_ids_with_media(&deaf, vec![IMAGE; 6], seen));
    assert_eq!(refused, "`seeing Dense` takes no images: it takes text and sounds");
    parts.media = media();
    parts.media.image.as_mut().unwrap().std = [0.25; 3];
    let other = Model::from_parts(parts, &options(DeviceChoice::Reference, 8, 40)).unwrap();
    assert!(text(Prompt::from_ids_with_media(&other, vec![IMAGE; 6], seen)).contains("of another model"));
    let blind = Model::from_parts(common::parts(Kind::Dense), &options(DeviceChoice::Reference, 8, 40)).unwrap();
    assert_eq!(text(Prompt::from_ids_with_media(&blind, vec![1], &[noise])), "`Dense` takes no sounds: it takes text only");
    assert_eq!((BEGIN, END, VOCABULARY), (20, 21, 23));
}

#[test]
fn placeholders_without_media_are_padding() {
    let model = seeing_model(Kind::Dense, DeviceChoice::Reference, 16, CONTEXT);
    let [seen, heard, padding] = [IMAGE, AUDIO, 0].map(|id| more(&mut model.session().unwrap(), &[1, id, id, 2]));
    assert!(seen == padding && heard == padding);
    let mut parts = seeing(Kind::Dense);
    parts.pad = None;
    let without = Model::from_parts(parts, &options(DeviceChoice::Reference, 16, CONTEXT)).unwrap();
    assert!(more(&mut without.session().unwrap(), &[1, IMAGE, IMAGE, 2]) != padding, "nothing to replace them by");
}

#[test]
fn towers_are_checked_before_anything_is_loaded() {
    let load = |change: &dyn Fn(&mut qhx_runtime::ModelParts)| {
        let mut parts = seeing(Kind::Dense);
        change(&mut parts);
        Model::from_parts(parts, &options(DeviceChoice::Reference, 8, 40)).err().map(|error| error.to_string())
    };
    assert_eq!(load(&|_| {}), None);
    assert!(load(&|parts| parts.towers.clear()).unwrap().contains("the bundle has no such program"));
    let without_soft_rows = |parts: &mut qhx_runtime::ModelParts| parts.program = common::parts(Kind::Dense).program;
    assert!(load(&without_soft_rows).unwrap().contains("the text program takes no soft rows"));
    let swapped = |parts: &mut qhx_runtime::ModelParts| parts.media.image.as_mut().unwrap().program = "audio".into();
    assert!(load(&swapped).unwrap().contains("its input `frames` is not made of images"));
    let without_table = |parts: &mut qhx_runtime::ModelParts| parts.media.image.as_mut().unwrap().position_side = None;
    assert!(load(&without_table).unwrap().contains("its input `index`"));
    let text_as_tower = |parts: &mut qhx_runtime::ModelParts| drop(parts.towers.insert("vision".into(), parts.program.clone()));
    assert!(load(&text_as_tower).unwrap().contains("it keeps state"));
    let renamed = |parts: &mut qhx_runtime::ModelParts| {
        let mut program = (*parts.towers["vision"]).clone();
        program.outputs.retain(|output| &*output.name != "deepstack.0");
        parts.towers.insert("vision".into(), qhx_ir::Checked::new(program).unwrap());
    };
    assert!(load(&renamed).unwrap().contains("it has no output `deepstack.0`"));
}

#[test]
fn a_tower_grows_with_its_media() {
    for device in device_choices() {
        let model = seeing_model(Kind::Dense, device, 8, 40);
        for (seed, rows, columns) in [(1, 1, 2), (2, 5, 4), (3, 1, 1), (2, 5, 4), (4, 6, 6)] {
            let picture = image(seed, rows, columns);
            let fresh = seeing_model(Kind::Dense, device, 8, 40).encode(&picture, &Cancel::new()).unwrap();
            assert_eq!(model.encode(&picture, &Cancel::new()).unwrap(), fresh, "{rows} x {columns} on {device}");
            assert_eq!((fresh.rows(), fresh.grid(), fresh.deepstack_count()), (rows * columns, Some([rows, columns]), 1));
        }
        // Two tasks at once take turns.
        std::thread::scope(|scope| {
            for seed in 10..14 {
                let model = &model;
                scope.spawn(move || {
                    let picture = image(seed, 3, seed as usize - 9);
                    let fresh = seeing_model(Kind::Dense, device, 8, 40).encode(&picture, &Cancel::new()).unwrap();
                    assert_eq!(model.encode(&picture, &Cancel::new()).unwrap(), fresh);
                });
            }
        });
    }
}

#[test]
fn memory_is_counted_with_the_towers_that_are_needed() {
    let parts = seeing(Kind::Dense);
    let plan = |media: &[Medium]| {
        let plan = LoadPlan::new(&parts.program, 40, &options(DeviceChoice::Reference, 8, 40)).unwrap();
        plan.counting(&parts.towers, media).memory
    };
    let (none, small, large) = (plan(&[]), plan(&[image(1, 1, 1)]), plan(&[image(1, 1, 1), image(2, 6, 6)]));
    assert_eq!((none.tower_bytes, none.to_string().contains("towers")), (0, false));
    assert!(0 < small.tower_bytes && small.tower_bytes < large.tower_bytes);
    assert_eq!(large.tower_bytes, plan(&[image(2, 6, 6)]).tower_bytes, "one tower, for its largest call");
    assert_eq!(large.total_bytes, none.total_bytes + large.tower_bytes);
    assert!(plan(&[image(1, 1, 1), sound(1, 300)]).tower_bytes > small.tower_bytes);
    assert!(large.to_string().contains("towers"), "{large}");
}
