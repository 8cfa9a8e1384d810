//! What is written is what is read, for every encoding, and the files keep the rules of their format.

use crate::fixture::*;
use qhx_bundle::*;
use qhx_ir::Encoding;
use std::{collections::BTreeMap, fs, path::Path};

/// Reads a weight file by the rules of the safetensors format alone, without this crate: contiguous, complete, shapes and lengths agree. Gives
/// the place of every tensor.
fn read_by_the_rules(file: &Path) -> BTreeMap<String, std::ops::Range<usize>> {
    let bytes = fs::read(file).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    assert_eq!((bytes[8], (8 + length) % 4096), (b'{', 0), "the data starts at a page");
    let mut places = BTreeMap::new();
    for (name, entry) in header.iter().filter(|(name, _)| *name != "__metadata__") {
        let number = |v: &serde_json::Value| v.as_u64().unwrap() as usize;
        let (start, end) = (number(&entry["data_offsets"][0]), number(&entry["data_offsets"][1]));
        let size = match entry["dtype"].as_str().unwrap() {
            "F32" => 4,
            "F16" | "BF16" => 2,
            "I8" | "U8" => 1,
            other => panic!("{other}"),
        };
        assert_eq!(entry["shape"].as_array().unwrap().iter().map(number).product::<usize>() * size, end - start, "{name}");
        places.insert(name.clone(), 8 + length + start..8 + length + end);
    }
    let mut ranges: Vec<_> = places.values().cloned().collect();
    ranges.sort_by_key(|r| (r.start, r.end));
    assert_eq!(ranges.first().unwrap().start, 8 + length);
    assert!(ranges.windows(2).all(|w| w[0].end == w[1].start), "no gaps, no overlaps");
    assert_eq!(ranges.last().unwrap().end, bytes.len());
    places
}

fn check(programs: &[qhx_ir::Program], options: WriteOptions, seed: u64) -> usize {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("model");
    let (writer, written) = write(&place, programs, options, &mut Random(seed));
    writer.finish(manifest()).unwrap();

    let bundle = open(&place).unwrap();
    let weights = bundle.weights();
    for program in programs {
        assert_eq!(**bundle.program(&program.name).unwrap(), *program);
        for (name, weight) in &program.weights {
            let tensor = weights.declared(bundle.program(&program.name).unwrap(), name).unwrap();
            assert_eq!((tensor.encoding(), tensor.shape()), (weight.encoding, &weight.shape[..]));
            let parts = [("", tensor.data()), (".scale", tensor.scale()), (".min", tensor.min())];
            for (suffix, bytes) in parts {
                let expected = written.get(&format!("{name}{suffix}")).map_or(&[][..], |b| b);
                assert!(bytes == expected, "{name}{suffix} ({})", weight.encoding);
                assert!(bytes.is_empty() || bytes.as_ptr() as usize % 64 == 0, "{name}{suffix} in memory");
            }
        }
    }
    assert!(weights.tensor("nobody").is_none());

    let mut stored = BTreeMap::new();
    for file in &bundle.manifest().weights {
        let mut places = read_by_the_rules(&place.join(file.to_relative()));
        places.retain(|name, _| !name.starts_with("__pad."));
        assert!(places.values().all(|range| range.start % 64 == 0));
        stored.append(&mut places);
    }
    assert!(stored.keys().eq(written.keys()), "every part is stored once");
    bundle.verify_all(None).unwrap();
    bundle.manifest().weights.len()
}

#[test]
fn every_encoding_and_odd_shapes() {
    let mut random = Random(3);
    for (i, encoding) in Encoding::all().into_iter().enumerate() {
        let mut size = || [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 129][random.below(14)];
        let mut weights = vec![
            ("a", encoding, vec![size(), size()]),
            ("b", encoding, vec![1, 1]),
            ("c.d", encoding, vec![size(), size(), size()]),
            ("e", encoding, vec![size(), size()]),
        ];
        if encoding.is_float() {
            weights.push(("f", encoding, vec![size()]));
        }
        assert_eq!(check(&[program("text", &weights)], WriteOptions::default(), i as u64), 1);
    }
}

#[test]
fn several_programs_and_files() {
    let text = program("text", &[("shared", Encoding::F16, vec![9, 7]), ("own", Encoding::I8Row, vec![300, 64])]);
    let vision = program("vision", &[("shared", Encoding::F16, vec![9, 7]), ("v", Encoding::I4_BLOCK32, vec![40, 90])]);
    let options = WriteOptions { weight_file_bytes: 4096, ..WriteOptions::default() };
    assert_eq!(check(&[text, vision], options, 5), 3);
}

