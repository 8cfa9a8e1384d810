//! How often experts were chosen: counts that fade, and the file that keeps them between starts.

use qhx_bundle::files;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fs, path::Path};

/// After so many rows a count is worth half.
const HALF_LIFE: f64 = 1024.0;
/// Counts are brought down when the worth of a new row has grown to this.
const LARGEST_UNIT: f64 = 1e12;

/// Fading counts.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Counts {
    /// What a row adds: instead of all counts becoming smaller, it becomes larger.
    unit: f64,
    counts: Vec<f64>,
}

impl Counts {
    /// Of these numbers of rows.
    pub(super) fn new(counts: Vec<f64>) -> Self {
        Self { unit: 1.0, counts }
    }

    /// Some rows chose an expert.
    pub(super) fn add(&mut self, expert: usize, rows: usize) {
        self.counts[expert] += rows as f64 * self.unit;
    }

    /// Some rows went by.
    pub(super) fn fade(&mut self, rows: usize) {
        self.unit *= (rows as f64 / HALF_LIFE).exp2();
        if self.unit > LARGEST_UNIT {
            let unit = std::mem::replace(&mut self.unit, 1.0);
            self.counts.iter_mut().for_each(|count| *count /= unit);
        }
    }

    /// In rows of today.
    pub(super) fn of(&self, expert: usize) -> f64 {
        self.counts[expert] / self.unit
    }
}

const VERSION: u32 = 1;
/// A file of ours is much smaller.
const MAX_BYTES: u64 = 16 << 20;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    version: u32,
    /// By the path of the op.
    counts: BTreeMap<String, Vec<f64>>,
}

/// The counts of a model's ops, by their paths. Whatever is wrong with the file, there are none.
pub(super) fn load(path: &Path) -> BTreeMap<String, Vec<f64>> {
    let read = || {
        let File { version, counts } = serde_json::from_slice(&files::read(path, MAX_BYTES).ok()?).ok()?;
        let sound = counts.values().flatten().all(|count| count.is_finite() && *count >= 0.0);
        (version == VERSION && sound).then_some(counts)
    };
    read().unwrap_or_default()
}

/// Keeps counts. Failing to is no error.
pub(super) fn store(path: &Path, counts: BTreeMap<String, Vec<f64>>) {
    let made = path.parent().is_none_or(|folder| fs::create_dir_all(folder).is_ok());
    if let (Ok(text), true) = (serde_json::to_vec(&File { version: VERSION, counts }), made) {
        let _ = files::write(path, |out| out.write_all(&text));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn counts_fade() {
        let mut counts = Counts::new(vec![0.0, 8.0]);
        counts.add(0, 16);
        counts.fade(1024);
        assert_eq!((counts.of(0), counts.of(1)), (8.0, 4.0));
        for _ in 0..200 {
            counts.fade(1024);
            counts.add(0, 4);
        }
        assert!((counts.of(0) - 8.0).abs() < 1e-6 && counts.of(1) < 1e-6, "{counts:?}");
    }

    #[test]
    fn a_damaged_file_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/gpu/experts.json");
        assert!(load(&path).is_empty());
        let counts = BTreeMap::from([("layers.0.experts".to_owned(), vec![1.5, 0.0])]);
        store(&path, counts.clone());
        assert_eq!(load(&path), counts);
        let good: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let changed = |change: &dyn Fn(&mut Value)| {
            let mut value = good.clone();
            change(&mut value);
            value.to_string()
        };
        let bad = [
            String::new(),
            "[".repeat(50_000),
            good.to_string()[..20].to_owned(),
            changed(&|v| v["version"] = json!(2)),
            changed(&|v| v["more"] = json!(1)),
            changed(&|v| v["counts"]["layers.0.experts"][0] = json!(-1.0)),
            changed(&|v| v["counts"]["layers.0.experts"][0] = json!("many")),
        ];
        for text in bad {
            fs::write(&path, &text).unwrap();
            assert!(load(&path).is_empty(), "{text:.60}");
        }
    }
}
