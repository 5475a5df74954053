//! Finds the process that reads the configuration, by its command line in the PID namespace that the containers of the
//! pod share, and signals it.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::process::{Pid, Signal, getpid, kill_process};

/// The processes whose command line begins with this word. A path and a bare name are equal if their file names are:
/// NVIDIA's chart starts `mps-control-daemon` and names `/usr/bin/mps-control-daemon` as the process to signal. A
/// process that ends meanwhile is left out.
pub(super) fn processes(procfs: &Path, word: &str) -> io::Result<Vec<Pid>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(procfs)? {
        let entry = entry?;
        let pid = entry.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        let Some(pid) = pid.filter(|pid| *pid != getpid()) else { continue };
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let first = line.split(|byte| *byte == 0).next().unwrap_or_default();
        if is_named(OsStr::from_bytes(first), OsStr::new(word)) {
            found.push(pid);
        }
    }
    Ok(found)
}

/// Returns true if a command line's first word names a program.
fn is_named(first: &OsStr, word: &OsStr) -> bool {
    let bare = |name: &OsStr| !name.as_bytes().contains(&b'/');
    let file = |name| Path::new(name).file_name();
    first == word || (!first.is_empty() && bare(first) != bare(word) && file(first) == file(word))
}

/// Sends a signal. An invalid signal number is refused.
pub(super) fn send(pid: Pid, signal: i32) -> io::Result<()> {
    let signal = Signal::from_named_raw(signal).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(kill_process(pid, signal)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbour_is_found_by_its_first_word() {
        let procfs = tempfile::tempdir().unwrap();
        for (pid, line) in [
            ("7", "nvidia-device-plugin\0--config-file\0x\0"),
            ("8", "/usr/bin/nvidia-device-plugin\0"),
            ("9", "/proc/self/exe\0nvml-agent\0nvidia-device-plugin\0"),
            ("10", ""),
            ("11", "sh\0-c\0nvidia-device-plugin\0"),
            ("x", "nvidia-device-plugin\0"),
        ] {
            fs::create_dir(procfs.path().join(pid)).unwrap();
            fs::write(procfs.path().join(pid).join("cmdline"), line).unwrap();
        }
        // This process has ended while it was read.
        fs::create_dir(procfs.path().join("12")).unwrap();
        let found = |word| {
            let mut found: Vec<i32> =
                processes(procfs.path(), word).unwrap().into_iter().map(|pid| pid.as_raw_nonzero().get()).collect();
            found.sort_unstable();
            found
        };
        assert_eq!(found("nvidia-device-plugin"), [7, 8]);
        assert_eq!(found("/usr/bin/nvidia-device-plugin"), [7, 8]);
        assert_eq!(found("/opt/nvidia-device-plugin"), [7]);
        assert_eq!(found("gpu-feature-discovery"), [0; 0]);
        assert!(processes(&procfs.path().join("none"), "x").is_err());
    }
}
