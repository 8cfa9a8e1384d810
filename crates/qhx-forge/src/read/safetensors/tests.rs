use super::*;
use crate::read::testing::{Random, good_safetensors as good, safetensors, with_header};
use std::fs;

fn refused(file: &[u8]) -> String {
    parse_header(file).expect_err("this should be refused").to_string()
}

/// A header of one tensor `w` with this type, shape and offsets, over 16 bytes of data.
fn one(dtype: &str, shape: &str, offsets: &str) -> Vec<u8> {
    with_header(&format!(r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#), &[0; 16])
}

#[test]
fn reads_what_is_there() {
    let file = good();
    let tensors = parse_header(&file).unwrap();
    let found: Vec<_> =
        tensors.iter().map(|t| (t.info.name.as_str(), t.info.source_type, t.info.shape.as_slice(), t.range.len())).collect();
    let expected: [(_, _, &[usize], _); 4] = [
        ("a", SourceType::F32, &[2, 2], 16),
        ("b", SourceType::Bf16, &[3], 6),
        ("empty", SourceType::I64, &[0, 5], 0),
        ("scalar", SourceType::F64, &[], 8),
    ];
    assert_eq!(found, expected);
    assert_eq!(&file[tensors[1].range.clone()], &[2; 6]);
    // Metadata, in any order of the data, with the padding that writers add.
    let header = r#"{"__metadata__":{"format":"pt"},"y":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},"x":{"shape":[1],"data_offsets":[0,1],"dtype":"U8"}}   "#;
    assert_eq!(parse_header(&with_header(header, &[1, 2, 3])).unwrap().len(), 2);
    assert!(parse_header(&with_header("{}", &[])).unwrap().is_empty());
}

#[test]
fn truncated_files() {
    let file = good();
    for length in 0..file.len() {
        let error = refused(&file[..length]);
        assert!(error.contains("truncated") || error.contains("too short"), "{length}: {error}");
    }
    assert!(refused(&file[..5]).contains("it has 5 bytes"));
    assert!(refused(&file[..40]).contains("but the file ends after 32"));
    assert!(refused(&file[..file.len() - 1]).contains("tensor `scalar` ends at byte 30 of the data but the file has only 29 there"));
}

#[test]
fn headers_that_lie() {
    assert!(refused(&u64::MAX.to_le_bytes()).contains("more than the 100000000 allowed"));
    assert!(refused(&with_header("[]", &[])).contains("does not begin with `{`"));
    assert!(refused(&with_header("", &[])).contains("does not begin with `{`"));
    assert!(refused(&with_header(r#"{"w""#, &[])).contains("the header: tensor `w`: EOF while parsing"));
    let deep = format!(r#"{{"__metadata__":{}"#, "[".repeat(10_000));
    assert!(refused(&with_header(&deep, &[])).contains("__metadata__"));
    assert!(refused(&one("F32", "[1,4]", "[0,16],\"more\":1")).contains("unknown field `more`"));
    assert!(refused(&one("F32", "[-1]", "[0,16]")).contains("tensor `w`: invalid value"));
    assert!(refused(&one("F32", "[4.0]", "[0,16]")).contains("tensor `w`: invalid type: floating point"));
    let name = "n".repeat(500);
    let long = with_header(&format!(r#"{{"{name}":{{"dtype":"F7","shape":[],"data_offsets":[0,0]}}}}"#), &[]);
    assert!(refused(&long).len() < 300, "a long name does not fill the screen");
}

#[test]
fn types() {
    assert!(refused(&one("F7", "[4]", "[0,16]")).contains("tensor `w` has the unknown type `F7`; known are F64"));
    let quantised = parse_header(&one("F8_E4M3", "[16]", "[0,16]")).unwrap_err();
    assert!(
        matches!(&quantised, Problem::Unsupported(text) if text.contains("tensor `w` has type F8_E4M3") && text.contains("take the original"))
    );
}

#[test]
fn shapes_and_sizes() {
    assert!(refused(&one("U8", "[1152921504606846976]", "[0,16]")).contains("tensor `w` has shape [1152921504606846976], more than"));
    assert!(refused(&one("U8", "[4294967296,268435456]", "[0,16]")).contains("elements that a tensor may have"));
    assert!(refused(&one("F64", "[9223372036854775807,9223372036854775807]", "[0,16]")).contains("elements that a tensor may have"));
    assert!(refused(&one("U8", "[72057594037927936]", "[0,72057594037927936]")).contains("is it truncated?"));
    assert!(refused(&one("F32", "[3]", "[0,16]")).contains("tensor `w` has 16 bytes but its shape [3] of F32 needs 12"));
    assert!(refused(&one("F32", "[4]", "[16,0]")).contains("begins at byte 16 of the data but ends before it, at 0"));
    assert!(refused(&one("F32", "[4]", "[18446744073709551600,18446744073709551615]")).contains("is it truncated?"));
}

#[test]
fn ranges_cover_the_data_once() {
    let two = |first: &str, second: &str, data: usize| {
        let header = format!(
            r#"{{"a":{{"dtype":"U8","shape":[4],"data_offsets":{first}}},"b":{{"dtype":"U8","shape":[4],"data_offsets":{second}}}}}"#
        );
        with_header(&header, &vec![0; data])
    };
    assert!(parse_header(&two("[4,8]", "[0,4]", 8)).is_ok());
    assert_eq!(refused(&two("[0,4]", "[2,6]", 6)), "tensors `a` and `b` overlap at byte 2 of the data");
    assert_eq!(refused(&two("[0,4]", "[0,4]", 4)), "tensors `a` and `b` overlap at byte 0 of the data");
    assert!(refused(&two("[0,4]", "[6,10]", 10)).contains("2 bytes before tensor `b` (byte 6 of the data) belong to no tensor"));
    assert!(refused(&two("[0,4]", "[4,8]", 11)).contains("the last 3 bytes belong to no tensor"));
    let twice = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}"#;
    assert_eq!(refused(&with_header(twice, &[0; 8])), "the header has tensor `a` twice");
}

#[test]
fn damaged_files_never_panic() {
    let file = good();
    let mut random = Random(42);
    for _ in 0..20_000 {
        let mut broken = file.clone();
        for _ in 0..1 + random.below(4) {
            let at = random.below(broken.len());
            match random.below(4) {
                0 => broken[at] ^= 1 << random.below(8),
                1 => broken[at] = random.next() as u8,
                2 => broken[at] = b"0123456789{}[],:\""[random.below(17)],
                _ => broken.truncate(at.max(1)),
            }
        }
        if let Ok(tensors) = parse_header(&broken) {
            tensors.iter().for_each(|t| assert!(t.range.end <= broken.len() && t.range.start <= t.range.end));
        }
    }
}

fn shards(index: &str) -> (tempfile::TempDir, Result<TensorSource, String>) {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("model-1.safetensors"), safetensors(&[("a", "F32", &[1], &1f32.to_le_bytes()), ("x", "U8", &[1], &[9])]))
        .unwrap();
    fs::write(folder.path().join("model-2.safetensors"), safetensors(&[("b", "F32", &[1], &2f32.to_le_bytes())])).unwrap();
    fs::write(folder.path().join(INDEX), index).unwrap();
    let opened = open_folder(folder.path()).map_err(|e| e.to_string());
    (folder, opened)
}

#[test]
fn shards_are_read_through_the_index() {
    let (_folder, source) = shards(r#"{"metadata":{"total_size":8},"weight_map":{"a":"model-1.safetensors","b":"model-2.safetensors"}}"#);
    let source = source.unwrap();
    let mut number = [0.0];
    source.read_f32("a", 0..1, &mut number).unwrap();
    assert_eq!(number, [1.0]);
    source.read_f32("b", 0..1, &mut number).unwrap();
    assert_eq!(number, [2.0]);
    assert!(source.find("x").is_none(), "only what the index names");
}

#[test]
fn indexes_that_lie() {
    let refused = |index: &str| shards(index).1.map(|_| ()).unwrap_err();
    for name in ["../x.safetensors", "../x", "/etc/passwd", "a/b.safetensors", "..\\x.safetensors", "C:x.safetensors", "", ".safetensors"] {
        let error = refused(&serde_json::json!({ "weight_map": { "a": name } }).to_string());
        assert!(error.contains("which is not the plain name of a .safetensors file") && error.contains(INDEX), "{name}: {error}");
    }
    assert!(
        refused(r#"{"weight_map":{"a":"model-3.safetensors"}}"#)
            .contains("names the shard `model-3.safetensors`, which is not in the folder")
    );
    let error = refused(r#"{"weight_map":{"b":"model-1.safetensors"}}"#);
    assert!(error.contains("tensor `b` is in `model-1.safetensors`, but that shard does not have it"), "{error}");
    assert!(refused(r#"{"weight_map":{}}"#).contains("`weight_map` is empty"));
    assert!(refused("{}").contains("missing field `weight_map`"));
}

#[test]
fn folders_without_an_index() {
    let folder = tempfile::tempdir().unwrap();
    let open = || open_folder(folder.path()).map_err(|e| e.to_string());
    assert!(open().unwrap_err().contains("there are no .safetensors files"));
    fs::write(folder.path().join("pytorch_model.bin"), b"").unwrap();
    assert!(open().unwrap_err().contains("PyTorch pickle files"));
    fs::write(folder.path().join("weights.safetensors"), good()).unwrap();
    assert_eq!(open().unwrap().tensors().len(), 4);
    fs::write(folder.path().join("other.safetensors"), good()).unwrap();
    assert!(open().unwrap_err().contains("there are 2 .safetensors files but no `model.safetensors.index.json`"));
    fs::write(folder.path().join("model.safetensors"), &good()[..50]).unwrap();
    let error = open().unwrap_err();
    assert!(error.contains("model.safetensors is not a valid safetensors file: the header should have"), "{error}");
}
