//! The commands that are not in `src/run`; `labels` only with --node.
//!
//! Most of them read a machine (from a file, or this one), call the core and print the result. `run_command` calls
//! them. The output for scripts is an interface; golden tests check the output for people.

mod admin;
mod allocate;
mod benchmark;
mod claim;
mod config;
mod config_manager;
mod doctor;
mod documents;
mod dra;
mod labels;
mod snapshot;
mod top;
mod topology;
mod wait;

use std::path::Path;

use anyhow::{Context, Result};

use crate::config::{HostArgs, NodeArgs};
use crate::run;
use linkwise_core::allocation::AllocationTables;
use linkwise_core::quote::excerpt;
use linkwise_core::state::GpuSelector;
use linkwise_core::topology::{Gpu, NodeTopology};
use linkwise_host::hwloc;
use linkwise_host::machines::{self, Machine, VERSION};
use linkwise_nvml::supervisor;
use linkwise_system::output::{complain, open, print};
use linkwise_system::progress::Progress;

pub use admin::admin;
pub use allocate::allocate;
pub use benchmark::{expect, verify};
pub use claim::{any_claim, claim, exact_claim, fleet_claim, rails_claim};
pub use config::config;
pub use config_manager::run as config_manager;
pub use doctor::doctor;
pub use documents::{completions, man};
pub use dra::dra;
pub use labels::labels;
pub use snapshot::snapshot;
pub use top::top;
pub use topology::topology;
pub use wait::wait;

/// Builds the allocation tables of a machine. With many GPUs this takes a while.
fn tables(topology: NodeTopology) -> AllocationTables {
    let _progress = Progress::start("comparing the sets of this machine's GPUs");
    AllocationTables::new(topology.into())
}

/// The GPU that a person named, with its position in the topology.
fn find_gpu<'a>(topology: &'a NodeTopology, name: &GpuSelector) -> Result<(usize, &'a Gpu)> {
    let gpus = topology.gpus();
    let found = gpus.iter().enumerate().find(|(_, gpu)| name.is(gpu));
    found.with_context(|| format!("no GPU {name} on this machine (it has {})", gpus.len()))
}

/// Warns on standard error if the machine's NVLinks are unknown, for a command whose answer depends on them.
fn note_unknown_nvlinks(machine: &str, topology: &NodeTopology) {
    let note = || format!("{}: its NVLinks are unknown, and taken as none", excerpt(machine));
    complain("linkwise", (!topology.knows_nvlinks()).then(note));
}

/// The machine that a command's options name.
async fn machine(node: &NodeArgs) -> Result<Machine> {
    match &node.node {
        Some(name) => {
            let mut machine = machines::load(name)?;
            if let Some(model) = &node.gpu_model {
                machine.set_model(model)?;
            }
            Ok(machine)
        }
        None => this_machine(&node.host).await,
    }
}

async fn this_machine(host: &HostArgs) -> Result<Machine> {
    let _progress = Progress::start("reading this machine");
    let scan = supervisor::scan(&run::agent_command(host)).await;
    let scan = scan.context("cannot read this machine; name another one with --node")?;
    let (seen, failures) = hwloc::observe(Path::new(&host.sysfs));
    let name = "this machine".to_owned();
    let source = vec!["NVML and hwloc, live".to_owned()];
    let observed = scan.node(seen, failures);
    Ok(Machine { version: VERSION, title: name.clone(), name, source, reconstructed: Vec::new(), observed })
}
