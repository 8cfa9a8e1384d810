//! Whether this CPU has AMX and lets us use it.
#![allow(unsafe_code)] // CPUID, XGETBV and a system call.

use std::{arch::x86_64::*, sync::OnceLock};

/// Whether tiles of bytes can be multiplied here. Linux must be asked for them: the first call does, for the whole process.
pub(super) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| cpu_has_it() && system_saves_it() && system_permits_it())
}

fn cpu_has_it() -> bool {
    const TILE: u32 = 1 << 24;
    const INT8: u32 = 1 << 25;
    #[allow(unused_unsafe)] // Older compilers count the instruction as unsafe.
    // SAFETY: every x86-64 CPU has CPUID.
    unsafe {
        __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & (TILE | INT8) == TILE | INT8
    }
}

/// Whether the system keeps tiles and their shapes when it changes threads.
fn system_saves_it() -> bool {
    const SHAPES_AND_TILES: u64 = 0b11 << 17;

    #[target_feature(enable = "xsave")]
    fn state_components() -> u64 {
        // SAFETY: the caller saw that the system has turned XGETBV on.
        unsafe { _xgetbv(0) }
    }
    const OSXSAVE: u32 = 1 << 27;
    #[allow(unused_unsafe)]
    // SAFETY: as above; OSXSAVE says that XGETBV may be used.
    unsafe {
        __cpuid(1).ecx & OSXSAVE != 0 && state_components() & SHAPES_AND_TILES == SHAPES_AND_TILES
    }
}

#[cfg(target_os = "linux")]
fn system_permits_it() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const TILES: libc::c_long = 18;
    // SAFETY: the call takes two numbers and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILES) == 0 }
}

/// Not known how to ask.
#[cfg(not(target_os = "linux"))]
fn system_permits_it() -> bool {
    false
}
