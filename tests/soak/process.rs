//! What the kernel says of a process.

use std::fs;

/// One process at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Footprint {
    /// Resident, in KiB.
    pub resident: u64,
    /// Open file descriptors.
    pub files: usize,
    pub threads: usize,
}

impl Footprint {
    /// `None` where it is gone.
    pub fn of(process: u32) -> Option<Self> {
        let count = |what| Some(fs::read_dir(format!("/proc/{process}/{what}")).ok()?.count());
        let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
        let resident = resident.trim().trim_end_matches(" kB").parse().ok()?;
        Some(Self { resident, files: count("fd")?, threads: count("task")? })
    }
}
