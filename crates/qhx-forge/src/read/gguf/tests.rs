use super::*;
use crate::read::gguf_writer::GgufWriter;
use crate::read::testing::{Random, tiny_gguf, tiny_sentence_piece_gguf};
use crate::read::{Checkpoint, Mapping};

fn refused(file: &[u8]) -> String {
    parse(file).expect_err("this should be refused").to_string()
}

/// A file of one tensor `w`, written by hand.
fn one(dimensions: &[u64], kind: u32, offset: u64, data: usize) -> Vec<u8> {
    table(&[("w", dimensions, kind, offset)], data)
}

fn table(tensors: &[(&str, &[u64], u32, u64)], data: usize) -> Vec<u8> {
    let mut file = b"GGUF\x03\0\0\0".to_vec();
    file.extend((tensors.len() as u64).to_le_bytes());
    file.extend(0u64.to_le_bytes());
    for (name, dimensions, kind, offset) in tensors {
        file.extend((name.len() as u64).to_le_bytes());
        file.extend(name.as_bytes());
        file.extend((dimensions.len() as u32).to_le_bytes());
        dimensions.iter().for_each(|d| file.extend(d.to_le_bytes()));
        file.extend(kind.to_le_bytes());
        file.extend(offset.to_le_bytes());
    }
    file.resize(file.len().next_multiple_of(32) + data, 0);
    file
}

#[test]
fn every_kind_of_value_comes_back() {
    let values = [
        Value::U8(200),
        Value::I8(-3),
        Value::U16(60_000),
        Value::I16(-30_000),
        Value::U32(4_000_000_000),
        Value::I32(-2_000_000_000),
        Value::U64(u64::MAX),
        Value::I64(i64::MIN),
        Value::F32(1e-5),
        Value::F64(std::f64::consts::PI),
        Value::Bool(true),
        Value::Text("naïve ▁".into()),
        Value::Array(Array::U8(vec![1, 2])),
        Value::Array(Array::I8(vec![-1])),
        Value::Array(Array::U16(vec![1])),
        Value::Array(Array::I16(vec![-1])),
        Value::Array(Array::U32(vec![1, 2, 3])),
        Value::Array(Array::I32(vec![-1])),
        Value::Array(Array::U64(vec![1])),
        Value::Array(Array::I64(vec![-1])),
        Value::Array(Array::F32(vec![0.5])),
        Value::Array(Array::F64(vec![0.25])),
        Value::Array(Array::Bool(vec![true, false])),
        Value::Array(Array::Text(vec!["a".into(), String::new()])),
        Value::Array(Array::Array(vec![Array::U8(vec![1]), Array::Array(vec![Array::Text(vec![])])])),
    ];
    let mut writer = GgufWriter::default();
    for (i, value) in values.iter().enumerate() {
        writer.set(&format!("key.{i}"), value.clone());
    }
    writer.tensor("w", SourceType::Q4_0, &[3, 64], Random(1).bytes(108)).tensor_f32("v", &[5], &[1.0, 2.0, 3.0, 4.0, 5.0]);
    let file = writer.bytes();
    let parsed = parse(&file).unwrap();
    for (i, value) in values.iter().enumerate() {
        assert_eq!(parsed.metadata.get(&format!("key.{i}")), Some(value));
    }
    assert_eq!(parsed.version, 3);
    let [w, v] = parsed.tensors.as_slice() else { panic!("two tensors") };
    assert_eq!((w.name.as_str(), w.source_type, w.shape.as_slice(), w.range.len()), ("w", SourceType::Q4_0, &[3, 64][..], 108));
    assert_eq!(&file[w.range.clone()], &writer.tensors[0].3);
    assert_eq!((v.shape.as_slice(), v.range.start % 32), (&[5][..], 0));
}

