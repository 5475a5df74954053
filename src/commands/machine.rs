//! The machine that a command is about: a built-in one, a file of any kind, or this one.

use std::path::Path;

use anyhow::{Context, Result};

use super::Progress;
use crate::config::{HostArgs, NodeArgs};
use crate::run;
use linkwise_host::hwloc;
use linkwise_host::machines::{self, Machine, VERSION};
use linkwise_nvml::supervisor;

/// The machine of a command's options.
pub(super) async fn machine(node: &NodeArgs) -> Result<Machine> {
    let mut machine = match &node.node {
        Some(name) => machines::load(name)?,
        None => this_machine(&node.host).await?,
    };
    if let Some(path) = &node.host_xml {
        machine.observed.host = machines::host_xml(path)?;
        machine.source.push("the host: hwloc XML".to_owned());
    }
    Ok(machine)
}

async fn this_machine(host: &HostArgs) -> Result<Machine> {
    let _progress = Progress::start("reading this machine");
    let scan = supervisor::scan(&run::agent_command(host)).await;
    let scan = scan.context("cannot look at this machine (--node names another)")?;
    let (seen, failures) = hwloc::observe(Path::new(&host.sysfs));
    let name = "this machine".to_owned();
    let source = vec!["NVML and hwloc, live".to_owned()];
    let observed = scan.node(seen, failures);
    Ok(Machine { version: VERSION, title: name.clone(), name, source, reconstructed: Vec::new(), observed })
}
