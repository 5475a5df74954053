//! The commands that read and print: `topology`, `allocate`, `simulate`, `snapshot`, `doctor`, `dra`, `claim`, `admin`,
//! `top`, `wait`, `config`.
//!
//! A composition root: it reads a machine (a file, or this one), asks the core and prints. Called by `main`.
//! What it prints for scripts is an interface; what it prints for people is held by golden tests.

mod admin;
mod allocate;
mod claim;
mod config;
mod doctor;
mod dra;
mod labels;
mod machine;
mod manifest;
mod matrix;
mod output;
mod progress;
mod simulate;
mod since;
mod snapshot;
mod top;
mod topology;
mod tree;
mod wait;

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use anyhow::{Context, Result};

use crate::allocation::AllocationTables;
use crate::machines::Machine;
use crate::state::GpuSelector;
use crate::topology::{Gpu, NodeTopology};

pub use admin::admin;
pub use allocate::allocate;
pub use claim::{any_claim, claim};
pub use config::config;
pub use doctor::{
    ClusterFacts, ClusterQuestions, DraFound, ExtendedResourceFound, MissingRights, NodeFeatureFound, NodeFeatures,
    PodPolicy, doctor,
};
pub use dra::dra;
pub use labels::labels;
pub use output::print;
pub use progress::Progress;
pub use simulate::{Draws, Job, best_set, collective, read_trace, simulate};
pub use snapshot::snapshot;
pub use top::top;
pub use topology::topology;
pub use wait::wait;

use machine::machine;

/// Text for people: a machine's title and tree.
pub fn machine_tree(machine: &Machine) -> String {
    let (topology, _) = NodeTopology::assemble(&machine.observed);
    format!("{}\n\n{}", machine.title, tree::tree(&machine.observed, &topology, |_| String::new()))
}

/// A file that a person named, or standard input.
fn open(path: &Path) -> Result<Box<dyn Read>> {
    match path.to_str() {
        Some("-") => Ok(Box::new(io::stdin().lock())),
        _ => Ok(Box::new(File::open(path).with_context(|| format!("cannot open {}", path.display()))?)),
    }
}

/// The tables of a machine: of one with many GPUs they take a while.
fn tables(topology: NodeTopology) -> AllocationTables {
    let _progress = Progress::start("comparing the sets of this machine's GPUs");
    AllocationTables::new(topology.into())
}

/// The GPU that a person named, with its place.
fn find_gpu<'a>(topology: &'a NodeTopology, name: &GpuSelector) -> Result<(usize, &'a Gpu)> {
    let gpus = topology.gpus();
    let found = gpus.iter().enumerate().find(|(_, gpu)| name.is(gpu));
    found.with_context(|| format!("no GPU {name} on this machine (it has {})", gpus.len()))
}
