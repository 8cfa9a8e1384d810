//! Bundles that are wrong, each told by what is wrong with it.

use crate::fixture::*;
use qhx_bundle::*;
use serde_json::json;
use std::{fs, path::Path};

#[track_caller]
fn says(error: &str, parts: &[&str]) {
    assert!(parts.iter().all(|part| error.contains(part)), "expected {parts:?}, found: {error}");
}

/// A usual bundle in a folder, spoiled by `change`.
fn spoiled(change: impl FnOnce(&Path)) -> String {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("model");
    write_usual(&place);
    change(&place);
    open(&place).unwrap_err().to_string()
}

#[test]
fn no_bundle_at_all() {
    let dir = tempfile::tempdir().unwrap();
    says(&open(dir.path()).unwrap_err().to_string(), &["not a bundle", "qhx.json", "is missing"]);
    says(&open(&dir.path().join("nothing")).unwrap_err().to_string(), &["nothing", "No such file"]);
    fs::write(dir.path().join("qhx.json"), b"\xff\xff").unwrap();
    says(&open(dir.path()).unwrap_err().to_string(), &["qhx.json", "not UTF-8"]);
    fs::File::create(dir.path().join("qhx.json")).unwrap().set_len(1 << 40).unwrap();
    says(&open(dir.path()).unwrap_err().to_string(), &["1099511627776 bytes", "more than"]);
}

#[test]
fn wrong_manifests() {
    let usual = Files::usual();
    let error = |change: fn(&mut serde_json::Value)| {
        let mut files = usual.clone();
        files.edit_manifest(change);
        files.error()
    };
    says(&error(|m| m["programs"]["text"]["file"] = "../../etc/passwd".into()), &["programs.text.file", "`../../etc/passwd`"]);
    says(&error(|m| m["tokenizer"] = "/etc/passwd".into()), &["`tokenizer`", "`/etc/passwd` is absolute"]);
    says(&error(|m| m["colour"] = "red".into()), &["qhx.json", "unknown field `colour`"]);
    says(&error(|m| m["schema_version"] = 9.into()), &["schema_version 9 is newer", "update qhx"]);
    says(&error(|m| m["weights"] = json!(["weights/other.safetensors"])), &["weights[0]", "`weights/other.safetensors`", "does not list"]);
    says(&error(|m| m["files"]["ghost"] = m["files"]["tokenizer.json"].clone()), &["`ghost`", "`files`", "is missing"]);
    says(&error(|m| m["files"]["tokenizer.json"]["bytes"] = 3.into()), &["`tokenizer.json`", "must have 3 bytes, found 2"]);
    says(
        &error(|m| m["files"]["tokenizer.json"]["sha256"] = "0".repeat(64).into()),
        &["`tokenizer.json`", "damaged or was changed", "sha256 must be 0000", "found 44136fa3"],
    );
    says(
        &error(|m| m["programs"]["vision"] = m["programs"]["text"].clone()),
        &["programs/text.json", "calls this program `vision`, the file `text`"],
    );
}

#[test]
fn wrong_files() {
    says(&spoiled(|p| fs::remove_file(p.join("tokenizer.json")).unwrap()), &["`tokenizer.json`", "field `tokenizer`", "is missing"]);
    says(&spoiled(|p| fs::write(p.join("tokenizer.json"), "[]").unwrap()), &["`tokenizer.json`", "damaged"]);
    let truncate = |p: &Path| fs::OpenOptions::new().write(true).open(p.join(WEIGHTS)).unwrap().set_len(5000).unwrap();
    says(&spoiled(truncate), &[WEIGHTS, "weights[0]", "found 5000", "truncated"]);
    let folder = |p: &Path| {
        fs::remove_file(p.join("tokenizer.json")).unwrap();
        fs::create_dir(p.join("tokenizer.json")).unwrap();
    };
    says(&spoiled(folder), &["`tokenizer.json`", "not a regular file"]);
}