#[test]
fn look_up_is_typed() {
    let mut metadata = Metadata::default();
    metadata.insert("n".into(), Value::I16(7));
    metadata.insert("minus".into(), Value::I32(-7));
    metadata.insert("eps".into(), Value::F32(1e-5));
    metadata.insert("nan".into(), Value::F32(f32::NAN));
    assert_eq!(metadata.unsigned("n"), Ok(Some(7)));
    assert_eq!(metadata.unsigned("none"), Ok(None));
    assert_eq!(metadata.float("eps"), Ok(Some(1e-5)));
    assert!(metadata.unsigned("minus").unwrap_err().to_string().contains("`minus` should be a whole number of at least 0 but is I32(-7)"));
    assert!(metadata.float("nan").unwrap_err().to_string().contains("should be a number but is F32(NaN)"));
    assert!(metadata.text("n").unwrap_err().to_string().contains("should be text"));
}

#[test]
fn versions() {
    let version = |version: u32| {
        let mut file = one(&[1], 0, 0, 32);
        file[4..8].copy_from_slice(&version.to_le_bytes());
        file
    };
    assert_eq!(parse(&version(2)).unwrap().version, 2);
    assert!(refused(&version(1)).contains("GGUF version 1, which qhx does not read"));
    assert!(refused(&version(4)).contains("GGUF version 4; qhx reads 2 and 3"));
    assert!(refused(&version(3u32.swap_bytes())).contains("big endian"));
    assert!(refused(b"tjgg\x01\0\0\0").contains("older GGML file"));
    assert!(refused(b"PK\x03\x04....").contains("begins with [50, 4b, 03, 04] and not with `GGUF`"));
}

#[test]
fn truncated_files() {
    let file = tiny_gguf().bytes();
    for length in (0..file.len()).step_by(7) {
        assert!(refused(&file[..length]).contains("is it truncated?"), "{length}: {}", refused(&file[..length]));
    }
    assert!(refused(&file[..file.len() - 1]).contains("tensor `blk.0.ffn_down.weight` ends at byte"));
    assert!(refused(b"").contains("the magic number at byte 0 needs 4 bytes but only 0 are left"));
}

#[test]
fn counts_are_held_against_the_file() {
    let header = |tensors: u64, keys: u64, rest: &[u8]| [b"GGUF\x03\0\0\0", &tensors.to_le_bytes()[..], &keys.to_le_bytes(), rest].concat();
    assert!(
        refused(&header(1 << 60, 0, &[0; 64]))
            .contains("the tensor table at byte 24 claims 1152921504606846976 entries but only 64 bytes are left")
    );
    assert!(refused(&header(0, u64::MAX, &[0; 64])).contains("the metadata at byte 24 claims 18446744073709551615 entries"));
    let array = |kind: u32, count: u64| {
        let mut rest = [&1u64.to_le_bytes()[..], b"k", &9u32.to_le_bytes(), &kind.to_le_bytes(), &count.to_le_bytes()].concat();
        rest.resize(rest.len() + 64, 0);
        header(0, 1, &rest)
    };
    for kind in 0..13 {
        let error = refused(&array(kind, 1 << 60));
        assert!(error.contains("the value of `k` at byte 49 claims 1152921504606846976 entries"), "{error}");
    }
    assert!(refused(&array(13, 1)).contains("array of the unknown type 13"));
    let text = [&1u64.to_le_bytes()[..], b"k", &8u32.to_le_bytes(), &(1u64 << 60).to_le_bytes(), &[0; 32]].concat();
    assert!(refused(&header(0, 1, &text)).contains("needs 1152921504606846976 bytes but only 32 are left"));
}

