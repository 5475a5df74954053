//! `linkwise topology`: prints the machine, for people and for scripts.

use std::fmt::Write;

use anyhow::Result;
use serde::Serialize;

use super::print;
use crate::config::{TopologyArgs, TopologyFormat};
use linkwise_core::topology::{Gpu, Nic, NodeTopology, Rank, TopologyWarning};
use linkwise_host::machines::{self, Machine};
use linkwise_host::picture::{self, Picture};

/// Runs the command.
pub async fn topology(args: &TopologyArgs) -> Result<()> {
    if args.list {
        let machines: Vec<_> = machines::built_in().collect();
        let width = machines.iter().map(|machine| machine.name.len()).max().unwrap_or(0);
        let lines = machines.iter().map(|machine| format!("{:width$}  {}\n", machine.name, machine.title));
        return Ok(print(&lines.collect::<String>())?);
    }
    let machine = super::machine(&args.node).await?;
    let (topology, warnings) = NodeTopology::assemble(&machine.observed);
    print(&match args.format {
        TopologyFormat::Text => text(&machine, &topology, &warnings),
        TopologyFormat::Json => {
            let warnings = warnings.iter().map(ToString::to_string).collect();
            serde_json::to_string_pretty(&as_json(&topology, warnings))? + "\n"
        }
        TopologyFormat::Svg => picture::svg(&Picture::new(&machine.title, &machine.observed, &topology)),
    })?;
    Ok(())
}

/// The output of `--format json`. Square arrays are in the order of `gpus`.
#[derive(Serialize)]
struct TopologyJson<'a> {
    gpus: &'a [Gpu],
    /// Ranks 0 to 5: PIX, PXB, PHB, NODE, SYS inside a package, other SYS; 0 on the diagonal.
    level: Vec<Vec<Rank>>,
    nvlink_mbps: Vec<Vec<u32>>,
    pcie_mbps: Vec<Vec<u32>>,
    bandwidth_mbps: Vec<Vec<u32>>,
    /// The NVSwitch plane on which each GPU has a port, or null.
    nvswitch_plane: Vec<Option<u32>>,
    nics: &'a [Nic],
    warnings: Vec<String>,
}

fn as_json(topology: &NodeTopology, warnings: Vec<String>) -> TopologyJson<'_> {
    let gpus = topology.gpus();
    let square = |value: fn(&NodeTopology, usize, usize) -> u32| {
        rows(gpus.len(), |a, b| if a == b { 0 } else { value(topology, a, b) })
    };
    TopologyJson {
        gpus,
        level: rows(gpus.len(), |a, b| topology.rank(a, b)),
        nvlink_mbps: square(NodeTopology::nvlink),
        pcie_mbps: square(NodeTopology::pcie),
        bandwidth_mbps: square(NodeTopology::bandwidth),
        nvswitch_plane: gpus.iter().map(|gpu| gpu.nvswitch_plane).collect(),
        nics: topology.nics(),
        warnings,
    }
}

fn rows<T>(size: usize, value: impl Fn(usize, usize) -> T) -> Vec<Vec<T>> {
    (0..size).map(|a| (0..size).map(|b| value(a, b)).collect()).collect()
}

/// The machine for people: title, tree, matrix, warnings.
fn text(machine: &Machine, topology: &NodeTopology, warnings: &[TopologyWarning]) -> String {
    let mut text = picture::machine_tree(machine) + "\n" + &picture::matrix(topology, &machine.observed.host);
    for warning in warnings {
        // Writing to a String cannot fail.
        let _ = write!(text, "\nwarning: {warning}");
    }
    if !text.ends_with('\n') {
        text.push('\n');
    }
    text
}
