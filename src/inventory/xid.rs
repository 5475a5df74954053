//! XIDs: the driver's error reports, and whose fault each is.

/// Whose fault an XID is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XidClass {
    /// The program's that ran on the GPU: the GPU is fine.
    Application,
    /// The GPU's, or not known to be anybody else's.
    Gpu,
}

/// The XIDs that a program causes on a healthy GPU, ascending.
///
/// 13 graphics engine exception, 31 memory page fault, 43 GPU stopped processing, 45 preemptive
/// cleanup after a previous error, 68 video processor exception, 109 context switch timeout: those
/// that NVIDIA's XID catalog lays at the application's door and that its own device plugin skips.
const APPLICATION: [u64; 6] = [13, 31, 43, 45, 68, 109];

impl XidClass {
    /// The class of a number.
    pub fn of(code: u64) -> Self {
        if APPLICATION.contains(&code) { Self::Application } else { Self::Gpu }
    }
}
