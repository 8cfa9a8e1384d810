//! What was measured, kept in the cache folder: a small JSON file for each model. Whatever is wrong with it, the answer is to measure again.

use super::Measured;
use qhx_bundle::{Digest, files};
use qhx_ir::DeviceInfo;
use serde::{Deserialize, Serialize};
use std::{
    fs,
    path::{Path, PathBuf},
};

const VERSION: u32 = 1;
/// A file of ours is much smaller.
const MAX_BYTES: u64 = 64 << 10;

/// What a measurement holds for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Key {
    model: String,
    cpu: String,
    gpu: String,
    driver: String,
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
    pub(super) fn new(fingerprint: &str, gpu: &DeviceInfo, cpu: &DeviceInfo) -> Self {
        let text = |device: &DeviceInfo, fact: &str| device.text(fact).unwrap_or_default().to_owned();
        Self {
            model: fingerprint.to_owned(),
            cpu: format!("{}, {}, {} threads", cpu.description, text(cpu, "instructions"), cpu.threads),
            gpu: format!("{} {}", gpu.name, gpu.description),
            driver: format!("{}, Vulkan {}", text(gpu, "driver"), text(gpu, "vulkan")),
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
    let is_sound = measured.cpu.is_sound() && measured.gpu.is_none_or(|gpu| gpu.is_sound());
    (version == VERSION && found == *key && is_sound).then_some(measured)
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
    use super::{super::Speed, *};
    use serde_json::{Value, json};

    fn key(driver: &str) -> Key {
        Key { model: "m".into(), cpu: "c".into(), gpu: "g".into(), driver: driver.into(), qhx: "1".into() }
    }

    #[test]
    fn it_holds_for_its_key_alone() {
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("deep/gpu");
        let speed = Speed { decode_tokens_per_second: 12.5, prefill_tokens_per_second: Some(100.0) };
        let measured = Measured { gpu: Some(speed), cpu: speed, failure: None };
        assert_eq!(load(&cache, &key("1")), None);
        store(&cache, &key("1"), &measured);
        assert_eq!(load(&cache, &key("1")), Some(measured.clone()));
        assert_eq!(load(&cache, &key("2")), None, "another driver");
        store(&cache, &key("2"), &measured);
        assert_eq!(load(&cache, &key("1")), None, "one file for each model: the last driver's");
    }

    #[test]
    fn what_is_wrong_is_measured_again() {
        let folder = tempfile::tempdir().unwrap();
        let (key, path) = (key("1"), key("1").path(folder.path()));
        let speed = Speed { decode_tokens_per_second: 1.0, prefill_tokens_per_second: None };
        store(folder.path(), &key, &Measured { gpu: None, cpu: speed, failure: Some("lost".into()) });
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
            format!("{}{}", good, " ".repeat(1 << 20)),
            changed(&|v| v["version"] = json!(2)),
            changed(&|v| v["more"] = json!(1)),
            changed(&|v| v["key"]["qhx"] = json!("0")),
            changed(&|v| v["measured"]["cpu"]["decode_tokens_per_second"] = json!(0.0)),
            changed(&|v| v["measured"]["cpu"]["decode_tokens_per_second"] = json!(-1.0)),
            changed(&|v| v["measured"]["gpu"] = json!({"decode_tokens_per_second": "fast"})),
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
