//! Damage to a bundle is found from its numbers: in copies whose sums were made to fit, so that no hash can help.

use qhx_bundle::{
    Bundle, BundlePath, Digest, Manifest,
    layout::{Part, stored_parts},
    manifest::FileEntry,
    safetensors::read_header,
};
use qhx_forge::{
    Calibration, ForgeOptions, GateOptions, GateProgress, Material, Precision, forge_gated, gate::suite::GivenPrompt, plan::Owners,
};
use qhx_ir::{Checked, Encoding, Name, Quants, Weight};
use qhx_runtime::{Cancel, LoadOptions, Model, verify};
use std::{
    fs,
    ops::Range,
    path::{Path, PathBuf},
};

/// A bundle on disk with a quick oracle, to be damaged and mended.
struct Victim {
    folder: tempfile::TempDir,
    manifest: Manifest,
    weights: Vec<u8>,
    file: BundlePath,
}

impl Victim {
    fn new(name: &str, precision: Precision) -> Self {
        Self::made(name, Some(precision), None)
    }

    /// At a precision, or, where there is none, by `auto`.
    fn made(name: &str, asked: Option<Precision>, calibration: Option<Calibration>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name);
        let out = folder.path().join("model");
        let mut options = ForgeOptions { calibration, ..ForgeOptions::new(&out, asked.unwrap_or(Precision::W8)) };
        let prompts = [2usize, 30].map(|n| GivenPrompt::Ids((0..n as u32).map(|i| i * 41 % 300).collect()));
        let material = Material::open(&source).unwrap();
        let mut silent = |_: GateProgress<'_>| {};
        let gate = GateOptions { prompts: Some(prompts.to_vec()), auto: asked.is_none(), ..GateOptions::new(&mut silent) };
        let gated = forge_gated(&material, &mut options, gate).unwrap();
        // Tiny random models may be below the tolerant gate at w8: their oracle is as good.
        fs::rename(&gated.path, folder.path().join("bundle")).unwrap();
        let [file] = &gated.manifest.weights[..] else { panic!("one weight file") };
        let weights = fs::read(folder.path().join("bundle").join(file.as_str())).unwrap();
        Self { file: file.clone(), manifest: gated.manifest, weights, folder }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("bundle")
    }

    /// Where a part of a weight lies in the file: its rows without padding, number after number.
    fn numbers(&self, name: &str, weight: &Weight, part: Part) -> Vec<Range<usize>> {
        let header = read_header(&self.weights).unwrap();
        let Some(stored) = header.tensors.get(&part.stored_name(name)) else { return Vec::new() };
        let parts = stored_parts(weight.encoding, &weight.shape).unwrap();
        let about = parts.iter().find(|p| p.part == part).unwrap();
        let columns = *weight.shape.last().unwrap();
        let (count, size) = match (weight.encoding, part) {
            (Encoding::I8Row, Part::Scale) => (1, 4),
            (Encoding::Block(block), Part::Data) if block.quants != Quants::I8 => {
                (block.quants.row_bytes(columns, block.block).unwrap(), 1)
            }
            (Encoding::Block(block), Part::Scale | Part::Min) => (columns.div_ceil(block.block), block.scale.bytes()),
            _ => (columns, about.dtype.bytes()),
        };
        (0..about.rows)
            .flat_map(|row| (0..count).map(move |i| (row, i)))
            .map(|(row, i)| {
                let start = stored.range.start + row * about.row_bytes + i * size;
                start..start + size
            })
            .collect()
    }

    /// Writes the bundle with one bit flipped and all sums made to fit, and verifies it.
    fn verify_with(&self, byte: usize, bit: u8) -> verify::Report {
        let mut weights = self.weights.clone();
        weights[byte] ^= 1 << bit;
        self.replay(self.write(&[(&self.file, &weights)]))
    }

    /// Writes the bundle with other files and all sums made to fit.
    fn write(&self, files: &[(&BundlePath, &[u8])]) -> Bundle {
        let mut manifest = self.manifest.clone();
        for (path, bytes) in files {
            manifest.files.insert((*path).clone(), FileEntry { bytes: bytes.len() as u64, sha256: Digest::of(bytes) });
            fs::write(self.path().join(path.as_str()), bytes).unwrap();
        }
        fs::write(self.path().join("qhx.json"), manifest.to_json().unwrap()).unwrap();
        Bundle::open(self.path()).unwrap()
    }

    fn replay(&self, bundle: Bundle) -> verify::Report {
        verify::replay(&bundle, &load(&bundle), &Cancel::new(), &mut |_, _| {}).unwrap()
    }

    /// The logits of the oracle's prompts, as the bundle on the disk gives them.
    fn logits(&self) -> Vec<f32> {
        let bundle = Bundle::open(self.path()).unwrap();
        let mut session = load(&bundle).session().unwrap();
        let mut all = Vec::new();
        for case in verify::oracle(&bundle).unwrap().cases {
            session.reset();
            assert!(case.media.is_empty(), "a model of text");
            all.extend_from_slice(session.append(&case.prompt_ids, &Cancel::new()).unwrap());
        }
        all
    }
}

