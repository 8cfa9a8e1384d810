//! What was measured, kept in the cache folder: a small JSON file for each model. Whatever is wrong with it, the answer is to measure again.

use super::Measured;
use crate::LoadOptions;
use qhx_bundle::{Digest, files};
use qhx_ir::DeviceInfo;
use serde::{Deserialize, Serialize};
use std::{
    fs,
    path::{Path, PathBuf},
};

const VERSION: u32 = 3;
/// A file of ours is much smaller.
const MAX_BYTES: u64 = 1 << 20;

/// What a measurement holds for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Key {
    model: String,
    cpu: String,
    gpu: String,
    driver: String,
    /// The most of the GPU's memory, the context, and how many sessions: what fits depends on them.
    gpu_memory: Option<u64>,
    context: Option<usize>,
    sessions: usize,
    qhx: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    version: u32,
    key: Key,
    measured: Measured,
}

impl Key {
    pub(super) fn new(fingerprint: &str, gpu: &DeviceInfo, cpu: &DeviceInfo, options: &LoadOptions) -> Self {
        let text = |device: &DeviceInfo, fact: &str| device.text(fact).unwrap_or_default().to_owned();
        Self {
            model: fingerprint.to_owned(),
            cpu: format!("{}, {}, {} threads", cpu.description, text(cpu, "instructions"), cpu.threads),
            gpu: format!("{} {}", gpu.name, gpu.description),
            driver: format!("{}, Vulkan {}", text(gpu, "driver"), text(gpu, "vulkan")),
            gpu_memory: options.gpu.memory_limit,
            context: options.context,
            sessions: options.sessions,
            qhx: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }

    fn path(&self, folder: &Path) -> PathBuf {
        folder.join(format!("choice-{}.json", Digest::of(self.model.as_bytes())))
    }
}

/// What was measured for this very key.
pub(super) fn load(folder: &Path, key: &Key) -> Option<Measured> {
    let bytes = files::read(&key.path(folder), MAX_BYTES).ok()?;
    let File { version, key: found, measured } = serde_json::from_slice(&bytes).ok()?;
    (version == VERSION && found == *key && measured.is_sound()).then_some(measured)
}

/// Keeps what was measured. Failing to is no error.
pub(super) fn store(folder: &Path, key: &Key, measured: &Measured) {
    let file = File { version: VERSION, key: key.clone(), measured: measured.clone() };
    if let (Ok(text), Ok(())) = (serde_json::to_vec_pretty(&file), fs::create_dir_all(folder)) {
        let _ = files::write(&key.path(folder), |out| out.write_all(&text));
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{facts, tried},
        *,
    };
    use crate::planner::Way;
    use serde_json::{Value, json};

    fn key(driver: &str) -> Key {
        let [model, cpu, gpu, driver, qhx] = ["m", "c", "g", driver, "1"].map(str::to_owned);
        Key { model, cpu, gpu, driver, gpu_memory: None, context: Some(64), sessions: 1, qhx }
    }

    fn measured() -> Measured {
        Measured { facts: facts(), ways: vec![tried(Way::alone("cpu"), 12.5, 100.0)] }
    }

    #[test]
    fn it_holds_for_its_key_alone() {
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("deep/gpu");
        assert_eq!(load(&cache, &key("1")), None);
        store(&cache, &key("1"), &measured());
        assert_eq!(load(&cache, &key("1")), Some(measured()));
        assert_eq!(load(&cache, &key("2")), None, "another driver");
        assert_eq!(load(&cache, &Key { gpu_memory: Some(1), ..key("1") }), None, "another limit");
        store(&cache, &key("2"), &measured());
        assert_eq!(load(&cache, &key("1")), None, "one file for each model: the last driver's");
    }

    #[test]
    fn what_is_wrong_is_measured_again() {
        let folder = tempfile::tempdir().unwrap();
        let (key, path) = (key("1"), key("1").path(folder.path()));
        store(folder.path(), &key, &measured());
        let good: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert!(load(folder.path(), &key).is_some());
        let changed = |change: &dyn Fn(&mut Value)| {
            let mut value = good.clone();
            change(&mut value);
            value.to_string()
        };
        let bad = [
            String::new(),
            "\u{0}".repeat(100),
            "[".repeat(50_000),
            format!("{}{}", good, " ".repeat(2 << 20)),
            changed(&|v| v["version"] = json!(4)),
            changed(&|v| v["more"] = json!(1)),
            changed(&|v| v["key"]["qhx"] = json!("0")),
            changed(&|v| v["measured"]["ways"] = json!([])),
            changed(&|v| v["measured"]["facts"]["together"] = json!(-1.0)),
            changed(&|v| v["measured"]["ways"][0]["speed"]["decode_tokens_per_second"] = json!(0.0)),
            changed(&|v| v["measured"]["ways"][0]["speed"]["decode_tokens_per_second"] = json!(-1.0)),
            changed(&|v| v["measured"]["ways"][0]["speed"] = json!({"decode_tokens_per_second": "fast"})),
        ];
        for text in bad {
            fs::write(&path, &text).unwrap();
            assert_eq!(load(folder.path(), &key), None, "{:.80}", text);
        }
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert_eq!(load(folder.path(), &key), None, "a folder");
    }
}
