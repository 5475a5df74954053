//! `linkwise run`: the node that the options describe, and its neighbours `labels` and `mps-control-daemon`.
//!
//! `start` builds all objects, and gives the tasks to the node. `driver` makes the supervisor of the NVML agent;
//! `cdi_sync` keeps CDI specs and device nodes up to date; `labels`, `dra`, `condition` and `events` publish the
//! snapshots for schedulers and people; `config` reloads the configuration; `operators` serves the admin socket;
//! `mps` orders MPS daemons, and has the process that starts them; `labels_program` is `linkwise labels`. A task
//! that ends unexpectedly ends its process, with the cause.

mod cdi_sync;
mod condition;
mod config;
mod dra;
mod driver;
mod events;
mod labels;
mod labels_program;
#[cfg(test)]
mod metrics_tests;
mod mps;
mod operators;
pub mod simulated;
mod start;

use anyhow::Result;
use linkwise_system::block_on;
use linkwise_system::log::{Log, log_to_stderr};
use linkwise_system::signals::LastSignals;

use crate::config::{LogArgs, RunArgs};

pub use condition::clear as clear_condition;
pub use driver::agent_command;
pub use labels::labels_of;
pub use labels_program::labels;
pub use mps::mps_control_daemon;
use start::serve;

/// Starts the log. The API server's client logs nothing itself: linkwise logs its failures, once each.
pub fn start_log(args: &LogArgs) -> Result<Log> {
    log_to_stderr(&args.log, "kube_client", args.log_format)
}

/// Serves this node until a signal ends it.
pub fn run(args: &RunArgs) -> Result<()> {
    let _log = start_log(&args.log)?;
    block_on(async {
        // This listener outlives each start, because a signal between two starts must not be lost.
        let mut last_signals = LastSignals::listen()?;
        while serve(args, &mut last_signals).await? && !last_signals.try_recv() {
            tracing::info!("starting again");
        }
        Ok(())
    })
}