fn load(bundle: &Bundle) -> Model {
    let cases = verify::oracle(bundle).map(|parity| parity.cases).unwrap_or_default();
    let context = cases.iter().map(|case| case.prompt_ids.len() + case.ids.len()).max().unwrap_or(128);
    Model::load(bundle, &LoadOptions { context: Some(context), ..Default::default() }).unwrap()
}

/// The sign and the top exponent bit of a stored number: (byte in it, bit).
fn telling_bits(weight: &Weight, part: Part, size: usize) -> Vec<(usize, u8)> {
    match (weight.encoding, part) {
        // An int4 has no sign of its own: its top bit moves it by 8, as a sign does.
        (Encoding::Block(block), Part::Data) if block.quants == Quants::I4 => vec![(0, 3)],
        (Encoding::I8Row | Encoding::Block(_), Part::Data) => vec![(0, 7)],
        _ => vec![(size - 1, 7), (size - 1, 6)],
    }
}

#[test]
fn a_flipped_sign_or_exponent_in_any_stage_is_found_and_the_stage_named() {
    let mut random = Random(7);
    for (name, precision, programs) in [
        ("phimoe", Precision::F32, &["text"][..]),
        ("gemma4", Precision::F16, &["text", "vision", "audio"]),
        ("qwen3_5", Precision::W8, &["text", "vision"]),
        ("qwen3_vl", Precision::W8, &["vision"]),
        ("llama", Precision::W4, &["text"]),
    ] {
        let victim = Victim::new(name, precision);
        let bundle = Bundle::open(victim.path()).unwrap();
        let whole = verify::replay(&bundle, &load(&bundle), &Cancel::new(), &mut |_, _| {}).unwrap();
        assert!(whole.passed && (whole.media > 0) == programs.iter().any(|p| *p != "text"), "{name}: whole: {:?}", whole.problems);
        let programs: Vec<Checked> = programs.iter().map(|program| bundle.program(program).unwrap().clone()).collect();
        drop(bundle);
        let stages: Vec<_> = programs.iter().flat_map(|program| program.stages.iter().map(move |stage| (program, stage))).collect();
        let mut flips = 0;
        for (program, stage) in stages.iter().step_by(if crate::extended() { 1 } else { 4 }) {
            let owners = Owners::of(program);
            let own: Vec<(&Name, &Weight)> =
                program.weights.iter().filter(|(name, _)| owners.stage(name) == program.stage_place(&stage.name)).collect();
            // One matrix, its scales, and one norm (or other vector) of each stage.
            let matrix = own.iter().filter(|(_, w)| w.shape.len() > 1).max_by_key(|(_, w)| w.shape.iter().product::<usize>());
            let vector = own.iter().find(|(_, w)| w.shape.len() == 1);
            let targets = matrix.iter().flat_map(|m| [(m.0, m.1, Part::Data), (m.0, m.1, Part::Scale)]);
            for (weight, about, part) in targets.chain(vector.iter().map(|v| (v.0, v.1, Part::Data))) {
                let numbers = victim.numbers(weight, about, part);
                if numbers.is_empty() {
                    continue;
                }
                let number = numbers[random.below(numbers.len())].clone();
                if victim.weights[number.clone()].iter().all(|&b| b == 0) && part == Part::Data && about.encoding.is_float() {
                    continue; // the sign of zero changes nothing
                }
                for (byte, bit) in telling_bits(about, part, number.len()) {
                    let report = victim.verify_with(number.start + byte, bit);
                    let named = report.stage.clone().unwrap_or_default();
                    assert!(
                        !report.passed && named.contains(&*stage.name),
                        "{name} at {precision}: {weight} {part:?} bit {bit}: {named:?} {:?}",
                        report.problems
                    );
                    flips += 1;
                }
            }
        }
        println!("{name} at {precision}: {flips} flips in {} stages found, every stage named", stages.len());
    }
}

