//! `linkwise topology`: the machine, for people and for scripts.

use std::collections::BTreeSet;
use std::fmt::Write;

use anyhow::{Result, bail};
use serde::Serialize;

use super::picture::{self, Picture};
use super::{find_gpu, matrix, print, tree};
use crate::config::{TopologyArgs, TopologyFormat};
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
    let (topology, warnings) = NodeTopology::assemble(&machine.observed);
    let allocated: Option<BTreeSet<usize>> = match &args.allocated {
        Some(names) => {
            let places = names.iter().map(|name| Ok(find_gpu(&topology, name)?.0));
            Some(places.collect::<Result<_>>()?)
        }
        None => None,
    };
    print(&match args.format {
        TopologyFormat::Text => text(&machine, allocated.as_ref()),
        TopologyFormat::Json | TopologyFormat::Nccl if allocated.is_some() => {
            bail!("--allocated is for text, svg and dot")
        }
        TopologyFormat::Json => {
            let warnings = warnings.iter().map(ToString::to_string).collect();
            serde_json::to_string_pretty(&TopologyJson::new(&topology, warnings))? + "\n"
        }
        TopologyFormat::Svg => picture::svg(&Picture::new(&machine, &topology, allocated.as_ref())),
        TopologyFormat::Dot => picture::dot(&Picture::new(&machine, &topology, allocated.as_ref())),
        TopologyFormat::Nccl => machines::nccl_topology_file(&machine.observed),
    })?;
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
    /// The JSON of a topology.
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

/// The machine for people: title, tree, matrix, warnings; `allocated` are places of GPUs that are held.
pub(super) fn text(machine: &Machine, allocated: Option<&BTreeSet<usize>>) -> String {
    let (topology, warnings) = NodeTopology::assemble(&machine.observed);
    let mut text = format!("{}\n\n", machine.title);
    let held = |gpu: &Gpu| allocated.zip(topology.position(&gpu.uuid)).is_some_and(|(held, gpu)| held.contains(&gpu));
    let note = |gpu: &Gpu| if held(gpu) { "allocated".to_owned() } else { String::new() };
    text += &tree::tree(&machine.observed, &topology, note);
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
