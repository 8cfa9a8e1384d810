//! Memory that was freed and is still held by the allocator.
#![allow(unsafe_code)] // A call of the C library.

/// Blocks of this size or larger are mapped separately and return to the system when they are freed. Free memory at the top of an arena returns beyond the same size.
///
/// glibc starts lower, but raises the first limit to the largest block ever freed and the second to twice that: after one large request, every arena would keep as much.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const KEPT_BYTES: libc::c_int = 1 << 20;

/// Limits how much freed memory the allocator keeps, for a process that runs for a long time.
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