/// Calibrated, with random weights, which are held to what plain rounding loses.
#[test]
fn broken_bundles_fail_at_every_precision() {
    let bits = Precision::Bits("6".parse().unwrap());
    let asked = Precision::ALL.into_iter().map(|(precision, _)| Some(precision)).chain([Some(bits), None]);
    for asked in asked.step_by(if crate::extended() { 1 } else { 3 }) {
        let label = asked.map_or("auto".into(), |precision| precision.to_string());
        let victim = Victim::made("phimoe", asked, Some(Calibration::default()));
        let program = Bundle::open(victim.path()).unwrap().program("text").unwrap().clone();
        let (experts, about) = program.weights.iter().find(|(_, weight)| weight.shape.len() == 3).unwrap();
        let part = if about.encoding.is_float() { Part::Data } else { Part::Scale };
        let scale = victim.numbers(experts, about, part)[9].clone();
        let fails = |what: &str, change: &dyn Fn(&mut [u8])| {
            let mut weights = victim.weights.clone();
            change(&mut weights);
            let report = victim.replay(victim.write(&[(&victim.file, &weights)]));
            assert!(!report.passed && report.damaged_weights == [experts.to_string()], "{label}, {what}: {:?}", report.problems);
        };
        let whole = victim.replay(victim.write(&[(&victim.file, &victim.weights)]));
        assert!(whole.passed, "{label}: {:?}", whole.problems);
        // The lowest bit of its exponent, and of its fraction.
        let exponent = if scale.len() == 4 { (2, 0x80) } else { (1, 0x04) };
        fails("a doubled or halved scale", &|weights| weights[scale.start + exponent.0] ^= exponent.1);
        fails("a flipped bit of a scale", &|weights| weights[scale.start] ^= 1);
        fails("exchanged experts", &|weights| {
            for part in [Part::Data, Part::Scale] {
                let numbers = victim.numbers(experts, about, part);
                let (first, second) = numbers.split_at(numbers.len() / about.shape[0]);
                for (a, b) in first.iter().zip(second) {
                    weights[a.clone()].copy_from_slice(&victim.weights[b.clone()]);
                    weights[b.clone()].copy_from_slice(&victim.weights[a.clone()]);
                }
            }
        });
    }
}

#[test]
fn towers_are_held_to_what_they_make_and_not_to_sums_alone() {
    for (name, precision, weight, stage) in [
        ("gemma4", Precision::F16, "audio_tower.layers.1", "audio.1"),
        ("gemma4", Precision::W8, "vision_tower.encoder.layers.1", "vision.1"),
        ("qwen3_vl", Precision::F32, "visual.blocks.1", "vision.1"),
    ] {
        let victim = Victim::new(name, precision);
        let bundle = Bundle::open(victim.path()).unwrap();
        let mut parity = verify::oracle(&bundle).unwrap();
        let cosines: Vec<_> = parity.stages.iter().filter(|result| result.stage.starts_with(stage)).collect();
        assert!(cosines[0].cosine > 0.99 && cosines[0].cosine <= 1.0 && cosines[0].bytes > 0, "{name}: {cosines:?}");
        // Every fourth sign of a matrix of the stage, with the sums of weights made to fit as well.
        let is_damaged = |name: &str, w: &Weight| name.contains(weight) && w.shape.len() > 1;
        let (matrix, about) = bundle.programs().values().flat_map(|program| &program.weights).find(|(n, w)| is_damaged(n, w)).unwrap();
        let numbers = victim.numbers(matrix, about, Part::Data);
        let mut weights = victim.weights.clone();
        numbers.iter().step_by(4).for_each(|number| weights[number.end - 1] ^= 0x80);
        let damaged = victim.write(&[(&victim.file, &weights)]);
        parity.weights = verify::weight_sums(&damaged, &Cancel::new()).unwrap();
        let file = victim.manifest.parity.clone().unwrap();
        let text = parity.to_json().unwrap();
        let damaged = victim.write(&[(&victim.file, &weights), (&file, text.as_bytes())]);
        let report = victim.replay(damaged);
        assert!(report.damaged_weights.is_empty() && !report.passed, "{name}: {:?}", report.result);
        assert_eq!(report.stage.as_deref(), Some(stage), "{name}: {:?}", report.problems);
    }
}

#[test]
fn a_drawing_that_is_another_is_told_and_not_judged_by() {
    let victim = Victim::new("qwen3_vl", Precision::F16);
    let bundle = Bundle::open(victim.path()).unwrap();
    let mut parity = verify::oracle(&bundle).unwrap();
    let case = parity.cases.iter_mut().find(|case| !case.media.is_empty()).unwrap();
    case.media[0].sha256 = Digest::of(b"another");
    let file = victim.manifest.parity.clone().unwrap();
    let bundle = victim.write(&[(&file, parity.to_json().unwrap().as_bytes())]);
    let error = verify::replay(&bundle, &load(&bundle), &Cancel::new(), &mut |_, _| {}).unwrap_err().to_string();
    assert!(error.contains("makes another drawn picture 1 of 96 x 64"), "{error}");
}

