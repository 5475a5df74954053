//! Checks the kubelet's folder and the listeners in it (the kubelet, linkwise, other plugins), and predicts what the
//! kubelet's Topology Manager does with this node's GPUs.
//!
//! The Topology Manager's policy is read where this process can see it: in the command line of a running kubelet, in
//! its configuration file, or in the folder of files that add to it.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use super::{Findings, blocking, entries};
use linkwise_core::errors::chain;
use linkwise_core::quote::excerpt;
use linkwise_core::state::NumaHints;
use linkwise_core::topology::{NodeObservation, NodeTopology, NumaNodeId};
use linkwise_core::words::count;
use linkwise_kubelet::device_plugin::{self as kubelet, ProbeError};

/// The longest time for an answer of a listener.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// The oldest kubelet that can call a plugin of ours, as its major and minor version.
const OLDEST: (u32, u32) = (1, 26);

/// The first part of the names of NVIDIA's own device plugin's sockets: nvidia-gpu.sock, nvidia-mig-1g.10gb.sock.
const NVIDIA: &str = "nvidia-";
/// The first part of the names of our sockets. `RESOURCE-NUMBER.sock` follows, with `_` for the resource's `/`.
const OURS: &str = "linkwise-";

/// Checks the folder of the kubelet's socket, the kubelet's two sockets, and the plugins in the folder.
pub(super) async fn check(found: &mut Findings, socket: &Path, resources: &Path, limit: Duration) {
    found.check = "kubelet";
    let Some(folder) = socket.parent().filter(|folder| !folder.as_os_str().is_empty()) else {
        return found
            .failed(format!("'{}' is not the path of a kubelet socket", socket.display()), "see --kubelet-socket");
    };
    let (at, own) = (folder.to_owned(), socket.to_owned());
    let Some(sockets) = blocking(limit, move || sockets(&at, &own)).await else {
        return super::add_hang(found, limit);
    };
    let sockets = match sockets {
        Ok(sockets) => sockets,
        Err(error) => {
            let advice = match error.kind() {
                ErrorKind::NotFound => {
                    "the kubelet does not run here, or its folder is elsewhere or not mounted: see --kubelet-socket"
                }
                _ => "run as uid 0 with this folder mounted read-write; under SELinux see manifests/README.md",
            };
            return found.failed(format!("cannot use {}: {error}", folder.display()), advice);
        }
    };
    found.ok(format!("{} can be written to", folder.display()));
    match answers(socket).await {
        Ok(()) => found.ok(format!("{} answers", socket.display())),
        Err((why, advice)) => found.failed(format!("{}: {why}", socket.display()), advice),
    }
    match answers(resources).await {
        Ok(()) => found.ok(format!("{} answers", resources.display())),
        Err((why, _)) => found.skipped(
            format!("{}: {why}", resources.display()),
            Some("not needed; if it is mounted, it confirms registrations and reports which devices pods hold"),
        ),
    }
    plugins(found, sockets).await;
}

/// Reports a kubelet that is too old.
pub(super) fn version(found: &mut Findings, version: Option<&str>) {
    found.check = "kubelet";
    let mut parts = version.unwrap_or_default().trim_start_matches('v').split('.').map(str::parse::<u32>);
    if let Some(version) = version
        && let (Some(Ok(major)), Some(Ok(minor))) = (parts.next(), parts.next())
        && (major, minor) < OLDEST
    {
        let (major, minor) = OLDEST;
        let advice = format!(
            "upgrade the node to Kubernetes {major}.{minor} or newer, and keep the NVIDIA plugin on it until then"
        );
        found.failed(format!("the kubelet is {}, which cannot call linkwise", excerpt(version)), &advice);
    }
}

/// The sockets in the folder except the kubelet's, after a check that the folder can be written to.
fn sockets(folder: &Path, kubelet: &Path) -> std::io::Result<Vec<PathBuf>> {
    // The file has no name, so that it causes no event for programs that watch the folder.
    drop(tempfile::tempfile_in(folder)?);
    Ok(entries(folder)?.into_iter().filter(|path| path != kubelet && is_socket(path)).collect())
}

