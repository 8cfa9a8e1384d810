//! Signals that would end the process without a word.
#![allow(unsafe_code)] // Calls of the C library.

use std::{ffi::c_int, mem, ptr};

/// From now on a file that grows beyond the process's limit is an error of writing, which cleans up after itself; and a mapped file that is truncated ends the process with a message.
pub(crate) fn install() {
    // SAFETY: all fields of the action are set, and its handler does nothing that is forbidden in one.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        let mut action: libc::sigaction = mem::zeroed();
        action.sa_sigaction = on_bus_error as extern "C" fn(c_int, *mut libc::siginfo_t, *mut libc::c_void) as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGBUS, &action, ptr::null_mut());
    }
}

/// Somebody read behind the end of a mapped file. Nothing is allocated here, and no lock taken.
extern "C" fn on_bus_error(_: c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the system gives the address that was read.
    let address = unsafe { (*info).si_addr() } as usize;
    tell(b"error: ");
    if !tell_file_at(address) {
        tell(b"a file");
    }
    tell(b" was truncated while it was in use, or its disk failed\nhint: put the file back, and start again\n");
    // SAFETY: ends the process.
    unsafe { libc::_exit(1) }
}

fn tell(text: &[u8]) {
    // SAFETY: the text is as long as that. There is nobody to tell of a failure.
    let _ = unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
}

/// Tells which file is mapped at an address, by the system's own list: `START-END PERMISSIONS OFFSET DEVICE INODE PATH` in each line.
fn tell_file_at(address: usize) -> bool {
    // SAFETY: the name ends with a zero.
    let list = unsafe { libc::open(c"/proc/self/maps".as_ptr(), libc::O_RDONLY) };
    let (mut line, mut length, mut buffer) = ([0u8; 4096], 0, [0u8; 1024]);
    loop {
        // SAFETY: the buffer has as many bytes.
        let count = unsafe { libc::read(list, buffer.as_mut_ptr().cast(), buffer.len()) };
        let Some(read) = usize::try_from(count).ok().and_then(|count| buffer.get(..count)).filter(|read| !read.is_empty()) else {
            return false;
        };
        for &byte in read {
            if byte != b'\n' {
                if let Some(place) = line.get_mut(length) {
                    *place = byte;
                    length += 1;
                }
                continue;
            }
            if let Some(path) = path_at(&line[..length], address) {
                tell(path);
                return true;
            }
            length = 0;
        }
    }
}

/// The path of a line of the list, if the address lies in its range.
fn path_at(line: &[u8], address: usize) -> Option<&[u8]> {
    let dash = line.iter().position(|&byte| byte == b'-')?;
    let space = line.iter().position(|&byte| byte == b' ')?;
    let number = |digits: &[u8]| usize::from_str_radix(str::from_utf8(digits).ok()?, 16).ok();
    let range = number(&line[..dash])?..number(line.get(dash + 1..space)?)?;
    let path = &line[line.iter().position(|&byte| byte == b'/')?..];
    range.contains(&address).then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_list_has_its_path() {
        let line = b"7f00-7fff r--p 00001000 fe:00 1234                       /a folder/weights.bin";
        assert_eq!(path_at(line, 0x7f80), Some(&b"/a folder/weights.bin"[..]));
        assert_eq!(path_at(line, 0x7fff), None);
        assert_eq!(path_at(b"7f00-7fff rw-p 00000000 00:00 0 ", 0x7f80), None);
        assert_eq!(path_at(b"", 0), None);
    }
}