#[test]
fn two_hundred_random_flips() {
    let victim = Victim::new("qwen3", Precision::W8);
    let whole = victim.logits();
    let bundle = Bundle::open(victim.path()).unwrap();
    let program = bundle.program("text").unwrap().clone();
    drop(bundle);
    let mut bytes = Vec::new();
    for (name, weight) in &program.weights {
        for part in [Part::Data, Part::Scale, Part::Min] {
            bytes.extend(victim.numbers(name, weight, part).into_iter().flatten());
        }
    }
    let mut random = Random(11);
    let (mut found, mut largest_missed) = (0, 0f32);
    for _ in 0..200 {
        let (byte, bit) = (bytes[random.below(bytes.len())], random.below(8) as u8);
        if victim.verify_with(byte, bit).passed {
            let change = victim.logits().iter().zip(&whole).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
            largest_missed = largest_missed.max(change);
        } else {
            found += 1;
        }
    }
    println!("random single-bit flips: {found} of 200 found; largest logit change of a missed one: {largest_missed:.2e}");
    assert!(found >= 198 && largest_missed < 1e-4, "{found} found, {largest_missed} missed");
}

#[test]
fn a_bundle_that_was_not_gated_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/llama");
    let mut options = ForgeOptions::new(&out, Precision::F32);
    qhx_forge::forge_checkpoint(&source, &mut options).unwrap();
    let bundle = Bundle::open(&out).unwrap();
    let error = verify::replay(&bundle, &load(&bundle), &Cancel::new(), &mut |_, _| {}).unwrap_err();
    assert!(error.to_string().contains("carries no oracle"), "{error}");
}

#[test]
fn outside_oracles() {
    let folder = tempfile::tempdir().unwrap();
    for (name, precision) in [("qwen3_5", Precision::F32), ("gemma4", Precision::F32), ("llama", Precision::F16)] {
        let out = folder.path().join(name);
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name);
        let mut options = ForgeOptions::new(&out, precision);
        qhx_forge::forge_checkpoint(&source, &mut options).unwrap();
        let bundle = Bundle::open(&out).unwrap();
        let model = Model::load(&bundle, &LoadOptions::default()).unwrap();
        let golden = |golden: &Path| verify::golden::golden(&model, golden, None, &Cancel::new(), &mut |_, _| {});
        let report = golden(&source).unwrap();
        assert!(report.passed && report.tokens > 100 && report.strict == (precision == Precision::F32), "{name}: {:?}", report.problems);
        println!("{name} at {precision}: {}, worst stage {:?}", report.result, report.worst_stage);
        // Another model's oracle is not met.
        let copy = folder.path().join(format!("{name}-oracle"));
        fs::create_dir(&copy).unwrap();
        let text = fs::read_to_string(source.join("oracle.json")).unwrap();
        fs::write(
            copy.join("oracle.json"),
            text.replacen("\"greedy\": [", "\"greedy\": [1, ", 1).replacen("\"greedy\":[", "\"greedy\":[1,", 1),
        )
        .unwrap();
        let report = golden(&copy).unwrap();
        assert!(!report.passed && report.problems[0].contains("expected 1 "), "{name}: {:?}", report.problems);
        // And what is no oracle is told.
        for (text, expected) in [
            ("", "is no oracle"),
            ("{\"prompts\": []}", "has no prompts"),
            ("{\"prompts\": [{\"name\": \"a\", \"ids\": [], \"greedy\": [1]}]}", "prompt `a` needs"),
            ("{\"prompts\": [{\"name\": \"a\", \"ids\": [1], \"greedy\": [999999]}]}", "has the id 999999"),
        ] {
            fs::write(copy.join("oracle.json"), text).unwrap();
            let error = golden(&copy).unwrap_err().to_string();
            assert!(error.contains(expected), "{name}: {error}");
        }
        fs::copy(source.join("oracle.json"), copy.join("oracle.json")).unwrap();
        fs::write(copy.join("oracle.safetensors"), b"nonsense").unwrap();
        assert!(golden(&copy).is_err());
        assert!(golden(&folder.path().join("none")).unwrap_err().to_string().contains("cannot be read"));
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % limit as u64) as usize
    }
}