/// Checks that a process answers; otherwise returns the reason and the remedy.
async fn answers(socket: &Path) -> Result<(), (String, &'static str)> {
    // A connection alone is no evidence: the kernel accepts it for a process that hangs, too.
    match kubelet::probe(socket, ANSWER_TIMEOUT).await {
        // A kubelet serves another API there, and refuses the call.
        Ok(()) | Err(ProbeError::Stranger) => Ok(()),
        Err(ProbeError::Connect(error)) => Err(match error.kind() {
            ErrorKind::NotFound => (
                "does not exist".to_owned(),
                "the kubelet does not run, or has another --root-dir: see --kubelet-socket",
            ),
            ErrorKind::ConnectionRefused if !is_socket(socket) => {
                ("is not a socket".to_owned(), "remove it on the host and restart the kubelet")
            }
            ErrorKind::ConnectionRefused => {
                ("no process listens on it".to_owned(), "the kubelet has ended: systemctl status kubelet on the host")
            }
            ErrorKind::PermissionDenied => (error.to_string(), "run as uid 0; under SELinux see manifests/README.md"),
            _ => (error.to_string(), "journalctl -u kubelet on the host has the cause"),
        }),
        Err(error @ ProbeError::Silent(_)) => {
            Err((error.to_string(), "the kubelet hangs: journalctl -u kubelet on the host"))
        }
    }
}

fn is_socket(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.file_type().is_socket())
}

/// Reports the device plugins that listen in the folder.
async fn plugins(found: &mut Findings, sockets: Vec<PathBuf>) {
    found.check = "plugins";
    let (mut ours, mut others) = (BTreeMap::<String, Vec<String>>::new(), Vec::new());
    for path in sockets {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        match (kubelet::probe(&path, ANSWER_TIMEOUT).await, name) {
            (Ok(()), name) if name.starts_with(NVIDIA) => found.failed(
                format!("the NVIDIA device plugin serves {name}"),
                "both register nvidia.com/gpu, and the kubelet keeps one: remove the NVIDIA plugin from this node",
            ),
            (Ok(()), name) => match resource(&name) {
                Some(resource) => ours.entry(resource).or_default().push(name),
                None => others.push(name),
            },
            (Err(error), name) if error.is_dead() && name.starts_with(OURS) => found.warning(
                format!("{name} was left by a linkwise that has ended"),
                "nothing to do: the next linkwise removes it",
            ),
            // The kubelet removes all sockets when it starts.
            (Err(error), _) if error.is_dead() => {}
            (Err(ProbeError::Connect(error)), _) if error.kind() == ErrorKind::NotFound => {}
            (Err(error @ ProbeError::Silent(_)), name) => found.warning(
                format!("{name}: {error}"),
                "the plugin hangs: restart its pod; the kubelet waits for the plugin while it admits pods",
            ),
            (Err(error), name) => found.warning(
                format!("{name}: {}", chain(&error)),
                "only sockets of working device plugins belong here: find the socket's program, or remove the socket",
            ),
        }
    }
    if ours.is_empty() {
        found.skipped("linkwise does not serve nvidia.com/gpu here now", None);
    }
    for (resource, sockets) in ours {
        match sockets.as_slice() {
            [one] => found.ok(format!("linkwise serves {one}")),
            several => found.warning(
                format!("{} linkwise serve {resource}: {}", several.len(), several.join(", ")),
                "the kubelet keeps one of them: deploy one DaemonSet only (while a pod is replaced, two serve)",
            ),
        }
    }
    if !others.is_empty() {
        let others = others.join(", ");
        found.ok(format!("other plugins: {others} (their resources are unknown here, and must not be linkwise's)"));
    }
}

/// The resource of one of our sockets; of a very long name, the part that fits into a path.
pub(in crate::commands) fn resource(socket: &str) -> Option<String> {
    let (resource, _) = socket.strip_prefix(OURS)?.strip_suffix(".sock")?.rsplit_once('-')?;
    Some(resource.replacen('_', "/", 1))
}

/// The path of the kubelet's configuration with kubeadm and most distributions.
const CONFIG: &str = "/var/lib/kubelet/config.yaml";

/// The kubelet's Topology Manager policy.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Policy {
    /// The kubelet's name for it, such as `single-numa-node`.
    pub name: String,
    /// The path of a file, or `the kubelet's command line`.
    pub source: String,
}

/// The part of a KubeletConfiguration that counts here.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Config {
    topology_manager_policy: Option<String>,
}

