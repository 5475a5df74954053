//! The commands that look and answer: `topology`, `allocate`.
//!
//! A composition root: it reads a machine (a file, or this one), asks the core and prints. Called by `main`.
//! What it prints for scripts is an interface; what it prints for people is held by golden tests.

mod allocate;
mod matrix;
mod outline;
mod output;
mod picture;
mod topology;
mod tree;

use std::path::Path;

use anyhow::Context;

use crate::config::{GpuName, HostArgs, NodeArgs};
use crate::machines::{self, Machine};
use crate::topology::{Gpu, NodeObservation, NodeTopology};
use crate::{hwloc, runtime};

pub use allocate::allocate;
pub use output::print;
pub use topology::{TopologyJson, topology};

/// Text for people: a machine's title and tree.
pub fn machine_tree(machine: &Machine) -> String {
    let (topology, _) = NodeTopology::assemble(&machine.observed);
    format!("{}\n\n{}", machine.title, tree::tree(&machine.observed, &topology, |_| String::new()))
}

/// A name that no GPU of the machine has.
#[derive(Debug, thiserror::Error)]
#[error("no GPU {name} on this machine (it has {count})")]
struct NoSuchGpu {
    name: GpuName,
    count: usize,
}

/// The GPU that a person named, with its place.
fn find_gpu<'a>(topology: &'a NodeTopology, name: &GpuName) -> Result<(usize, &'a Gpu), NoSuchGpu> {
    let gpus = topology.gpus();
    let found = gpus.iter().enumerate().find(|(_, gpu)| name.names(gpu));
    found.ok_or_else(|| NoSuchGpu { name: name.clone(), count: gpus.len() })
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
