//! Memory that was freed and is still held by the allocator.
#![allow(unsafe_code)] // A call of the C library.

/// A block of so many bytes is asked of the system and given back to it alone, and what is free at the end of a thread's memory is given back beyond it.
///
/// The C library begins with less, but raises both limits to the largest block that was ever freed, and twice that: after one large request, each thread would keep what another needs.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const KEPT_BYTES: libc::c_int = 1 << 20;

/// Has the allocator keep little of what is freed, in a process that runs for long.
pub(crate) fn keep_little() {
    // SAFETY: sets numbers of the allocator, which it takes at any time.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, KEPT_BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT_BYTES);
    }
}

/// Gives it back to the system, where the allocator keeps it otherwise.
pub(crate) fn give_back() {
    // SAFETY: takes the allocator's own locks, and touches only what is free.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    unsafe {
        libc::malloc_trim(0);
    }
}
