//! Which cores a thread may use, and how it is kept on one of them.

use std::fs;

/// A core, by the system's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Core(usize);

/// Whether threads can be kept on cores of their own on this system.
pub const CAN_PIN: bool = cfg!(target_os = "linux");

/// The cores that the calling thread may use, one thread of each physical core first. None where the system does not tell.
pub(crate) fn cores() -> Vec<Core> {
    let allowed = system::get().map_or(Vec::new(), |mask| system::cores(&mask));
    let siblings = |core: usize| {
        let path = format!("/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list");
        fs::read_to_string(path).map_or(Vec::new(), |list| numbers(&list))
    };
    in_order(&allowed, siblings).into_iter().map(Core).collect()
}

/// The first thread of each physical core, then the second of each and so on.
fn in_order(allowed: &[usize], siblings: impl Fn(usize) -> Vec<usize>) -> Vec<usize> {
    let before = |core: usize| siblings(core).into_iter().filter(|other| *other < core && allowed.contains(other)).count();
    let mut cores: Vec<(usize, usize)> = allowed.iter().map(|&core| (before(core), core)).collect();
    cores.sort_unstable();
    cores.into_iter().map(|(_, core)| core).collect()
}

/// The numbers of a list such as `0-2,8`.
fn numbers(list: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    list.trim().split(',').filter_map(range).flatten().take(system::MOST).collect()
}

impl Core {
    /// The system's number.
    pub(crate) fn number(self) -> usize {
        self.0
    }

    /// Keeps the calling thread on this core from now on. A core that was taken from the process in the meantime is not insisted on.
    pub(crate) fn keep(self) {
        system::set(&system::only(self.0));
    }

    /// Keeps the calling thread on this core until the result is dropped.
    pub(crate) fn hold(self) -> Held {
        let before = system::get();
        self.keep();
        Held(before)
    }
}

/// A thread that is kept on a core for a while.
pub(crate) struct Held(Option<system::Mask>);

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            system::set(before);
        }
    }
}

#[cfg(target_os = "linux")]
#[allow(unsafe_code)] // System calls.
mod system {
    pub(super) type Mask = libc::cpu_set_t;

    /// Cores that a mask has places for.
    pub(super) const MOST: usize = libc::CPU_SETSIZE as usize;

    pub(super) fn get() -> Option<Mask> {
        let mut mask = none();
        // SAFETY: the call fills the mask, as many bytes as it is told of. 0 is the calling thread.
        (unsafe { libc::sched_getaffinity(0, size_of::<Mask>(), &mut mask) } == 0).then_some(mask)
    }

    pub(super) fn set(mask: &Mask) {
        // SAFETY: the call reads the mask.
        unsafe { libc::sched_setaffinity(0, size_of::<Mask>(), mask) };
    }

    pub(super) fn only(core: usize) -> Mask {
        let mut mask = none();
        // SAFETY: a core of `cores`, so there is a place for it.
        unsafe { libc::CPU_SET(core, &mut mask) };
        mask
    }

    pub(super) fn cores(mask: &Mask) -> Vec<usize> {
        // SAFETY: there is a place for each of these.
        (0..MOST).filter(|&core| unsafe { libc::CPU_ISSET(core, mask) }).collect()
    }

    fn none() -> Mask {
        // SAFETY: bits, of which all may be 0.
        unsafe { std::mem::zeroed() }
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    pub(super) type Mask = ();
    pub(super) const MOST: usize = 0;

    pub(super) fn get() -> Option<Mask> {
        None
    }

    pub(super) fn set(_: &Mask) {}

    pub(super) fn only(_: usize) -> Mask {}

    pub(super) fn cores(_: &Mask) -> Vec<usize> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn physical_cores_come_first() {
        // Two threads in each of three cores, numbered as Linux mostly does, and as some firmware does.
        let apart = |core: usize| vec![core % 3, core % 3 + 3];
        assert_eq!(in_order(&[0, 1, 2, 3, 4, 5], apart), [0, 1, 2, 3, 4, 5]);
        let beside = |core: usize| vec![core / 2 * 2, core / 2 * 2 + 1];
        assert_eq!(in_order(&[0, 1, 2, 3, 4, 5], beside), [0, 2, 4, 1, 3, 5]);
        // A sibling that is not allowed takes nobody's place.
        assert_eq!(in_order(&[1, 2, 3, 5], beside), [1, 2, 5, 3]);
        assert_eq!(in_order(&[4, 7], |_| vec![]), [4, 7]);
        assert!(in_order(&[], beside).is_empty());
    }

    #[test]
    fn lists_of_cores() {
        if CAN_PIN {
            assert_eq!(numbers("0-2,8\n"), [0, 1, 2, 8]);
            assert_eq!(numbers("3"), [3]);
            assert_eq!(numbers("0-18446744073709551615").len(), system::MOST);
            assert!(numbers("").is_empty() && numbers("x-y,").is_empty());
        }
    }

    #[test]
    fn a_thread_is_held_for_a_while() {
        let before = cores();
        if let Some(&last) = before.last() {
            let held = last.hold();
            assert_eq!(cores(), [last]);
            drop(held);
            assert_eq!(cores(), before);
        }
    }
}
