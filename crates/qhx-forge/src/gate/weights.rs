//! Every stored weight beside the numbers it was made from.
//!
//! Tokens show what a mistake does to answers; one wrong scale among millions does little to them, and rounding to few bits hides it. Here nothing is hidden: of every group of numbers that shares a
//! scale, the stored numbers must be as large as the originals and point the same way. Calibrated rounding moves single numbers on purpose, so there the group is the row; that nothing smaller
//! went wrong on the way to the files is seen by the sums of what the rounding gave.

use super::Gate;
use crate::{
    ForgeError,
    encode::Scales,
    families::Programs,
    forge::weights,
    numbers::{Numbers, weight_rows},
};
use qhx_bundle::{Manifest, Staged, layout::Part, manifest::Rounding, parity::GateResult};
use qhx_ir::{Encoding, Weight, WeightTensor};
use std::{fmt, ops::Range, panic::resume_unwind, thread};

/// Groups with less than this share of the mean energy of their neighbours are too small to matter, and what rounding leaves of them says nothing.
const LEAST_ENERGY: f64 = 1e-4;

/// A weight that is not stored as it should be.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Damage {
    /// A group of numbers that is not what it was made from.
    Numbers {
        weight: String,
        row: usize,
        columns: Range<usize>,
        /// How large the stored numbers are, as a multiple of the originals.
        gain: f64,
    },
    /// Bytes that are not those that rounding gave.
    Bytes { weight: String, part: Part },
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Numbers { weight, row, columns, gain } => {
                write!(
                    f,
                    "the weight `{weight}` is not the checkpoint's: in row {row}, columns {} to {}, ",
                    columns.start,
                    columns.end - 1
                )?;
                match gain.is_finite() {
                    true => write!(f, "the stored numbers are {gain:.2} times the original ones"),
                    false => write!(f, "a stored number is no number"),
                }
            }
            Self::Bytes { weight, part } => write!(f, "the stored tensor `{}` is not as it was rounded", part.stored_name(weight)),
        }
    }
}

/// Whether a bundle's integers were chosen by calibrated rounding.
pub(super) fn is_calibrated(manifest: &Manifest) -> bool {
    matches!(manifest.rounding, Some(Rounding::Calibrated(_)))
}

impl Gate<'_, '_> {
    /// A bundle that does not store its weights as it should has not passed, whatever its tokens say.
    pub(super) fn judge_weights(&mut self, staged: &Staged, programs: &Programs, result: &mut GateResult) -> Result<(), ForgeError> {
        if let Some(damage) = self.damage(staged, programs)? {
            result.passed = false;
            result.result += &format!("; {damage}");
        }
        Ok(())
    }

    /// The first weight that a bundle does not store as it should; none where all are right.
    pub(super) fn damage(&mut self, staged: &Staged, programs: &Programs) -> Result<Option<Damage>, ForgeError> {
        let bundle = staged.open()?;
        let stored = bundle.weights();
        let numbers = self.material.numbers(self.precision);
        let all: Vec<_> = weights(programs).collect();
        for (done, (name, weight, recipe)) in all.iter().enumerate() {
            self.tell("comparing the weights with the checkpoint", done, all.len());
            if self.options.cancel.is_cancelled() {
                return Err(qhx_runtime::Error::Cancelled.into());
            }
            let Some(tensor) = stored.tensor(name) else { continue };
            let original = Weight { encoding: Encoding::F32, ..(*weight).clone() };
            let moved = is_calibrated(staged.manifest()) && !weight.encoding.is_float();
            let (group, gains) = if moved { (usize::MAX, CALIBRATED_GAINS) } else { (group(&numbers, weight), gains(weight.encoding)) };
            let mut found = None;
            numbers.encode(&original, recipe, 0..weight_rows(weight), &mut |rows, encoded| {
                let damage = if found.is_none() { compare(&tensor, rows, &encoded.data, group, &gains) } else { None };
                found = found.take().or(damage);
                Ok(())
            })?;
            if let Some((row, columns, gain)) = found {
                return Ok(Some(Damage::Numbers { weight: name.to_string(), row, columns, gain }));
            }
        }
        let changed = staged.changed_weight()?;
        Ok(changed.map(|(weight, part)| Damage::Bytes { weight: weight.to_string(), part }))
    }
}

