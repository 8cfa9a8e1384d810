//! Compiled pipelines on disk, so that a second start does not compile shaders again.
//!
//! A file has a header of our own (version, device and driver, checksum) before the driver's data: what is damaged or of another driver is not used.

use std::{fs, path::Path};

const MAGIC: &[u8; 8] = b"qhxgpu01";
/// Drivers keep a few megabytes.
const MOST_BYTES: u64 = 256 << 20;

/// What is stored for a device and driver; empty where there is nothing that can be used.
pub(crate) fn load(folder: Option<&Path>, identity: &[u8; 16]) -> Vec<u8> {
    let Some(bytes) = folder.and_then(|folder| read(&folder.join(name(identity)))) else { return Vec::new() };
    match bytes.split_at_checked(40) {
        Some((header, data)) if header == self::header(identity, data) => data.to_vec(),
        _ => Vec::new(),
    }
}

/// The content of a file of a sensible size; nothing else is opened, for it might not end.
fn read(file: &Path) -> Option<Vec<u8>> {
    fs::symlink_metadata(file).ok().filter(|found| found.is_file() && found.len() <= MOST_BYTES)?;
    fs::read(file).ok()
}

/// Stores data for a device and driver; where that fails, the next start compiles again.
pub(crate) fn store(folder: Option<&Path>, identity: &[u8; 16], data: &[u8]) {
    let Some(folder) = folder else { return };
    if load(Some(folder), identity) == data || fs::create_dir_all(folder).is_err() {
        return;
    }
    let file = folder.join(name(identity));
    let partial = file.with_extension(format!("{}.partial", std::process::id()));
    let written = fs::write(&partial, [&header(identity, data)[..], data].concat()).and_then(|()| fs::rename(&partial, &file));
    if written.is_err() {
        let _ = fs::remove_file(&partial);
    }
}

fn name(identity: &[u8; 16]) -> String {
    let hex: String = identity.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("pipelines-{hex}.bin")
}

fn header(identity: &[u8; 16], data: &[u8]) -> [u8; 40] {
    let mut header = [0; 40];
    header[..8].copy_from_slice(MAGIC);
    header[8..24].copy_from_slice(identity);
    header[24..32].copy_from_slice(&(data.len() as u64).to_le_bytes());
    header[32..].copy_from_slice(&fingerprint(data.iter().copied()).to_le_bytes());
    header
}

/// FNV-1a.
pub(crate) fn fingerprint(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ byte as u64).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_damaged_is_not_used() {
        let folder = std::env::temp_dir().join(format!("qhx-gpu-cache-{}", std::process::id()));
        let (identity, data) = ([7; 16], b"pipelines".as_slice());
        assert!(load(Some(&folder), &identity).is_empty());
        store(Some(&folder), &identity, data);
        assert_eq!(load(Some(&folder), &identity), data);
        assert!(load(Some(&folder), &[8; 16]).is_empty(), "another driver");
        let file = folder.join(name(&identity));
        let good = fs::read(&file).unwrap();
        for place in [0, 10, 30, 39, good.len() - 1] {
            let mut bad = good.clone();
            bad[place] ^= 1;
            fs::write(&file, bad).unwrap();
            assert!(load(Some(&folder), &identity).is_empty(), "byte {place}");
        }
        fs::write(&file, &good[..20]).unwrap();
        assert!(load(Some(&folder), &identity).is_empty(), "cut short");
        #[cfg(unix)]
        {
            fs::remove_file(&file).unwrap();
            assert!(std::process::Command::new("mkfifo").arg(&file).status().unwrap().success());
            assert!(load(Some(&folder), &identity).is_empty(), "a pipe that nobody writes to");
            store(Some(&folder), &identity, data);
            assert_eq!(load(Some(&folder), &identity), data, "it is replaced");
        }
        fs::remove_dir_all(folder).unwrap();
    }
}