/// The policy of the kubelet whose host's files are below `root`; `None` if no flag names it and no configuration can
/// be read.
pub(super) fn policy(root: &Path) -> Option<Policy> {
    let words = command_line(root).unwrap_or_default();
    if let Some(name) = flag(&words, "topology-manager-policy") {
        return Some(Policy { name, source: "the kubelet's command line".to_owned() });
    }
    let file = flag(&words, "config").unwrap_or_else(|| CONFIG.to_owned());
    // The folder's files add to the first file, in the order of their names: the last one that names a policy counts.
    let mut files = vec![super::below(root, &file)];
    let folder = flag(&words, "config-dir").map(|folder| super::below(root, &folder));
    let more = folder.and_then(|folder| entries(&folder).ok()).unwrap_or_default();
    files.extend(more.into_iter().filter(|path| path.extension() == Some(OsStr::new("conf"))));
    let mut policy = None;
    for path in files {
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        let Ok(Config { topology_manager_policy: named }) = serde_saphyr::from_str(&text) else { continue };
        if named.is_some() || policy.is_none() {
            let name = named.filter(|name| !name.is_empty()).unwrap_or_else(|| "none".to_owned());
            policy = Some(Policy { name, source: path.display().to_string() });
        }
    }
    policy
}

fn command_line(root: &Path) -> Option<Vec<String>> {
    let processes = std::fs::read_dir(root.join("proc")).ok()?.flatten().map(|entry| entry.path());
    let is_kubelet = |path: &PathBuf| std::fs::read(path.join("comm")).is_ok_and(|name| name == b"kubelet\n");
    let words = processes.filter(is_kubelet).find_map(|path| std::fs::read(path.join("cmdline")).ok())?;
    Some(words.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect())
}

/// The value of a flag, as `--flag=value` or `--flag value`; the last one counts.
fn flag(words: &[String], name: &str) -> Option<String> {
    let mut rest = words.iter();
    let mut value = None;
    while let Some(word) = rest.next() {
        let Some(flag) = word.strip_prefix("--").or_else(|| word.strip_prefix('-')) else { continue };
        match flag.split_once('=') {
            Some((flag, text)) if flag == name => value = Some(text.to_owned()),
            None if flag == name => value = rest.next().cloned(),
            _ => {}
        }
    }
    value
}

/// The most NUMA nodes with which a kubelet starts under a policy other than none (pkg/kubelet/cm/topologymanager,
/// maxAllowableNUMANodes).
const MAX_NODES: usize = 8;

/// The numbers of GPUs that pods usually request, besides one.
const USUAL_SIZES: [usize; 3] = [2, 4, 8];

/// Checks if the Topology Manager can align this node's GPUs, by their NUMA nodes and packages.
pub(super) fn topology_manager(
    found: &mut Findings,
    observed: &NodeObservation,
    topology: &NodeTopology,
    (hints, policy): (NumaHints, Option<&Policy>),
) {
    found.check = "topology manager";
    let gpus = topology.gpus();
    if gpus.is_empty() {
        return found.skipped("no GPU is known: nothing to align", None);
    }
    let all = count(gpus.len(), "GPU");
    let nodes = observed.host.numa_nodes.len();
    let without = observed.host.numa_nodes.iter().filter(|node| node.cpus.is_empty()).count();
    if nodes > MAX_NODES {
        found.warning(
            format!(
                "{nodes} NUMA nodes, {without} of them without CPUs: more than the {MAX_NODES} that a kubelet aligns"
            ),
            "run the kubelet with --topology-manager-policy=none: under another policy it does not start",
        );
    } else {
        found.ok(format!("{}, {without} of them without CPUs", count(nodes, "NUMA node")));
    }
    if let Some(policy) = policy {
        check_policy(found, policy, topology, hints);
    }
    let unknown = gpus.iter().filter(|gpu| gpu.numa.is_none()).count();
    if unknown == gpus.len() {
        found.ok("no GPU has a NUMA node (-1): the Topology Manager leaves GPUs to linkwise");
    }
    if hints == NumaHints::Off {
        return;
    }
    if (1..gpus.len()).contains(&unknown) {
        let advice = "the Topology Manager never counts these as aligned, and uses them last: set --numa-hints=off";
        found.warning(format!("{unknown} of {all} have no NUMA node (-1)"), advice);
    }
    // NVML may report a node that this host does not list: a container or a virtual machine may see only a part of the
    // nodes.
    let listed = |id| observed.host.numa_nodes.iter().any(|node| node.id == id);
    let unlisted: Vec<_> = gpus.iter().filter_map(|gpu| gpu.numa).filter(|id| !listed(*id)).collect();
    let silent =
        gpus.iter().filter(|gpu| gpu.numa.is_some_and(listed) && hints.nodes(topology, gpu).is_empty()).count();
    if let Some(node) = unlisted.first() {
        let some = unlisted.len();
        found.warning(
            format!("{some} of {all} are on NUMA nodes unknown to this host (such as {node}), and give no hint"),
            "NVML reports more NUMA nodes than are visible here: mount the host's /sys, or set --numa-hints=off",
        );
    }
    if silent > 0 {
        let advice = "set --numa-hints=package, or off";
        found.warning(format!("{silent} of {all} are on NUMA nodes without CPUs, and give no hint"), advice);
    }
    if hints == NumaHints::Node && has_gpus_on_several_nodes_of_a_package(topology) {
        found.warning(
            "packages have several NUMA nodes with CPUs, and GPUs on more than one of them",
            "under a policy other than none set --numa-hints=package, or pods of several GPUs are spread or refused \
             (docs/topology-manager.md)",
        );
    }
}