#[test]
fn memory_and_folder_give_the_same() {
    let files = Files::usual();
    let bundle = files.open().unwrap();
    assert_eq!(bundle.folder(), None);
    assert_eq!(bundle.read_text(&path("chat_template.jinja")).unwrap(), "{{ messages }}");
    let dir = tempfile::tempdir().unwrap();
    write_usual(&dir.path().join("m"));
    let other = open(&dir.path().join("m")).unwrap();
    assert_eq!(bundle.fingerprint(), other.fingerprint());
    assert_eq!(bundle.weights().tensor("moe.up").unwrap().data(), other.weights().tensor("moe.up").unwrap().data());
    // By its manifest, too.
    assert_eq!(open(&dir.path().join("m/qhx.json")).unwrap().manifest(), other.manifest());
}

#[test]
fn tensors_whole_or_by_rows() {
    let dir = tempfile::tempdir().unwrap();
    let text = program("text", &[("a", Encoding::F32, vec![3, 5])]);
    let start = || {
        let mut writer = BundleWriter::create(dir.path().join("m"), WriteOptions::default()).unwrap();
        writer.add_program(&text).unwrap();
        writer.declare_weights(TensorSpec::of_programs([&text])).unwrap();
        writer
    };
    let mut plain = manifest();
    plain.chat.mode = manifest::ChatMode::Completion;
    (plain.chat.template, plain.tokenizer) = (None, None);
    let rows = |shape: &[usize], first: f32| {
        let values: Vec<f32> = (0..shape.iter().product::<usize>()).map(|i| first + i as f32).collect();
        qhx_ir::WeightTensor::from_f32(shape, &values).unwrap()
    };
    let error = |result: Result<(), BundleError>| result.unwrap_err().to_string();
    {
        let writer = start();
        writer.write_tensor_rows("a", 1, &rows(&[2, 5], 5.0)).unwrap();
        assert!(error(writer.write_tensor_rows("a", 2, &rows(&[1, 5], 0.0))).contains("row 2 is written twice"));
        assert!(error(writer.write_tensor_rows("a", 0, &rows(&[1, 6], 0.0))).contains("expected f32 rows of 5 numbers"));
        assert!(error(writer.write_tensor_rows("a", 2, &rows(&[2, 5], 0.0))).contains("beyond its 3"));
        assert!(error(writer.write_tensor_rows("b", 0, &rows(&[1, 5], 0.0))).contains("`b`: was not declared"));
        assert!(error(writer.write_rows("a", layout::Part::Scale, 0, &[0; 64])).contains("has no Scale part"));
        assert!(error(writer.write_rows("a", layout::Part::Data, 0, &[0; 63])).contains("not whole rows of 64"));
        assert!(error(writer.finish(plain.clone()).map(drop)).contains("row 0 of `a` was never written"));
    }
    let writer = start();
    writer.write_tensor_rows("a", 1, &rows(&[2, 5], 5.0)).unwrap();
    writer.write_tensor_rows("a", 0, &rows(&[1, 5], 0.0)).unwrap();
    writer.finish(plain).unwrap();
    let tensor = open(&dir.path().join("m")).unwrap().weights().tensor("a").unwrap();
    let mut row = [0.0; 5];
    tensor.decode_row(2, &mut row);
    assert_eq!(row, [10.0, 11.0, 12.0, 13.0, 14.0]);
}

#[test]
fn staged_bundles_open_and_take_their_parity() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("m");
    let (writer, _) = write(&place, &[usual_program()], WriteOptions::default(), &mut Random(7));
    let mut staged = writer.stage(manifest()).unwrap();
    assert!(!place.exists());
    let before = staged.open().unwrap().fingerprint();
    staged.set_parity(b"{\"a\": 1}").unwrap();
    staged.set_parity(b"{\"a\": 2}").unwrap();
    staged.publish().unwrap();
    let bundle = open(&place).unwrap();
    assert_eq!(bundle.read_text(bundle.manifest().parity.as_ref().unwrap()).unwrap(), "{\"a\": 2}");
    assert_ne!(bundle.fingerprint(), before);
    let text = fs::read_to_string(place.join("qhx.json")).unwrap();
    assert!(text.find("schema_version").unwrap() < 8192 && text.starts_with("{\n  \"schema_version\""));
}
