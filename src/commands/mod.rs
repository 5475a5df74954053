//! The commands that look and answer: `topology`, `allocate`, `snapshot`.
//!
//! A composition root: it reads a machine (a file, or this one), asks the core and prints. Called by `main`.
//! What it prints for scripts is an interface; what it prints for people is held by golden tests.

mod allocate;
mod machine;
mod matrix;
mod output;
mod snapshot;
mod topology;
mod tree;

use crate::machines::Machine;

pub use allocate::allocate;
pub use machine::load;
pub use output::print;
pub use snapshot::snapshot;
pub use topology::{TopologyJson, topology};
pub use tree::tree;

use machine::machine;

/// Text for people: a machine, its tree and its matrix.
pub fn machine_text(machine: &Machine) -> String {
    topology::text(machine)
}
