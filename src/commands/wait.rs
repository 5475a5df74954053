//! `linkwise wait`: waits until the kubelet has devices of linkwise, or linkwise's DRA driver listens.
//!
//! The command is for `helm test` and for scripts, and runs outside of linkwise's pod. It needs only the kubelet's
//! folders: no GPU, no driver, no API server. It changes nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};
use tokio::time::{Instant, sleep_until};

use super::doctor::resource_of_socket;
use super::{Progress, print};
use crate::config::WaitArgs;
use linkwise_core::quote;
use linkwise_kubelet::device_plugin::{pod_resources, probe};
use linkwise_kubelet::dra::is_registration_socket;
use linkwise_system::uds;

/// The longest time for the answer of one socket.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// The time from one attempt to the next.
const ATTEMPT_INTERVAL: Duration = Duration::from_millis(500);

/// Runs the command.
pub async fn wait(args: &WaitArgs) -> Result<()> {
    let node = quote::one_line(&args.node_name);
    let _progress = Progress::start("waiting for linkwise and the kubelet");
    let end = Instant::now() + Duration::from_secs(args.timeout);
    loop {
        let next = Instant::now() + ATTEMPT_INTERVAL;
        match served(args).await {
            Ok(all) => {
                let lines: Vec<String> = all.iter().map(|what| format!("{node}: linkwise serves {what}\n")).collect();
                return Ok(print(&lines.concat())?);
            }
            Err(why) if next >= end => bail!("{node} is not served after {} s: {why}", args.timeout),
            Err(_) => sleep_until(next).await,
        }
    }
}

/// A line for each resource that linkwise serves to this kubelet, and one for claims; otherwise why there is none.
async fn served(args: &WaitArgs) -> Result<Vec<String>, String> {
    let folder = args.kubelet_socket.parent().unwrap_or(Path::new("/"));
    let files = files(folder).map_err(|error| {
        format!("cannot read {}: {error}; set kubeletRootDir to the kubelet's --root-dir", folder.display())
    })?;
    let mut resources = BTreeSet::new();
    let mut silent = None;
    for (name, path) in files {
        let Some(resource) = resource_of_socket(&name) else { continue };
        match probe(&path, ANSWER_TIMEOUT).await {
            Ok(()) => drop(resources.insert(resource)),
            Err(error) => silent = Some(format!("{name} does not answer: {}", linkwise_core::errors::chain(&error))),
        }
    }
    let mut served = claims(&args.dra_registry_dir).await;
    if resources.is_empty() && served.is_empty() {
        return Err(silent.unwrap_or_else(|| {
            "linkwise offers nothing here: it has no pod on this node, has not started yet, or found no GPU that it \
             can use; read the log of its pod on this node"
                .to_owned()
        }));
    }
    let stock = match resources.is_empty() {
        true => BTreeMap::new(),
        false => pod_resources::stock(&args.pod_resources_socket)
            .await
            .ok_or_else(|| format!("the kubelet does not answer on {}", args.pod_resources_socket.display()))?,
    };
    let mut missing = None;
    for resource in resources {
        match stock.get(&resource) {
            Some(stock) => served.push(format!("{resource}: {} healthy, {} held by pods", stock.devices, stock.held)),
            None => missing = Some(resource),
        }
    }
    match missing {
        // All devices are unhealthy, or not yet registered; another resource may still be served.
        Some(resource) if served.is_empty() => Err(format!(
            "linkwise runs, but the kubelet has no healthy device of {resource}; run `linkwise doctor` in its pod"
        )),
        _ => Ok(served),
    }
}

/// A line about the DRA driver, if its registration socket takes a connection.
async fn claims(folder: &Path) -> Vec<String> {
    let files = files(folder).unwrap_or_default().into_iter();
    for (_, path) in files.filter(|(name, _)| is_registration_socket(name)) {
        if let Ok(Ok(_)) = tokio::time::timeout(ANSWER_TIMEOUT, uds::connect(&path)).await {
            return vec!["claims, by its DRA driver".to_owned()];
        }
    }
    Vec::new()
}

/// The files of a folder by name. Names that are not UTF-8 are left out, because linkwise makes none.
fn files(folder: &Path) -> std::io::Result<BTreeMap<String, PathBuf>> {
    let entries = std::fs::read_dir(folder)?.flatten();
    Ok(entries.filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path()))).collect())
}
