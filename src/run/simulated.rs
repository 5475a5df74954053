//! A node of a simulated machine whose GPUs go through DRA: the parts that `linkwise run` starts, without NVML and the
//! host.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use anyhow::{Context, Result};
use linkwise_cluster::ApiServer;

use super::start::spawn_cdi_sync;
use super::{cdi_sync, dra};
use crate::config::settings::load_text;
use crate::config::{Environment, Flags};
use linkwise_core::state::Event;
use linkwise_kubelet::device_plugin as kubelet;
use linkwise_kubelet::dra::Handover;
use linkwise_node::node::{Node, NodeSettings};

const CONFIGURATION: &str = "version: v1\nlinkwise: {dra: {gpus: all}}\n";

/// The kubelet's folder of device plugins. This path and the next ones start at the node's folder.
pub const DEVICE_PLUGINS: &str = "device-plugins";
/// The kubelet's folder of registration sockets.
pub const REGISTRY: &str = "registry";
/// The folder of CDI specs.
pub const CDI: &str = "cdi";
/// The state folder.
pub const STATE: &str = "state";
/// The kubelet's PodResources socket.
pub const POD_RESOURCES: &str = "pod-resources/kubelet.sock";

/// Starts a node with all its folders below `folder`; the caller sends the observations.
pub async fn start_with_dra(folder: &Path, name: &str, metrics_address: SocketAddr, api: &ApiServer) -> Result<Node> {
    let at = |path: &str| folder.join(path);
    let host = at("host");
    for path in [&host, &at("plugins"), &at(STATE)] {
        fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()))?;
    }
    let mut settings = load_text(&Flags::default(), &Environment::default(), CONFIGURATION)?.settings;
    settings.kubelet_socket.value = at(DEVICE_PLUGINS).join("kubelet.sock");
    settings.pod_resources_socket.value = at(POD_RESOURCES);
    settings.dra_registry_dir.value = at(REGISTRY);
    settings.dra_plugins_dir.value = at("plugins");
    settings.cdi_dir.value = at(CDI);
    for root in
        [&mut settings.driver_root.value, &mut settings.driver_root_ctr_path.value, &mut settings.dev_root.value]
    {
        root.clone_from(&host);
    }
    let injection = cdi_sync::prepare(&settings, &host, true)?;
    let kubelet = kubelet::Settings {
        pod_resources_socket: Some(settings.pod_resources_socket.value.clone()),
        longest_pause: std::time::Duration::from_secs(1),
        ..kubelet::Settings::new(settings.kubelet_socket.value.clone())
    };
    let numa_hints = settings.numa_hints.value;
    let mut node = Node::start(NodeSettings { metrics_address, numa_hints, ..NodeSettings::new(kubelet) }).await?;
    let cdi = spawn_cdi_sync(&mut node, injection.sync);
    let (state_dir, seen) = (at(STATE), (injection.options, injection.host_devices));
    let inputs = dra::Inputs::new(&settings, name.to_owned(), &state_dir, seen, cdi, Handover::alone());
    dra::spawn_in(&mut node, inputs, Some(api));
    node.apply(Event::Planned(Box::new(settings.plan())));
    Ok(node)
}
