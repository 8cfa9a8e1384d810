//! Arch folders: written inside a bundle, each use with its own files and no others, complete in themselves.

use crate::fixture::*;
use qhx_bundle::{
    target::{Finalize, KvForm, MadeFor, PlacementRules, PreparedProgram, TargetPlan},
    *,
};
use qhx_ir::Encoding;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

fn prepared(name: &str) -> PreparedProgram {
    PreparedProgram { graphs: vec![path(&format!("{name}.npu.json"))], contexts: vec![path(&format!("{name}_part0.bin"))] }
}

/// The manifest of a use, and its programs.
fn in_use(root: &Manifest, programs: &[&str]) -> (Manifest, BTreeSet<String>) {
    let mut manifest = root.clone();
    manifest.model.dsp_arch = Some("v81".into());
    manifest.plan = Some(TargetPlan {
        made_for: MadeFor::Emulator,
        toolchain: "QAIRT 2.51.0".into(),
        oldest_qairt: "2.51".into(),
        context: 64,
        prefill: vec![8, 32],
        prefill_min_tokens: 4,
        kv: KvForm::Full,
        finalize: Finalize { optimization: 3, vtcm_mb: 8, hvx_threads: 4, dlbc: false },
        notes: vec!["as told".into()],
        programs: programs.iter().map(|&name| (name.into(), prepared(name))).collect(),
    });
    (manifest, programs.iter().map(|&name| name.into()).collect())
}

/// A bundle of two programs with a folder `v81` for text alone and for both; where that folder is.
pub(crate) fn write_target(place: &Path) -> PathBuf {
    let programs = [usual_program(), program("vision", &[("patches", Encoding::F32, vec![9, 20]), ("inner", Encoding::F32, vec![12])])];
    let (writer, _) = write(place, &programs, WriteOptions::default(), &mut Random(3));
    let staged = writer.stage(manifest()).unwrap();
    let bundle = staged.open().unwrap();
    let mut target = staged.target("v81", None).unwrap();
    for name in ["text", "vision"] {
        let PreparedProgram { graphs, contexts } = prepared(name);
        for file in contexts.iter().chain(&graphs) {
            fs::write(target.path().join(file.as_str()), format!("{file}")).unwrap();
            target.adopt(file).unwrap();
        }
    }
    programs.iter().for_each(|program| target.add_program(program).unwrap());
    for file in ["tokenizer.json", "chat_template.jinja"] {
        target.add_file(&path(file), &bundle.read(&path(file)).unwrap()).unwrap();
    }
    let tensor = |name: &str| (name.to_string(), bundle.weights().tensor(name).unwrap());
    target.add_weights(vec![("text".into(), vec![tensor("table")]), ("vision".into(), vec![tensor("patches")])], 1 << 20).unwrap();
    let (text, both) = (in_use(staged.manifest(), &["text"]), in_use(staged.manifest(), &["text", "vision"]));
    target.finish(vec![(path("tiny.json"), text.0, text.1), (path("tiny-vlm.json"), both.0, both.1)]).unwrap();
    staged.publish().unwrap().join("v81")
}

fn table(bundle: &Bundle, name: &str) -> Option<Vec<u8>> {
    bundle.weights().tensor(name).map(|tensor| tensor.data().to_vec())
}

#[test]
fn each_use_has_its_files_and_no_others() {
    let dir = tempfile::tempdir().unwrap();
    let folder = write_target(&dir.path().join("model"));
    let root = Bundle::open(dir.path().join("model")).unwrap();
    assert!(root.manifest().plan.is_none() && root.manifest().files.keys().all(|file| !file.as_str().starts_with("v81")));
    // Moved away from its bundle.
    let alone = dir.path().join("alone");
    fs::rename(&folder, &alone).unwrap();
    let both = Bundle::open(&alone).unwrap();
    assert_eq!(both.programs().len(), 2, "of a folder's manifests the one with the most programs");
    assert_eq!((table(&both, "table"), table(&both, "patches")), (table(&root, "table"), table(&root, "patches")));
    assert!(table(&both, "norm").is_none() && table(&both, "inner").is_none(), "what the host does not read is not there");
    let named: BTreeSet<String> = both.manifest().named_files().map(|(_, file)| file.to_string()).collect();
    assert_eq!(named, both.manifest().files.keys().map(|file| file.to_string()).collect(), "every file is named by a field");
    for entry in fs::read_dir(&alone).unwrap().flatten().filter(|e| e.file_name().to_str().unwrap().starts_with("vision")) {
        fs::remove_file(entry.path()).unwrap();
    }
    fs::remove_file(alone.join("weights/vision-00001-of-00001.safetensors")).unwrap();
    let text = Bundle::open(alone.join("tiny.json")).unwrap();
    assert!(text.programs().len() == 1 && text.manifest().files.keys().all(|file| !file.as_str().contains("vision")));
    let error = Bundle::open(&alone).unwrap_err().to_string();
    assert!(error.contains("vision") && error.contains("is missing"), "{error}");
}

