//! What there is to know about the machine: its name, its memory, how fast that can be read.

use crate::{
    kernels::{Instructions, dot::Dots},
    pool::Pool,
};
use std::{
    hint::black_box,
    time::{Duration, Instant},
};

/// Memory in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemorySize {
    pub(crate) total: u64,
    /// What could be used without pushing others out.
    pub(crate) available: u64,
}

/// The memory of this machine, where the system tells.
pub(crate) fn memory() -> Option<MemorySize> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    let total = field("MemTotal")?;
    Some(MemorySize { total, available: field("MemAvailable").unwrap_or(total) })
}

/// What a person would call this CPU.
pub(crate) fn cpu_name() -> String {
    let named = brand().filter(|name| !name.is_empty()).or_else(|| name_in(&std::fs::read_to_string("/proc/cpuinfo").ok()?));
    named.unwrap_or_else(|| format!("{} CPU", std::env::consts::ARCH))
}

/// The name that Linux's description of the cores gives. Arm's cores have numbers there; where they are of several kinds, all are named.
fn name_in(description: &str) -> Option<String> {
    let all =
        |key: &'static str| description.lines().filter_map(move |line| Some(line.strip_prefix(key)?.trim_start_matches([' ', '\t', ':'])));
    if let Some(name) = all("model name").chain(all("Hardware")).next() {
        return Some(name.to_string());
    }
    let mut kinds: Vec<(String, usize)> = Vec::new();
    for (implementer, part) in all("CPU implementer").zip(all("CPU part")) {
        let known = ARM_CORES.iter().find(|(number, _)| implementer == "0x41" && part == *number);
        let name = known.map_or_else(|| format!("aarch64 CPU {implementer}/{part}"), |(_, name)| name.to_string());
        match kinds.iter_mut().find(|(kind, _)| *kind == name) {
            Some((_, count)) => *count += 1,
            None => kinds.push((name, 1)),
        }
    }
    let names: Vec<String> =
        kinds.iter().map(|(name, count)| if kinds.len() > 1 { format!("{count} {name}") } else { name.clone() }).collect();
    (!names.is_empty()).then(|| names.join(", "))
}

/// Cores of Arm by their part number.
const ARM_CORES: [(&str, &str); 27] = [
    ("0xd03", "Cortex-A53"),
    ("0xd05", "Cortex-A55"),
    ("0xd07", "Cortex-A57"),
    ("0xd08", "Cortex-A72"),
    ("0xd09", "Cortex-A73"),
    ("0xd0a", "Cortex-A75"),
    ("0xd0b", "Cortex-A76"),
    ("0xd0c", "Neoverse-N1"),
    ("0xd0d", "Cortex-A77"),
    ("0xd40", "Neoverse-V1"),
    ("0xd41", "Cortex-A78"),
    ("0xd44", "Cortex-X1"),
    ("0xd46", "Cortex-A510"),
    ("0xd47", "Cortex-A710"),
    ("0xd48", "Cortex-X2"),
    ("0xd49", "Neoverse-N2"),
    ("0xd4b", "Cortex-A78C"),
    ("0xd4d", "Cortex-A715"),
    ("0xd4e", "Cortex-X3"),
    ("0xd4f", "Neoverse-V2"),
    ("0xd80", "Cortex-A520"),
    ("0xd81", "Cortex-A720"),
    ("0xd82", "Cortex-X4"),
    ("0xd84", "Neoverse-V3"),
    ("0xd85", "Cortex-X925"),
    ("0xd87", "Cortex-A725"),
    ("0xd8e", "Neoverse-N3"),
];

/// The brand string that x86 CPUs carry.
#[cfg(target_arch = "x86_64")]
fn brand() -> Option<String> {
    #[allow(unused_unsafe, unsafe_code)] // Older compilers count the instruction as unsafe.
    // SAFETY: every x86-64 CPU has CPUID.
    let leaf = |leaf: u32| unsafe { std::arch::x86_64::__cpuid(leaf) };
    if leaf(0x8000_0000).eax < 0x8000_0004 {
        return None;
    }
    let words = (0x8000_0002..=0x8000_0004).flat_map(|number| {
        let part = leaf(number);
        [part.eax, part.ebx, part.ecx, part.edx]
    });
    let bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).take_while(|&byte| byte != 0).collect();
    Some(String::from_utf8_lossy(&bytes).split_whitespace().collect::<Vec<_>>().join(" "))
}