/// Numbers of a row that share a scale.
fn group(numbers: &Numbers<'_>, weight: &Weight) -> usize {
    match weight.encoding {
        Encoding::Block(block) if numbers.scales == Scales::Block => block.block,
        _ => usize::MAX,
    }
}

/// What the gain of a group may be. Rounding leaves errors that have nothing to do with the numbers, so they hardly change it; a wrong exponent of a scale at least doubles or halves it.
fn gains(encoding: Encoding) -> Range<f64> {
    let bits = encoding.row_bytes(1 << 12).map_or(32, |row| (8 * row.data) >> 12);
    match bits {
        16.. => 0.98..1.02,
        8.. => 0.9..1.1,
        _ => 0.55..1.7,
    }
}

/// What the gain of a row may be whose numbers were moved to make up for others.
const CALIBRATED_GAINS: Range<f64> = 0.55..1.7;

type Found = (usize, Range<usize>, f64);

/// The first wrong group of some rows, whose originals are f32 numbers, row after row with padding.
fn compare(stored: &WeightTensor, rows: Range<usize>, originals: &[u8], group: usize, gains: &Range<f64>) -> Option<Found> {
    let row_bytes = originals.len() / rows.len().max(1);
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let piece = rows.len().div_ceil(threads).max(1);
    let start = rows.start;
    thread::scope(|scope| {
        let pieces = originals.chunks(piece * row_bytes).enumerate();
        let spawn =
            |(number, originals)| scope.spawn(move || compare_rows(stored, start + number * piece, originals, row_bytes, group, gains));
        let running: Vec<_> = pieces.map(spawn).collect();
        // All are waited for; the first row that is wrong counts.
        let found: Vec<_> = running.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect();
        found.into_iter().flatten().next()
    })
}

