//! Checks the kubelet's folder and the listeners in it: the kubelet, linkwise, other plugins.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::blocking;
use super::finding::Findings;
use linkwise_core::errors::chain;
use linkwise_kubelet::device_plugin::{self as kubelet, ProbeError};

/// The longest time for an answer of a listener.
const ANSWER: Duration = Duration::from_secs(2);

/// The first part of the names of NVIDIA's own device plugin's sockets: nvidia-gpu.sock, nvidia-mig-1g.10gb.sock.
const NVIDIA: &str = "nvidia-";
/// The first part of the names of our sockets. `RESOURCE-NUMBER.sock` follows, with `_` for the resource's `/`.
const OURS: &str = "linkwise-";

/// Checks the folder of the kubelet's socket, and the folders beside it.
pub(super) async fn check(found: &mut Findings, socket: &Path, resources: &Path, limit: Duration) {
    found.check = "kubelet";
    let Some(folder) = socket.parent().filter(|folder| !folder.as_os_str().is_empty()) else {
        return found.failed(format!("'{}' is no path of a kubelet socket", socket.display()), "see --kubelet-socket");
    };
    let (at, own) = (folder.to_owned(), socket.to_owned());
    let Some(sockets) = blocking(limit, move || sockets(&at, &own)).await else {
        return super::hangs(found, limit);
    };
    let sockets = match sockets {
        Ok(sockets) => sockets,
        Err(error) => {
            let advice = match error.kind() {
                ErrorKind::NotFound => {
                    "the kubelet does not run here, has another --root-dir (see --kubelet-socket), or its folder is not mounted"
                }
                _ => {
                    "linkwise needs uid 0 and this folder mounted for reading and writing; under SELinux see manifests/README.md"
                }
            };
            return found.failed(format!("{}: {error}", folder.display()), advice);
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
            Some("not needed; where it is mounted it confirms registrations and tells which devices pods hold"),
        ),
    }
    plugins(found, sockets).await;
}

/// The sockets in the folder except the kubelet's, after a check that the folder can be written to.
fn sockets(folder: &Path, kubelet: &Path) -> std::io::Result<Vec<PathBuf>> {
    // The file has no name, so that it causes no event for programs that watch the folder.
    drop(tempfile::tempfile_in(folder)?);
    let paths = std::fs::read_dir(folder)?.flatten().map(|entry| entry.path()).filter(|path| path != kubelet);
    let mut sockets: Vec<PathBuf> = paths.filter(|path| is_socket(path)).collect();
    sockets.sort();
    Ok(sockets)
}

/// Checks that a process answers; otherwise returns the reason and the remedy.
async fn answers(socket: &Path) -> Result<(), (String, &'static str)> {
    // A connection alone is no evidence: the kernel accepts it for a process that hangs, too.
    match kubelet::probe(socket, ANSWER).await {
        // A kubelet serves another API there, and refuses the call.
        Ok(()) | Err(ProbeError::Stranger) => Ok(()),
        Err(ProbeError::Connect(error)) => Err(match error.kind() {
            ErrorKind::NotFound => (
                "there is none".to_owned(),
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

/// Reports other listeners in the folder.
async fn plugins(found: &mut Findings, sockets: Vec<PathBuf>) {
    found.check = "plugins";
    let (mut ours, mut others) = (BTreeMap::<String, Vec<String>>::new(), Vec::new());
    for path in sockets {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        match (kubelet::probe(&path, ANSWER).await, name) {
            (Ok(()), name) if name.starts_with(NVIDIA) => found.failed(
                format!("the NVIDIA device plugin serves {name}"),
                "both register nvidia.com/gpu, and the kubelet keeps one of them: take the NVIDIA plugin off this node",
            ),
            (Ok(()), name) => match resource(&name) {
                Some(resource) => ours.entry(resource).or_default().push(name),
                None => others.push(name),
            },
            (Err(error), name) if error.is_dead() && name.starts_with(OURS) => found.warning(
                format!("{name} was left by a linkwise that is gone"),
                "nothing to do: the next linkwise removes it",
            ),
            // The kubelet removes them all when it starts.
            (Err(error), _) if error.is_dead() => {}
            (Err(ProbeError::Connect(error)), _) if error.kind() == ErrorKind::NotFound => {}
            (Err(error @ ProbeError::Silent(_)), name) => found.warning(
                format!("{name}: {error}"),
                "a plugin that hangs: restart its pod; the kubelet waits for it while pods are admitted",
            ),
            (Err(error), name) => found.warning(
                format!("{name}: {}", chain(&error)),
                "whatever it is, it does not belong into the kubelet's folder, or not to a device plugin that works",
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
                "the kubelet keeps one of them: is the DaemonSet deployed twice? (while a pod is replaced this is so for a moment)",
            ),
        }
    }
    if !others.is_empty() {
        let others = others.join(", ");
        found.ok(format!(
            "other plugins: {others} (their resources are unknown here: none of them may be one of linkwise's)"
        ));
    }
}

/// The resource of one of our sockets; of a very long name, the part that fits into a path.
pub(in crate::commands) fn resource(socket: &str) -> Option<String> {
    let (resource, _) = socket.strip_prefix(OURS)?.strip_suffix(".sock")?.rsplit_once('-')?;
    Some(resource.replacen('_', "/", 1))
}
