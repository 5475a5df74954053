//! How `linkwise run` lives with NVML: what happens without it, and how long things may take.

use clap::{Args, ValueEnum};

/// How NVML is lived with. The times are for tests, which cannot wait as long as a node can.
#[derive(Clone, Debug, Args)]
pub struct NvmlArgs {
    /// What becomes of the GPUs once NVML has been away for a minute: keep gives them out as they were last seen,
    /// unhealthy does not give them out until NVML answers again (see docs/nvml.md)
    #[arg(long, value_name = "WHAT", env = "LINKWISE_ON_NVML_LOSS", default_value = "keep")]
    pub on_nvml_loss: OnNvmlLoss,
    /// From one look at the GPUs to the next
    #[arg(long, value_name = "N", default_value_t = 10_000, hide = true)]
    pub nvml_poll_ms: u64,
    /// How long one NVML call may take
    #[arg(long, value_name = "N", default_value_t = 30_000, hide = true)]
    pub nvml_call_ms: u64,
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
}

/// What becomes of the GPUs while NVML is away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnNvmlLoss {
    /// Given out as they were last seen.
    Keep,
    /// Not given out.
    Unhealthy,
}
