//! Reading a whole checkpoint holds one tensor in memory at a time. A test of its own process, because it looks at the process's memory.
#![cfg(target_os = "linux")]

use qhx_forge::read::safetensors;
use std::io::Write;

const TENSORS: usize = 6;
const ROWS: usize = 2048;
const COLUMNS: usize = 1024;

/// The most memory that this process has had, in bytes.
fn peak() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
}

#[test]
fn peak_memory_is_one_tensor() {
    let size = ROWS * COLUMNS * 4;
    let tensors: Vec<String> = (0..TENSORS)
        .map(|i| format!(r#""t{i}":{{"dtype":"F32","shape":[{ROWS},{COLUMNS}],"data_offsets":[{},{}]}}"#, i * size, (i + 1) * size))
        .collect();
    let header = format!("{{{}}}", tensors.join(","));
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.as_file().set_len((8 + header.len() + TENSORS * size) as u64).unwrap(); // zeros that take no disk

    let source = safetensors::open_file(file.path()).unwrap();
    let before = peak();
    let mut rows = vec![1.0; 16 * COLUMNS];
    for info in source.tensors() {
        let tensor = source.tensor(&info.name).unwrap();
        for first in (0..ROWS).step_by(16) {
            tensor.read_f32(first..first + 16, &mut rows).unwrap();
            assert!(rows.iter().all(|&x| x == 0.0));
        }
    }
    let grown = peak() - before;
    assert!(grown >= size / 2, "the measure works: it grew by {grown} bytes");
    assert!(grown < 2 * size, "reading {TENSORS} tensors of {size} bytes took {grown} bytes at the peak");
}
