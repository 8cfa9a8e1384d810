//! Memory that was freed and is still held by the allocator.
#![allow(unsafe_code)] // A call of the C library.

/// Gives it back to the system, where the allocator keeps it otherwise.
pub(crate) fn give_back() {
    // SAFETY: takes the allocator's own locks, and touches only what is free.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    unsafe {
        libc::malloc_trim(0);
    }
}
