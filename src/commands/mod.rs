//! The commands that look and answer: `topology`, `allocate`.
//!
//! A composition root: it reads a machine (a file, or this one), asks the core and prints. Called by `main`.
//! What it prints for scripts is an interface; what it prints for people is held by golden tests.

mod allocate;
mod matrix;
mod output;
mod topology;
mod tree;

use std::path::Path;

use anyhow::Context;

use crate::config::{HostArgs, NodeArgs};
use crate::machines::{self, Machine};
use crate::topology::{NodeObservation, NodeTopology};
use crate::{hwloc, runtime};

pub use allocate::allocate;
pub use output::print;
pub use topology::{TopologyJson, topology};

/// Text for people: a machine's title and tree.
pub fn machine_tree(machine: &Machine) -> String {
    let (topology, _) = NodeTopology::assemble(&machine.observed);
    format!("{}\n\n{}", machine.title, tree::tree(&machine.observed, &topology, |_| String::new()))
}

/// The machine a command is about: a built-in one, a file, or this one as NVML and hwloc see it.
async fn machine(node: &NodeArgs) -> anyhow::Result<Machine> {
    match &node.node {
        Some(name) => Ok(machines::load(name)?),
        None => this_machine(&node.host).await,
    }
}

async fn this_machine(host: &HostArgs) -> anyhow::Result<Machine> {
    let observed = observe(host).await.context("cannot look at this machine (--node names another)")?;
    let name = "this machine".to_owned();
    let source = vec!["NVML and hwloc, live".to_owned()];
    Ok(Machine { title: name.clone(), name, source, reconstructed: Vec::new(), observed })
}

async fn observe(host: &HostArgs) -> anyhow::Result<NodeObservation> {
    let agent = runtime::agent_command(host);
    let (gpus, mut failures) = runtime::look(&agent).await?;
    let (seen, more) = hwloc::observe(Path::new(&host.sysfs));
    failures.extend(more);
    Ok(NodeObservation { gpus, host: seen, failures })
}
