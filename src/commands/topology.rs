//! `linkwise topology`: the machine, for people and for scripts.

use std::fmt::Write;

use anyhow::Result;
use serde::Serialize;

use super::{matrix, print, tree};
use crate::config::{Format, TopologyArgs};
use crate::machines::{self, Machine};
use crate::topology::{Gpu, LinkMatrix, Nic, NodeTopology, Rank};

/// Runs the command.
pub async fn topology(args: &TopologyArgs) -> Result<()> {
    if args.list {
        let machines: Vec<_> = machines::built_in().collect();
        let width = machines.iter().map(|machine| machine.name.len()).max().unwrap_or(0);
        let lines = machines.iter().map(|machine| format!("{:width$}  {}\n", machine.name, machine.title));
        return Ok(print(&lines.collect::<String>())?);
    }
    let machine = super::machine(&args.node).await?;
    match args.format {
        Format::Text => print(&text(&machine))?,
        Format::Json => {
            let (topology, warnings) = NodeTopology::assemble(&machine.observed);
            let warnings = warnings.iter().map(ToString::to_string).collect();
            print(&(serde_json::to_string_pretty(&TopologyJson::new(&topology, warnings))? + "\n"))?;
        }
    }
    Ok(())
}

/// What `--format json` writes. Square arrays are in the order of `gpus`.
#[derive(Debug, Serialize)]
pub struct TopologyJson<'a> {
    gpus: &'a [Gpu],
    /// Ranks 0 to 5: PIX, PXB, PHB, NODE, SYS inside a package, SYS between packages; 0 on the diagonal.
    level: Vec<Vec<Rank>>,
    nvlink_mbps: LinkMatrix,
    pcie_mbps: LinkMatrix,
    bandwidth_mbps: LinkMatrix,
    /// For each GPU the NVSwitch plane it has a port on, or null.
    nvswitch_plane: Vec<Option<u32>>,
    nics: &'a [Nic],
    warnings: Vec<String>,
}

impl<'a> TopologyJson<'a> {
    /// All there is to say of a topology.
    pub fn new(topology: &'a NodeTopology, warnings: Vec<String>) -> Self {
        let gpus = topology.gpus();
        let square = |value: &dyn Fn(usize, usize) -> u32| {
            let mut matrix = LinkMatrix::zeros(gpus.len());
            for a in 0..gpus.len() {
                for b in a + 1..gpus.len() {
                    matrix.set(a, b, value(a, b));
                }
            }
            matrix
        };
        let ranks = |a: usize| (0..gpus.len()).map(|b| topology.rank(a, b)).collect();
        Self {
            gpus,
            level: (0..gpus.len()).map(ranks).collect(),
            nvlink_mbps: square(&|a, b| topology.nvlink(a, b)),
            pcie_mbps: square(&|a, b| topology.pcie(a, b)),
            bandwidth_mbps: square(&|a, b| topology.bandwidth(a, b)),
            nvswitch_plane: gpus.iter().map(|gpu| gpu.nvswitch_plane).collect(),
            nics: topology.nics(),
            warnings,
        }
    }
}

/// The machine for people: title, tree, matrix, warnings.
pub(super) fn text(machine: &Machine) -> String {
    let (topology, warnings) = NodeTopology::assemble(&machine.observed);
    let mut text = format!("{}\n\n", machine.title);
    text += &tree::tree(&machine.observed, &topology, |_| String::new());
    text.push('\n');
    text += &matrix::matrix(&topology, &machine.observed.host);
    for warning in warnings {
        // Writing to a String cannot fail.
        let _ = write!(text, "\nwarning: {warning}");
    }
    if !text.ends_with('\n') {
        text.push('\n');
    }
    text
}
