//! Deadlines and intervals of NVML, health and doors. Hidden: only tests change them.

use clap::Args;

/// Deadlines and intervals of NVML, health and doors.
#[derive(Clone, Debug, Args)]
pub struct NvmlArgs {
    /// The interval of polls
    #[arg(long, value_name = "N", default_value_t = 10_000, hide = true)]
    pub nvml_poll_ms: u64,
    /// How long one NVML call may take
    #[arg(long, value_name = "N", default_value_t = 30_000, hide = true)]
    pub nvml_call_ms: u64,
    /// How long initialising NVML, and the first call to each GPU, may take
    #[arg(long, value_name = "N", default_value_t = 120_000, hide = true)]
    pub nvml_start_ms: u64,
    /// The pause before a failed agent is restarted; doubles up to 60 times
    #[arg(long, value_name = "N", default_value_t = 1_000, hide = true)]
    pub nvml_pause_ms: u64,
    /// How long NVML may be unavailable before --on-nvml-loss applies
    #[arg(long, value_name = "N", default_value_t = 60_000, hide = true)]
    pub nvml_grace_ms: u64,
    /// How long a GPU is quarantined before its first trial; doubles up to 60 times
    #[arg(long, value_name = "N", default_value_t = 60_000, hide = true)]
    pub nvml_trial_ms: u64,
    /// How long polls have to show a GPU as recovered, by default 60000; doubles up to 60 times
    #[arg(long, value_name = "N", hide = true)]
    pub health_hold_ms: Option<u64>,
    /// How long the kubelet's lists may lack a claim that a container has, by default 90000
    #[arg(long, value_name = "N", hide = true)]
    pub claims_listed_ms: Option<u64>,
    /// The interval of PCI bus scans on a node without GPUs
    #[arg(long, value_name = "N", default_value_t = 10_000, hide = true)]
    pub bus_look_ms: u64,
}