/// Reports usual requests that the kubelet's policy never admits. Only single-numa-node refuses for ever: restricted
/// admits a request on as few NUMA nodes as the request needs on an idle machine, even if these are several.
fn check_policy(found: &mut Findings, Policy { name, source }: &Policy, topology: &NodeTopology, hints: NumaHints) {
    found.ok(format!("the kubelet's policy is {} ({source})", excerpt(name)));
    let mut on_node: BTreeMap<NumaNodeId, usize> = BTreeMap::new();
    for node in topology.gpus().iter().flat_map(|gpu| hints.nodes(topology, gpu)) {
        *on_node.entry(node).or_default() += 1;
    }
    // If no GPU names a node, the Topology Manager does not constrain GPUs.
    let Some(largest) = on_node.into_values().max().filter(|_| name == "single-numa-node") else { return };
    let refused = USUAL_SIZES.into_iter().filter(|size| (largest + 1..=topology.gpus().len()).contains(size));
    let refused: Vec<String> = refused.map(|size| size.to_string()).collect();
    if !refused.is_empty() {
        let (sizes, largest) = (refused.join(" or "), count(largest, "GPU"));
        found.warning(
            format!("{name} never admits a pod of {sizes} GPUs here: no NUMA node has more than {largest}"),
            "run the kubelet with --topology-manager-policy=restricted or best-effort, or set --numa-hints=off \
             (docs/topology-manager.md), or keep such pods off this node",
        );
    }
}

/// Returns true if GPUs of one package are on more than one of its NUMA nodes.
fn has_gpus_on_several_nodes_of_a_package(topology: &NodeTopology) -> bool {
    let places: Vec<_> = topology.gpus().iter().filter_map(|gpu| Some((gpu.package?, gpu.cpu_node?))).collect();
    places.iter().any(|(package, node)| places.iter().any(|(other, another)| package == other && node != another))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// The policy of a host with these files, and its source.
    fn read(files: &[(&str, &str)]) -> Option<(String, String)> {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let root = root.path();
        policy(root).map(|Policy { name, source }| (name, source.replace(&root.display().to_string(), "ROOT")))
    }

    #[test]
    fn policy_is_read_from_flags_before_files() {
        let is = |name: &str, source: &str| Some((name.to_owned(), source.to_owned()));
        assert_eq!(read(&[]), None);
        let default =
            ("var/lib/kubelet/config.yaml", "kind: KubeletConfiguration\ntopologyManagerPolicy: restricted\n");
        assert_eq!(read(&[default]), is("restricted", "ROOT/var/lib/kubelet/config.yaml"));
        let silent = ("var/lib/kubelet/config.yaml", "kind: KubeletConfiguration\n");
        assert_eq!(read(&[silent]), is("none", "ROOT/var/lib/kubelet/config.yaml"));
        assert_eq!(read(&[("var/lib/kubelet/config.yaml", "topologyManagerPolicy: [\n")]), None);

        let other = ("proc/7/comm", "systemd\n");
        let named = ("proc/42/comm", "kubelet\n");
        let flags =
            ("proc/42/cmdline", "/usr/bin/kubelet\0--topology-manager-policy\0best-effort\0--config=/etc/k.yaml\0");
        assert_eq!(read(&[default, other, named, flags]), is("best-effort", "the kubelet's command line"));
        let config = ("proc/42/cmdline", "kubelet\0--config=/etc/k.yaml\0--config-dir=/etc/k.d\0");
        let file = ("etc/k.yaml", "topologyManagerPolicy: single-numa-node\n");
        assert_eq!(read(&[default, named, config, file]), is("single-numa-node", "ROOT/etc/k.yaml"));
        let drop_ins = [("etc/k.d/20.conf", "a: 1\n"), ("etc/k.d/10.conf", "topologyManagerPolicy: restricted\n")];
        let ignored = ("etc/k.d/30.yaml", "topologyManagerPolicy: none\n");
        let all = [&[default, named, config, file, ignored], &drop_ins[..]].concat();
        assert_eq!(read(&all), is("restricted", "ROOT/etc/k.d/10.conf"));
    }
}