#[cfg(not(target_arch = "x86_64"))]
fn brand() -> Option<String> {
    None
}

/// Bytes per second that `threads` threads read together from memory that is too large for the caches: what bounds decoding.
/// `None` where the memory or the threads cannot be had.
pub fn measure_bandwidth(threads: usize) -> Option<f64> {
    let bytes = room_beyond_caches().next_multiple_of(UNIT * 4);
    const UNIT: usize = 1 << 17; // f32 numbers: 512 KiB
    const ROW: usize = 1024;
    let mut numbers = Vec::<f32>::new();
    numbers.try_reserve_exact(bytes / 4).ok()?;
    // Written, so that every page is there and distinct.
    numbers.extend((0..bytes / 4).map(|i| (i % 1021) as f32));
    let pool = Pool::new(threads.max(1)).ok()?;
    let (units, instructions) = (numbers.len() / UNIT, Instructions::best());
    let x = [1.0; ROW];
    // As decoding reads: each thread from front to back.
    let pass = || {
        pool.run(units, &|unit, _| {
            let (mut out, w) = ([0.0; UNIT / ROW], &numbers[unit * UNIT..(unit + 1) * UNIT]);
            Dots { x: &x, x_stride: ROW, x_rows: 1, w, w_stride: ROW, w_rows: out.len(), k: ROW }.into(instructions, &mut out, UNIT / ROW);
            black_box(out);
        });
    };
    pass();
    // The best of several passes: others may use the memory too.
    let start = Instant::now();
    let mut best = Duration::MAX;
    for _ in 0..8 {
        let begin = Instant::now();
        pass();
        best = best.min(begin.elapsed());
        if start.elapsed() > Duration::from_secs(3) {
            break;
        }
    }
    Some(bytes as f64 / best.as_secs_f64())
}

/// Bytes of which caches can hold only a small part: four times the largest cache, as far as memory allows.
fn room_beyond_caches() -> usize {
    let largest = (0..8).filter_map(|index| std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size")).ok());
    let largest = largest.filter_map(|size| cache_bytes(&size)).max().unwrap_or(0);
    let available = memory().map_or(u64::MAX, |memory| memory.available / 8);
    largest.saturating_mul(4).max(256 << 20).min(available.try_into().unwrap_or(usize::MAX)).max(64 << 20)
}

/// The size of a cache as Linux writes it, `266240K`.
fn cache_bytes(text: &str) -> Option<usize> {
    let text = text.trim();
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let shift = match unit {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        _ => return None,
    };
    number.parse::<usize>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_arm_cores() {
        let core = |part: &str| format!("processor\t: 0\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU part\t: {part}\n\n");
        assert_eq!(name_in(&core("0xd0c").repeat(4)).unwrap(), "Neoverse-N1");
        assert_eq!(name_in(&(core("0xd05").repeat(4) + &core("0xd44"))).unwrap(), "4 Cortex-A55, 1 Cortex-X1");
        assert_eq!(name_in("CPU implementer\t: 0x61\nCPU part\t: 0x022\n").unwrap(), "aarch64 CPU 0x61/0x022");
        assert_eq!(name_in("model name\t: Some CPU\n").unwrap(), "Some CPU");
        assert_eq!(name_in(""), None);
    }

    #[test]
    fn sizes_of_caches() {
        assert_eq!(["266240K\n", "32M", "512", "x", ""].map(cache_bytes), [Some(266240 << 10), Some(32 << 20), Some(512), None, None]);
        assert!(room_beyond_caches() >= 64 << 20);
    }

    #[test]
    fn knows_this_machine() {
        assert!(!cpu_name().is_empty());
        if cfg!(target_os = "linux") {
            let memory = memory().unwrap();
            assert!(memory.total >= memory.available && memory.available > 0);
        }
    }
}
