//! How long things may take that have to do with NVML and with health: for tests, which cannot wait as long as a node can.

use clap::Args;

/// How long NVML may take, and health.
#[derive(Clone, Debug, Args)]
pub struct NvmlArgs {
    /// From one look at the GPUs to the next
    #[arg(long, value_name = "N", default_value_t = 10_000, hide = true)]
    pub nvml_poll_ms: u64,
    /// How long one NVML call may take
    #[arg(long, value_name = "N", default_value_t = 30_000, hide = true)]
    pub nvml_call_ms: u64,
    /// How much memory of its own the process that speaks to NVML may have, in MiB
    #[arg(long, value_name = "N", default_value_t = 96, hide = true)]
    pub nvml_memory_mib: u64,
    /// How long initialising NVML, and the first call to each GPU, may take
    #[arg(long, value_name = "N", default_value_t = 120_000, hide = true)]
    pub nvml_start_ms: u64,
    /// The pause before a second child is started; it doubles to its sixtyfold
    #[arg(long, value_name = "N", default_value_t = 1_000, hide = true)]
    pub nvml_pause_ms: u64,
    /// How long NVML may be away before anything is done about it
    #[arg(long, value_name = "N", default_value_t = 60_000, hide = true)]
    pub nvml_grace_ms: u64,
    /// When a GPU that was left out is tried again for the first time; the pause doubles to its sixtyfold
    #[arg(long, value_name = "N", default_value_t = 60_000, hide = true)]
    pub nvml_trial_ms: u64,
    /// How long polls have to show that a GPU is well again, 60000 without it; it doubles to its sixtyfold
    #[arg(long, value_name = "N", hide = true)]
    pub health_hold_ms: Option<u64>,
    /// From one look at the PCI bus to the next on a node without GPUs
    #[arg(long, value_name = "N", default_value_t = 10_000, hide = true)]
    pub bus_look_ms: u64,
}
