//! Code that only the start needed, given back to the kernel.
//!
//! The kernel maps 64 KiB around each page of the executable that runs for the first time. A start runs a little of
//! nearly everything, so that most of the executable stays mapped, and counts as this process's memory, although what
//! runs afterwards is a third of it. Called by `runtime`.

use std::fs;
use std::io;
use std::path::Path;

use rustix::mm::{Advice, madvise};

/// Unmaps the code of this executable: what runs again is mapped again, from the page cache. Returns how many bytes of
/// addresses that were.
///
/// # Errors
///
/// `/proc` cannot be read, or the kernel refuses.
#[allow(unsafe_code, reason = "madvise takes addresses; which it gets, and why that is safe, is said below")]
pub fn unmap_code() -> io::Result<usize> {
    let program = fs::read_link("/proc/self/exe")?;
    let mut unmapped = 0;
    for (from, to) in fs::read_to_string("/proc/self/maps")?.lines().filter_map(|line| code(line, &program)) {
        let length = to.saturating_sub(from);
        // SAFETY: the range is a mapping of the executable that nobody can write to and that stays until the process
        // ends: its pages are those of the file, and are read from it again when they run.
        unsafe { madvise(std::ptr::with_exposed_provenance_mut(from), length, Advice::LinuxDontNeed)? };
        unmapped += length;
    }
    Ok(unmapped)
}

/// The addresses of a line of `/proc/self/maps` (proc_pid_maps(5)) that has code of the program.
fn code(line: &str, program: &Path) -> Option<(usize, usize)> {
    let mut fields = line.split_ascii_whitespace();
    let (from, to) = fields.next()?.split_once('-')?;
    let is_code = fields.next()? == "r-xp";
    // Offset, device and inode lie between.
    let is_of_program = fields.nth(3).is_some_and(|path| Path::new(path) == program);
    let address = |text| usize::from_str_radix(text, 16).ok();
    Some((address(from)?, address(to)?)).filter(|_| is_code && is_of_program)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_code_of_the_program_is_unmapped() {
        let program = Path::new("/usr/bin/linkwise");
        let line = |range: &str, rights: &str, path: &str| format!("{range} {rights} 00191000 fe:00 4711      {path}");
        assert_eq!(code(&line("1000-3000", "r-xp", "/usr/bin/linkwise"), program), Some((0x1000, 0x3000)));
        for (range, rights, path) in [
            ("1000-3000", "r--p", "/usr/bin/linkwise"),
            ("1000-3000", "rw-p", "/usr/bin/linkwise"),
            ("1000-3000", "rwxp", "/usr/bin/linkwise"),
            ("1000-3000", "r-xp", "/usr/lib/libnvidia-ml.so.1"),
            ("1000-3000", "r-xp", "[vdso]"),
            ("1000-3000", "r-xp", ""),
            ("x-3000", "r-xp", "/usr/bin/linkwise"),
            ("", "", ""),
        ] {
            assert_eq!(code(&line(range, rights, path), program), None, "{range} {rights} {path}");
        }
    }

    #[test]
    fn program_goes_on_without_its_pages() {
        /// KiB of this executable's code that are mapped.
        fn mapped() -> u64 {
            let program = fs::read_link("/proc/self/exe").unwrap();
            let (mut is_code, mut sum) = (false, 0);
            for line in fs::read_to_string("/proc/self/smaps").unwrap().lines() {
                let mut words = line.split_ascii_whitespace();
                match words.next().unwrap() {
                    "Rss:" if is_code => sum += words.next().unwrap().parse::<u64>().unwrap(),
                    name if name.ends_with(':') => {}
                    _ => is_code = code(line, &program).is_some(),
                }
            }
            sum
        }
        let before = mapped();
        assert!(unmap_code().unwrap() > 0);
        assert!(mapped() < before, "{before}");
    }
}
