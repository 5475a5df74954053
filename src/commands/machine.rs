//! Which machine a command is about: a built-in one, a file of whatever kind, or this one.

use std::path::Path;

use anyhow::{Context, Result, anyhow};

use crate::config::{HostArgs, NodeArgs};
use crate::hwloc::{self, Recorded};
use crate::machines::{self, HostXml, Loaded, Machine};
use crate::runtime;
use crate::topology::NodeObservation;

/// The machine of a command's options.
pub(super) async fn machine(node: &NodeArgs) -> Result<Machine> {
    let mut machine = match &node.node {
        Some(name) => load(name)?,
        None => this_machine(&node.host).await?,
    };
    if let Some(path) = &node.host_xml {
        let recorded = recorded(&machines::host_xml(path)?)?;
        machine.observed.host = recorded.host;
        machine.source.push("the host: hwloc XML".to_owned());
    }
    Ok(machine)
}

/// A built-in machine by its name, else the file at that path: a node file, an NCCL topology dump or a hwloc XML.
pub fn load(name_or_path: &str) -> Result<Machine> {
    match machines::read(name_or_path)? {
        Loaded::Machine(machine) => Ok(*machine),
        Loaded::Host(file) => {
            let Recorded { host, gpus } = recorded(&file)?;
            Ok(Machine {
                title: format!("{}: {} GPUs by a hwloc XML", file.name, gpus.len()),
                name: file.name,
                source: vec!["hwloc XML".to_owned()],
                reconstructed: vec![
                    "UUIDs are made from PCI addresses where hwloc has none".to_owned(),
                    "NVLinks, and what PCIe links can do, are unknown: hwloc does not record them".to_owned(),
                ],
                observed: NodeObservation { gpus, host, ..NodeObservation::default() },
            })
        }
    }
}

fn recorded(file: &HostXml) -> Result<Recorded> {
    // The file and the cause in one line, whoever prints it.
    hwloc::read_xml(&file.text).map_err(|error| anyhow!("'{}': {error}", file.path))
}

async fn this_machine(host: &HostArgs) -> Result<Machine> {
    let observed = observe(host).await.context("cannot look at this machine (--node names another)")?;
    let name = "this machine".to_owned();
    let source = vec!["NVML and hwloc, live".to_owned()];
    Ok(Machine { title: name.clone(), name, source, reconstructed: Vec::new(), observed })
}

async fn observe(host: &HostArgs) -> Result<NodeObservation> {
    let agent = runtime::agent_command(host);
    let scan = runtime::scan(&agent).await?;
    let (seen, failures) = hwloc::observe(Path::new(&host.sysfs));
    Ok(scan.node(seen, failures))
}