#[cfg(unix)]
#[test]
fn links_that_leave_and_links_that_stay() {
    use std::os::unix::fs::symlink;
    let outside = tempfile::tempdir().unwrap();
    let target = outside.path().join("tokenizer.json");
    fs::write(&target, "{}").unwrap();
    let out = |p: &Path| {
        fs::remove_file(p.join("tokenizer.json")).unwrap();
        symlink(&target, p.join("tokenizer.json")).unwrap();
    };
    says(&spoiled(out), &["`tokenizer.json`", "outside the folder", outside.path().to_str().unwrap()]);
    // A folder that is a link out.
    let out = |p: &Path| {
        fs::rename(p.join("weights"), outside.path().join("weights")).unwrap();
        symlink(outside.path().join("weights"), p.join("weights")).unwrap();
    };
    says(&spoiled(out), &[WEIGHTS, "outside the folder"]);
    let pipe = |p: &Path| {
        fs::remove_file(p.join("tokenizer.json")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(p.join("tokenizer.json")).unwrap();
    };
    says(&spoiled(pipe), &["`tokenizer.json`", "not a regular file"]);

    let dir = tempfile::tempdir().unwrap();
    write_usual(&dir.path().join("model"));
    fs::rename(dir.path().join("model/tokenizer.json"), dir.path().join("model/real.json")).unwrap();
    symlink("real.json", dir.path().join("model/tokenizer.json")).unwrap();
    symlink("model", dir.path().join("alias")).unwrap();
    open(&dir.path().join("alias")).unwrap();
}

#[test]
fn wrong_weights() {
    let usual = Files::usual();
    let error = |change: fn(&mut serde_json::Value)| {
        let mut files = usual.clone();
        files.edit_header(change);
        files.error()
    };
    let rename = |h: &mut serde_json::Value, from: &str, to: &str| {
        let entry = h.as_object_mut().unwrap().remove(from).unwrap();
        h[to] = entry;
    };
    let mut files = usual.clone();
    files.edit_header(|h| rename(h, "norm", "nrm"));
    says(&files.error(), &["weight `norm` of program `text`", "no weight file has the tensor `norm`"]);
    let mut files = usual.clone();
    files.edit_header(|h| rename(h, "head.min", "head.mi"));
    says(&files.error(), &["weight `head`", "no weight file has the tensor `head.min`"]);
    says(&error(|h| h["norm"]["shape"] = json!([2, 16])), &["weight `norm`", "must be F32 [32]", "found F32 [2, 16]"]);
    says(&error(|h| h["table"]["dtype"] = "U8".into()), &["weight `table`", "must be I8 [5, 64]", "found U8 [5, 64]"]);
    says(&error(|h| h["norm"]["shape"] = json!([1u64 << 60])), &[WEIGHTS, "tensor `norm`", "does not take the 128 bytes"]);
    says(&error(|h| h["norm"]["data_offsets"] = h["moe.up.scale"]["data_offsets"].clone()), &[WEIGHTS, "`norm`", "does not take"]);
    says(
        &error(|h| {
            let at = |h: &serde_json::Value, n: &str, i: usize| h[n]["data_offsets"][i].as_u64().unwrap();
            // `table` starts inside the tensor before it.
            let (start, end) = (at(h, "table", 0), at(h, "table", 1));
            h["table"]["data_offsets"] = json!([start - 64, end - 64]);
        }),
        &[WEIGHTS, "overlap", "`table`"],
    );

    says(&error(|h| h["__metadata__"] = json!({})), &["declares", "has nothing known"]);

    let mut files = usual.clone();
    let mut bytes = files.get(WEIGHTS).clone();
    bytes.truncate(bytes.len() - 64);
    files.replace(WEIGHTS, bytes);
    says(&files.error(), &[WEIGHTS, "truncated"]);
    files.replace(WEIGHTS, b"{}".to_vec());
    says(&files.error(), &[WEIGHTS, "too few for a header"]);
}

#[test]
fn unaligned_weights() {
    // The same tensors behind a header that is not padded.
    let mut files = Files::usual();
    let bytes = files.get(WEIGHTS).clone();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = std::str::from_utf8(&bytes[8..8 + length]).unwrap().trim_end().as_bytes();
    assert_ne!((8 + header.len()) % 64, 0, "choose other names");
    files.replace(WEIGHTS, [&(header.len() as u64).to_le_bytes()[..], header, &bytes[8 + length..]].concat());
    says(&files.error(), &["no multiple of 64"]);
}

#[test]
fn wrong_programs() {
    let usual = Files::usual();
    let error = |from: &str, to: &str| {
        let mut files = usual.clone();
        let text = String::from_utf8(files.get(PROGRAM).clone()).unwrap();
        assert!(text.contains(from));
        files.replace(PROGRAM, text.replace(from, to).into_bytes());
        files.error()
    };
    says(&error("\"program_version\": 1", "\"program_version\": 2"), &[PROGRAM, "program_version is 2"]);
    says(&error("\"inputs\"", "\"input\""), &[PROGRAM, "input"]);
    // Stored alike, thanks to padding, but not the same weight.
    says(&error("[5,33]", "[5,34]"), &["weight `table`", "declares i8_row [5, 34]", "has i8_row [5, 33]"]);
    says(&error("[17]", "[18]"), &[PROGRAM, "norm", "[18]"]);
    says(&error("[5,33]", "[6,33]"), &["weight `table`", "declares i8_row [6, 33]", WEIGHTS, "has i8_row [5, 33]"]);
    says(&error("i8_row", "i8_rows"), &[PROGRAM, "unknown weight encoding"]);
}

#[test]
fn one_weight_declared_in_two_ways() {
    let mut files = Files::usual();
    let vision = program("vision", &[("table", qhx_ir::Encoding::I8Row, vec![5, 34])]).to_json().into_bytes();
    files.0.insert(path("programs/vision.json"), Vec::new());
    files.replace("programs/vision.json", vision);
    files.edit_manifest(|m| m["programs"]["vision"] = json!({"file": "programs/vision.json"}));
    says(&files.error(), &["weight `table` of program `vision`", "[5, 34]", "[5, 33]", "another program"]);
}

#[test]
fn one_tensor_in_two_files() {
    let mut files = Files::usual();
    let content = files.get(WEIGHTS).clone();
    files.0.insert(path("weights/b.safetensors"), Vec::new());
    files.replace("weights/b.safetensors", content);
    files.edit_manifest(|m| m["weights"] = json!([WEIGHTS, "weights/b.safetensors"]));
    says(&files.error(), &["weights/b.safetensors", "is in `weights/00001-of-00001.safetensors` already"]);
}

#[test]
fn writers_refuse_what_readers_would() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("model");
    let (writer, _) = write(&place, &[usual_program()], WriteOptions::default(), &mut Random(1));
    let mut wrong = manifest();
    wrong.tokens.eos = vec![99];
    says(&writer.finish(wrong).unwrap_err().to_string(), &["tokens.eos", "token 99"]);
    let mut writer = BundleWriter::create(&place, WriteOptions::default()).unwrap();
    writer.add_file(&path("a"), b"").unwrap();
    says(&writer.add_file(&path("a"), b"").unwrap_err().to_string(), &["`a` is written twice"]);
    says(&writer.add_file(&path("qhx.json"), b"").unwrap_err().to_string(), &["`qhx.json` is written twice"]);
    says(&writer.write_rows("a", layout::Part::Data, 0, &[]).unwrap_err().to_string(), &["before they are declared"]);
    drop(writer);
    // A weight that no program declares is no harm; one that is declared but not written never becomes a bundle.
    let mut writer = BundleWriter::create(&place, WriteOptions::default()).unwrap();
    writer.add_file(&path("tokenizer.json"), b"{}").unwrap();
    writer.add_file(&path("chat_template.jinja"), b"").unwrap();
    writer.add_program(&usual_program()).unwrap();
    says(&writer.finish(manifest()).unwrap_err().to_string(), &["no weight file has the tensor"]);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing remains");
}