fn compare_rows(
    stored: &WeightTensor,
    first: usize,
    originals: &[u8],
    row_bytes: usize,
    group: usize,
    allowed: &Range<f64>,
) -> Option<Found> {
    let columns = stored.columns();
    let group = group.min(columns);
    let (mut original, mut found) = (vec![0f32; columns], vec![0f32; columns]);
    // The mean energy of a group, of the rows so far.
    let (mut energy, mut groups) = (0.0, 0.0);
    for (number, bytes) in originals.chunks_exact(row_bytes).enumerate() {
        let values = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        original.iter_mut().zip(values).for_each(|(to, from)| *to = from);
        stored.decode_row(first + number, &mut found);
        for (place, (a, b)) in original.chunks(group).zip(found.chunks(group)).enumerate() {
            let product = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
            let (own, both) = (product(a, a), product(a, b));
            (energy, groups) = (energy + own, groups + 1.0);
            let gain = both / own;
            let matters = own > LEAST_ENERGY * energy / groups;
            if !both.is_finite() || matters && !allowed.contains(&gain) {
                return Some((first + number, place * group..columns.min((place + 1) * group), gain));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Calibration, ForgeOptions, GateOptions, GateProgress, Material, Precision,
        gate::{auto, search, suite::GivenPrompt},
        mixture,
    };
    use qhx_bundle::{Digest, layout::stored_parts, manifest::FileEntry, safetensors::read_header};
    use std::{fs, path::Path};

    /// A bundle under a temporary name, to be spoiled and mended.
    struct Victim<'a> {
        staged: &'a Staged,
        programs: &'a Programs,
        whole: Vec<u8>,
    }

    impl Victim<'_> {
        /// The bytes of a row of a weight's part.
        fn row(&self, name: &str, part: Part, row: usize) -> Range<usize> {
            let (_, weight, _) = weights(self.programs).find(|(found, ..)| ***found == *name).unwrap();
            let parts = stored_parts(weight.encoding, &weight.shape).unwrap();
            let size = parts.iter().find(|stored| stored.part == part).unwrap().row_bytes;
            let first = read_header(&self.whole).unwrap().tensors[&part.stored_name(name)].range.start + row * size;
            first..first + size
        }

        /// Writes the weights with the first two experts in each other's place.
        fn exchange_experts(&self, name: &str) {
            let (_, weight, _) = weights(self.programs).find(|(found, ..)| ***found == *name).unwrap();
            let rows = weight.shape[1];
            self.write(|bytes| {
                for part in stored_parts(weight.encoding, &weight.shape).unwrap().iter().map(|stored| stored.part) {
                    let expert =
                        |number: usize| self.row(name, part, number * rows).start..self.row(name, part, (number + 1) * rows - 1).end;
                    bytes[expert(0)].copy_from_slice(&self.whole[expert(1)]);
                    bytes[expert(1)].copy_from_slice(&self.whole[expert(0)]);
                }
            });
        }

        /// Writes the weights with changes, all sums made to fit.
        fn write(&self, change: impl FnOnce(&mut [u8])) {
            let mut bytes = self.whole.clone();
            change(&mut bytes);
            let mut manifest = self.staged.manifest().clone();
            let file = manifest.weights[0].clone();
            fs::write(self.staged.path().join(file.as_str()), &bytes).unwrap();
            manifest.files.insert(file, FileEntry { bytes: bytes.len() as u64, sha256: Digest::of(&bytes) });
            fs::write(self.staged.path().join("qhx.json"), manifest.to_json().unwrap()).unwrap();
        }
    }

    /// Runs `test` on a staged bundle of a fixture, rounded to the nearest.
    fn with(name: &str, precision: Precision, test: impl FnOnce(&mut Gate<'_, '_>, &Victim<'_>)) {
        with_calibration(name, precision, None, test);
    }

    /// Runs `test` on a staged bundle of a fixture.
    fn with_calibration(
        name: &str,
        precision: Precision,
        calibration: Option<Calibration>,
        test: impl FnOnce(&mut Gate<'_, '_>, &Victim<'_>),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let material = Material::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)).unwrap();
        let out = folder.path().join("model");
        let mut options = ForgeOptions { calibration, ..ForgeOptions::new(&out, precision) };
        let prompts = [3usize, 60].map(|n| GivenPrompt::Ids((0..n as u32).map(|i| i * 37 % 300).collect()));
        let mut silent = |_: GateProgress<'_>| {};
        let options_of_gate = GateOptions { prompts: Some(prompts.to_vec()), ..GateOptions::new(&mut silent) };
        let mut gate = Gate::new(&material, &options, options_of_gate).unwrap();
        let plan = mixture::plan(&material, &mut options).unwrap();
        let programs = material.programs(&plan).unwrap();
        let staged = material.stage(&plan, &programs, &mut options).unwrap();
        let whole = fs::read(staged.path().join(staged.manifest().weights[0].as_str())).unwrap();
        test(&mut gate, &Victim { staged: &staged, programs: &programs, whole });
    }

    /// What holds the sizes of a row's numbers: its scales, or the numbers themselves, as little-endian floats of so many bytes.
    fn sizes(precision: Precision) -> (Part, usize) {
        match precision {
            Precision::F16 => (Part::Data, 2),
            Precision::W8 => (Part::Scale, 4),
            _ => (Part::Scale, 2),
        }
    }

    /// The damage that is found, which must be to the numbers of that row, with its gain.
    fn numbers_of_row(gate: &mut Gate<'_, '_>, victim: &Victim<'_>, weight: &str, row: usize) -> (Damage, f64) {
        let damage = gate.damage(victim.staged, victim.programs).unwrap();
        match damage {
            Some(Damage::Numbers { weight: ref found, row: at, gain, .. }) if found == weight && at == row => (damage.unwrap(), gain),
            other => panic!("expected damage to row {row} of {weight}, found {other:?}"),
        }
    }

    /// Adds to the exponent of a float.
    fn scale_by_two(float: &mut [u8]) {
        match float.len() {
            4 => {
                let value = f32::from_le_bytes([float[0], float[1], float[2], float[3]]) * 2.0;
                float.copy_from_slice(&value.to_le_bytes());
            }
            _ => float[1] += 4,
        }
    }

    #[test]
    fn right_weights_are_right_at_every_precision() {
        for name in ["llama", "phimoe", "gemma4", "qwen3_5"] {
            for (precision, label) in Precision::ALL {
                with(name, precision, |gate, victim| {
                    assert_eq!(gate.damage(victim.staged, victim.programs).unwrap(), None, "{name} at {label}");
                });
            }
        }
    }

    #[test]
    fn one_wrong_scale_is_found_at_every_precision() {
        let weight = "layers.1.mlp.down_proj.weight";
        for precision in [Precision::F16, Precision::W8, Precision::W4] {
            with("llama", precision, |gate, victim| {
                let (part, size) = sizes(precision);
                let row = victim.row(weight, part, 7);
                // Blocks have scales of their own: one of them is enough.
                let spoiled = if precision == Precision::W4 { row.start..row.start + size } else { row.clone() };
                let doubled = |bytes: &mut [u8]| {
                    bytes[spoiled.clone()].chunks_exact_mut(size).filter(|x| x.iter().any(|&b| b != 0)).for_each(scale_by_two)
                };
                victim.write(doubled);
                let (damage, gain) = numbers_of_row(gate, victim, weight, 7);
                assert!((1.8..2.2).contains(&gain), "{precision}: {damage}");
                assert!(damage.to_string().contains("times the original ones"), "{damage}");
                let tokens = gate.measure(victim.staged).unwrap().gate;
                println!("{precision}, a scale doubled: {damage}; by tokens alone: {}", tokens.result);

                // The lowest bit of an exponent doubles or halves, any other changes more.
                let (byte, bits) = if size == 4 { (row.start + 2, 0x80u8) } else { (row.start + 1, 0x04) };
                if part == Part::Scale {
                    victim.write(|bytes| bytes[byte] ^= bits);
                    let (damage, gain) = numbers_of_row(gate, victim, weight, 7);
                    assert!(!(0.55..=1.8).contains(&gain), "{precision}: {damage}");
                }
                // The highest bit of a number's or a scale's exponent.
                victim.write(|bytes| bytes[row.start + size - 1] ^= 0x40);
                numbers_of_row(gate, victim, weight, 7);
                victim.write(|_| {});
                assert_eq!(gate.damage(victim.staged, victim.programs).unwrap(), None, "mended");
            });
        }
    }

    #[test]
    fn one_changed_bit_of_a_calibrated_bundle_is_found_at_every_precision() {
        let weight = "layers.1.mlp.down_proj.weight";
        for precision in [Precision::W8, Precision::W4, Precision::Bits("6".parse().unwrap())] {
            with_calibration("llama", precision, Some(Calibration::default()), |gate, victim| {
                assert!(is_calibrated(victim.staged.manifest()), "{precision}");
                assert_eq!(gate.damage(victim.staged, victim.programs).unwrap(), None, "{precision}");
                // The lowest bit of a block's or a row's scale, and of a quant: too little for any measurement of numbers or tokens.
                for part in [Part::Scale, Part::Data] {
                    let place = victim.row(weight, part, 7).start;
                    victim.write(|bytes| bytes[place] ^= 1);
                    let damage = gate.damage(victim.staged, victim.programs).unwrap();
                    assert_eq!(damage, Some(Damage::Bytes { weight: weight.into(), part }), "{precision}");
                }
            });
        }
    }

    /// Every precision that users can ask for; none is `auto`.
    fn offered() -> Vec<Option<Precision>> {
        let bits = Precision::Bits("6".parse().unwrap());
        Precision::ALL.into_iter().map(|(precision, _)| Some(precision)).chain([Some(bits), None]).collect()
    }

    /// Random weights, which pass by what plain rounding loses: its wide limits are no excuse for damage.
    #[test]
    fn broken_bundles_of_random_weights_fail_at_every_precision() {
        let extended = std::env::var_os("QHX_EXTENDED").is_some();
        let mut raised = 0;
        let all = ["phimoe", "qwen3"].into_iter().flat_map(|name| offered().into_iter().map(move |asked| (name, asked)));
        // By default each precision of one model or the other, but for those that search.
        let searches = |asked: &Option<Precision>| matches!(asked, None | Some(Precision::Bits(_)));
        let wanted =
            |place: usize, asked: &Option<Precision>| extended || (place % 2 == 0) == (place < offered().len()) && !searches(asked);
        for (_, (name, asked)) in all.enumerate().filter(|(place, (_, asked))| wanted(*place, asked)) {
            let label = format!("{name} at {}", asked.map_or("auto".into(), |precision| precision.to_string()));
            let folder = tempfile::tempdir().unwrap();
            let material = Material::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)).unwrap();
            let out = folder.path().join("model");
            let calibration = Some(Calibration::default());
            let mut options = ForgeOptions { calibration, ..ForgeOptions::new(&out, asked.unwrap_or(Precision::W8)) };
            let prompts = [3usize, 60, 100].map(|n| GivenPrompt::Ids((0..n as u32).map(|i| i * 37 % 300).collect()));
            let mut silent = |_: GateProgress<'_>| {};
            let gate = GateOptions { prompts: Some(prompts.to_vec()), auto: asked.is_none(), ..GateOptions::new(&mut silent) };
            let mut gate = Gate::new(&material, &options, gate).unwrap();
            let outcome = match asked {
                Some(_) => {
                    let plan = mixture::plan(&material, &mut options).unwrap();
                    search::fixed(&mut gate, plan, &mut options).unwrap()
                }
                None => auto::auto(&mut gate, &mut options).unwrap(),
            };
            let search::Outcome { staged, programs, measurement, .. } = outcome;
            raised += usize::from(measurement.gate.closeness.as_ref().is_some_and(|closeness| closeness.plain.is_some()));
            let victim = Victim {
                whole: fs::read(staged.path().join(staged.manifest().weights[0].as_str())).unwrap(),
                staged: &staged,
                programs: &programs,
            };
            let mut judged = || {
                // Whatever so few tokens say.
                let mut result = GateResult { passed: true, ..measurement.gate.clone() };
                gate.judge_weights(&staged, &programs, &mut result).unwrap();
                result
            };
            assert!(judged().passed, "{label}: {}", judged().result);
            let mut fails = |what: &str, weight: &str| {
                let GateResult { passed, result, .. } = judged();
                assert!(!passed && result.contains(weight), "{label}, {what} of {weight}: {result}");
            };
            // A matrix of a layer, and the output head.
            for weight in [if name == "phimoe" { "layers.1.block_sparse_moe.experts.w2" } else { "layers.1.mlp.down_proj" }, "lm_head"] {
                let (weight, about, _) = weights(&programs).find(|(found, ..)| found.strip_suffix(".weight") == Some(weight)).unwrap();
                let (part, size) = match about.encoding {
                    Encoding::F32 => (Part::Data, 4),
                    Encoding::F16 => (Part::Data, 2),
                    Encoding::I8Row => (Part::Scale, 4),
                    _ => (Part::Scale, 2),
                };
                let row = victim.row(weight, part, 7);
                // All numbers of a row, or one of its scales.
                let spoiled = if part == Part::Data { row.clone() } else { row.start..row.start + size };
                victim.write(|bytes| bytes[spoiled].chunks_exact_mut(size).filter(|x| x.iter().any(|&b| b != 0)).for_each(scale_by_two));
                fails("a doubled scale", weight);
                victim.write(|bytes| bytes[row.start] ^= 1);
                fails("the lowest bit of a scale", weight);
            }
            if name == "phimoe" {
                let experts = weights(&programs).find(|(_, weight, _)| weight.shape.len() == 3).unwrap().0;
                victim.exchange_experts(experts);
                fails("exchanged experts", experts);
            }
            victim.write(|_| {});
            assert!(judged().passed, "{label}: mended");
        }
        assert!(raised >= if extended { 6 } else { 2 }, "only {raised} were measured beside plain rounding");
    }

    #[test]
    fn exchanged_experts_are_found_at_every_precision() {
        for precision in [Precision::F16, Precision::W8, Precision::W4] {
            with("phimoe", precision, |gate, victim| {
                let is_experts = |name: &str, weight: &Weight| name.contains("layers.1.") && weight.shape.len() == 3;
                let (name, ..) = weights(victim.programs).find(|(name, weight, _)| is_experts(name, weight)).unwrap();
                victim.exchange_experts(name);
                let (damage, gain) = numbers_of_row(gate, victim, name, 0);
                assert!(gain.abs() < 0.55, "{precision}: {damage}");
                let tokens = gate.measure(victim.staged).unwrap().gate;
                println!("{precision}, experts exchanged: {damage}; by tokens alone: {}", tokens.result);
            });
        }
    }
}