#[test]
fn files_may_be_elsewhere_than_the_manifest_and_damage_is_seen() {
    let dir = tempfile::tempdir().unwrap();
    let folder = write_target(&dir.path().join("model"));
    let manifest = dir.path().join("copied.json");
    fs::copy(folder.join("tiny.json"), &manifest).unwrap();
    let options = OpenOptions { cache_dir: None, ..OpenOptions::default() };
    let open = |root: &Path| Bundle::open_in(&manifest, root, &options).map(drop).map_err(|e| e.to_string());
    open(&folder).unwrap();
    assert!(open(dir.path()).unwrap_err().contains("is missing"));
    fs::write(folder.join("text_part0.bin"), "text_part0.bim").unwrap();
    assert!(open(&folder).unwrap_err().contains("`text_part0.bin` is damaged"));
    fs::write(folder.join("text_part0.bin"), "text").unwrap();
    let error = open(&folder).unwrap_err();
    assert!(error.contains("plan.programs.text.contexts[0]") && error.contains("truncated"), "{error}");
    assert!(Bundle::open_in(&folder, &folder, &options).unwrap_err().to_string().contains("a manifest is expected"));
}

#[test]
fn wrong_plans_name_the_field() {
    let root = manifest();
    let files: BTreeMap<BundlePath, manifest::FileEntry> =
        ["text.npu.json", "text_part0.bin", "tokenizer.json", "chat_template.jinja", "t.json"]
            .map(|file| (path(file), manifest::FileEntry { bytes: 1, sha256: Digest::of(b"x") }))
            .into();
    let whole = || {
        let mut manifest = in_use(&root, &["text"]).0;
        manifest.programs = BTreeMap::from([("text".into(), manifest::ProgramEntry { file: path("t.json") })]);
        manifest.files = files.clone();
        manifest.check().unwrap();
        manifest
    };
    let error = |change: fn(&mut Manifest)| {
        let mut manifest = whole();
        change(&mut manifest);
        manifest.check().unwrap_err().to_string()
    };
    assert!(error(|m| m.model.dsp_arch = None).contains("`model.dsp_arch`"));
    assert!(error(|m| m.plan = None).contains("together with `plan`"));
    assert!(error(|m| m.plan.as_mut().unwrap().context = 0).contains("`plan.context`"));
    assert!(error(|m| m.plan.as_mut().unwrap().prefill = vec![8, 8]).contains("`plan.prefill`"));
    assert!(error(|m| m.plan.as_mut().unwrap().programs.clear()).contains("`text` is missing"));
    assert!(error(|m| drop(m.plan.as_mut().unwrap().programs.insert("vision".into(), prepared("vision")))).contains("`vision`"));
    assert!(
        error(|m| m.plan.as_mut().unwrap().programs.get_mut("text").unwrap().graphs = vec![path("a/b.json")])
            .contains("in the manifest's folder")
    );
    assert!(error(|m| m.plan.as_mut().unwrap().programs.get_mut("text").unwrap().graphs.clear()).contains("must name a file"));
    // What runs elsewhere needs no graphs; who says so must be an arch folder.
    let mut elsewhere = whole();
    elsewhere.placement = Some(PlacementRules { default: Some("cpu".into()), ..Default::default() });
    elsewhere.plan.as_mut().unwrap().programs.clear();
    assert_eq!(Manifest::from_json(&elsewhere.to_json().unwrap()).unwrap(), elsewhere);
    (elsewhere.plan, elsewhere.model.dsp_arch) = (None, None);
    assert!(elsewhere.check().unwrap_err().to_string().contains("`placement`"));
    assert!(error(|m| m.files.retain(|file, _| file.as_str() != "text_part0.bin")).contains("plan.programs.text.contexts[0]"));
}

#[test]
fn a_folder_that_failed_its_gate_is_named_so_and_nothing_is_left_of_an_abandoned_one() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("model");
    let (writer, _) = write(&place, &[usual_program()], WriteOptions::default(), &mut Random(5));
    let staged = writer.stage(manifest()).unwrap();
    let target = staged.target("v79", None).unwrap();
    assert!(staged.target("v79", None).is_err() && staged.target("../v79", None).is_err());
    drop(target);
    staged.reject_target("v79").unwrap();
    let (place, other) = (staged.publish().unwrap(), dir.path().join("other"));
    assert!(place.join("v79.rejected").is_dir() && !place.join("v79").exists());
    let (writer, _) = write(&other, &[usual_program()], WriteOptions::default(), &mut Random(5));
    let staged = writer.stage(manifest()).unwrap();
    drop(staged.target("v81", None).unwrap());
    drop(staged);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "the bundle that was published");
}