#[test]
fn values_that_are_wrong() {
    let with = |value: Value| {
        let mut writer = GgufWriter::default();
        writer.set("k", value);
        writer.bytes()
    };
    let mut truth = with(Value::Bool(true));
    *truth.last_mut().unwrap() = 2;
    assert!(refused(&truth).contains("the value of `k` should be true (1) or false (0) but is 2"));
    let mut text = with(Value::Text("ab".into()));
    *text.last_mut().unwrap() = 0xff;
    assert!(refused(&text).contains("is not valid UTF-8"));
    let nested = (0..MAX_DEPTH).fold(Array::U8(vec![1]), |inner, _| Array::Array(vec![inner]));
    assert!(refused(&with(Value::Array(nested))).contains("more than 4 deep"));
    let mut twice = GgufWriter::default();
    twice.set_u32("k", 1).set_u32("k", 2);
    assert_eq!(refused(&twice.bytes()), "the metadata has the key `k` twice");
    for alignment in [0, 24] {
        let mut writer = GgufWriter::default();
        writer.set_u32("general.alignment", alignment);
        assert!(refused(&writer.bytes()).contains(&format!("`general.alignment` is {alignment}, which is not a power of two")));
    }
    let mut wide = GgufWriter::default();
    wide.set_u32("general.alignment", 64).tensor_f32("w", &[1], &[1.0]);
    let mut file = wide.bytes();
    file.resize(file.len() + 64, 0);
    assert_eq!(parse(&file).unwrap().tensors[0].range.start % 64, 0);
}

#[test]
fn tensors_that_are_wrong() {
    assert!(refused(&one(&[1 << 60], 0, 0, 32)).contains("tensor `w` has shape [1152921504606846976], more than"));
    assert!(refused(&one(&[1 << 40, 1 << 40], 0, 0, 32)).contains("elements that a tensor may have"));
    assert!(refused(&one(&[1, 1, 1, 1, 1], 0, 0, 32)).contains("tensor `w` has 5 dimensions; at most 4"));
    assert!(refused(&one(&[33], 2, 0, 32)).contains("rows of 33 numbers, which is no multiple of the 32 in a block of Q4_0"));
    assert!(refused(&one(&[16, 2], 2, 0, 32)).contains("rows of 16 numbers"));
    assert!(refused(&one(&[8], 0, 8, 64)).contains("begins at byte 8 of the data, which is no multiple of the alignment of 32"));
    assert!(refused(&one(&[8], 0, u64::MAX - 31, 64)).contains("beyond any file"));
    assert!(refused(&one(&[9], 0, 0, 32)).contains("is it truncated?"));
    assert!(
        refused(&one(&[256], 16, 0, 320))
            .contains("tensor `w` has type IQ2_XXS, which qhx does not read; take a file whose tensors are F32")
    );
    assert!(refused(&one(&[256], 99, 0, 320)).contains("unknown type number 99"));
    assert_eq!(refused(&table(&[("a", &[8], 0, 0), ("a", &[8], 0, 32)], 64)), "the file has tensor `a` twice");
    assert!(refused(&table(&[("a", &[16], 0, 0), ("b", &[8], 0, 32)], 64)).contains("tensors `a` and `b` overlap at byte"));
    assert!(parse(&table(&[("a", &[8], 0, 32), ("b", &[8], 0, 0)], 64)).is_ok());
}

#[test]
fn damaged_files_never_panic() {
    for file in [tiny_gguf(), tiny_sentence_piece_gguf()] {
        let file = file.bytes();
        let header = parse(&file).unwrap().tensors[0].range.start;
        let mut random = Random(42);
        let mut survivors = 0;
        for _ in 0..4_000 {
            let mut broken = file.clone();
            for _ in 0..1 + random.below(3) {
                let at = random.below(header);
                match random.below(5) {
                    0 => broken[at] ^= 1 << random.below(8),
                    1 => broken[at] = random.next() as u8,
                    2 => broken[at] = 0,
                    3 if at + 8 <= broken.len() => broken[at..at + 8].copy_from_slice(&random.next().to_le_bytes()),
                    _ => broken.truncate(broken.len() - random.below(64)),
                }
            }
            // All the way: tokenizer, configuration, and every row of every tensor.
            if let Ok(checkpoint) = Checkpoint::from_gguf(Mapping::from_bytes("broken", broken)) {
                survivors += 1;
                for info in checkpoint.tensors.tensors() {
                    let mut out = vec![0.0; info.rows() * info.columns()];
                    checkpoint.tensors.read_f32(&info.name, 0..info.rows(), &mut out).unwrap();
                }
            }
        }
        assert!(survivors > 100, "the mutations should not all be fatal: {survivors} survived");
    }
}
