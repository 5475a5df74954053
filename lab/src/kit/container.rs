//! `linkwise-lab kit-container`: a command in a root folder that has what a CDI device names, and no more.
//!
//! It stands in for a container runtime where there is none. The process gets a mount namespace of its own, so that its
//! mounts end with it; as another user than root it gets a user namespace too. Beside the device's edits the root has
//! what every runtime gives (/proc, /sys, /dev/null and its like), and the kit's folder. Of CDI's hooks the links are
//! made, which need no program.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use clap::Args;
use linkwise_system::output::print;
use rustix::mount::{MountPropagationFlags, mount_bind_recursive, mount_change};
use rustix::process::{chroot, getegid, geteuid};
use rustix::thread::UnshareFlags;
use serde_json::Value;

/// The first words of the line that is printed before the command starts.
pub(super) const INSIDE: &str = "in a container with";

/// The paths that every runtime gives a container.
const OF_EVERY_RUNTIME: [&str; 7] =
    ["/proc", "/sys", "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"];

/// The arguments.
#[derive(Debug, Args)]
pub struct ContainerArgs {
    /// An empty folder, which becomes its root
    #[arg(long, value_name = "PATH")]
    root: PathBuf,
    /// A CDI spec
    #[arg(long, value_name = "FILE")]
    spec: PathBuf,
    /// The name of a device in it
    #[arg(long, value_name = "NAME")]
    device: String,
    /// The folder with the command, and its libraries in lib, at the same path
    #[arg(long, value_name = "PATH")]
    kit: PathBuf,
    /// The command; without one the container is made, and ends
    #[arg(last = true)]
    command: Vec<String>,
}

/// Runs the command in place of this process.
pub fn run(args: &ContainerArgs) -> Result<()> {
    let spec = fs::read_to_string(&args.spec).with_context(|| format!("cannot read {}", args.spec.display()))?;
    let edits = Edits::of(&spec, &args.device)?;
    isolate().context("no right to a mount namespace")?;
    let root = Root(&args.root);
    for path in OF_EVERY_RUNTIME {
        root.bind(path, path)?;
    }
    for folder in ["/tmp", "/dev/shm"] {
        fs::create_dir_all(root.at(folder))?;
    }
    let kit = args.kit.display().to_string();
    root.bind(&kit, &kit)?;
    let (mut folders, mut absent) = (vec![format!("{kit}/lib")], Vec::new());
    for (container, host) in edits.nodes.iter().chain(&edits.mounts) {
        if !Path::new(host).exists() {
            absent.push(host.as_str());
            continue;
        }
        root.bind(host, container)?;
        if let Some((folder, _)) = container.rsplit_once('/').filter(|(_, name)| name.contains(".so"))
            && !folders.iter().any(|known| known == folder)
        {
            folders.push(folder.to_owned());
        }
    }
    for (path, target) in &edits.links {
        let link = root.at(path);
        fs::create_dir_all(link.parent().unwrap_or(root.0))?;
        match symlink(target, &link) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error).context("cannot link"),
            _ => {}
        }
    }
    chroot(root.0).context("no right to another root")?;
    std::env::set_current_dir("/")?;
    let nodes: Vec<&String> = edits.nodes.keys().collect();
    print(&format!("{INSIDE} {nodes:?}, {} mounts; absent on this machine: {absent:?}\n", edits.mounts.len()))?;
    let Some((program, words)) = args.command.split_first() else { return Ok(()) };
    let mut command = Command::new(program);
    command.args(words).env_clear().envs(&edits.env).env("LD_LIBRARY_PATH", folders.join(":"));
    Err(command.exec()).with_context(|| format!("cannot start {program}"))
}

/// Enters a mount namespace whose mounts nobody else sees.
fn isolate() -> io::Result<()> {
    let (uid, gid) = (geteuid(), getegid());
    let namespaces = if uid.is_root() { UnshareFlags::NEWNS } else { UnshareFlags::NEWNS | UnshareFlags::NEWUSER };
    #[allow(deprecated, reason = "of its flags FILES breaks promises about descriptors; neither of these does")]
    rustix::thread::unshare(namespaces)?;
    if !uid.is_root() {
        fs::write("/proc/self/setgroups", "deny")?;
        fs::write("/proc/self/uid_map", format!("0 {} 1", uid.as_raw()))?;
        fs::write("/proc/self/gid_map", format!("0 {} 1", gid.as_raw()))?;
    }
    Ok(mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?)
}

struct Root<'a>(&'a Path);

impl Root<'_> {
    fn at(&self, path: &str) -> PathBuf {
        self.0.join(path.trim_start_matches('/'))
    }

    /// Mounts a file or folder of the host, with what is mounted below it.
    fn bind(&self, host: &str, container: &str) -> Result<()> {
        let target = self.at(container);
        let make = || -> io::Result<()> {
            if Path::new(host).is_dir() {
                return fs::create_dir_all(&target);
            }
            fs::create_dir_all(target.parent().unwrap_or(self.0))?;
            File::options().create(true).append(true).open(&target).map(drop)
        };
        make().with_context(|| format!("cannot make {}", target.display()))?;
        mount_bind_recursive(host, &target).with_context(|| format!("cannot mount {host}"))
    }
}

/// The edits of a CDI device, with those for all devices of its spec.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Edits {
    pub env: BTreeMap<String, String>,
    /// The host's paths of device nodes, by those in the container.
    pub nodes: BTreeMap<String, String>,
    /// The same for mounts.
    pub mounts: BTreeMap<String, String>,
    /// The targets of links, by the links' paths.
    pub links: BTreeMap<String, String>,
}

impl Edits {
    /// Reads those of a device in a spec.
    pub fn of(spec: &str, device: &str) -> Result<Self> {
        let spec: Value = serde_json::from_str(spec).context("the CDI spec is not JSON")?;
        let devices = spec["devices"].as_array().into_iter().flatten();
        let own = devices.clone().find(|other| other["name"] == device);
        let own = own.with_context(|| format!("the CDI spec has no device {device}"))?;
        let mut edits = Self::default();
        for value in [&spec["containerEdits"], &own["containerEdits"]] {
            edits.add(value);
        }
        Ok(edits)
    }

    fn add(&mut self, edits: &Value) {
        let all = |key: &str| edits[key].as_array().into_iter().flatten();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let pair = |variable: &str| {
            let (name, value) = variable.split_once('=').unwrap_or((variable, ""));
            (name.to_owned(), value.to_owned())
        };
        self.env.extend(all("env").filter_map(|variable| Some(pair(variable.as_str()?))));
        // A node without a path of the host has the same one there.
        let host = |node: &Value| text(node.get("hostPath").unwrap_or(&node["path"]));
        self.nodes.extend(all("deviceNodes").map(|node| (text(&node["path"]), host(node))));
        self.mounts.extend(all("mounts").map(|mount| (text(&mount["containerPath"]), text(&mount["hostPath"]))));
        let words = all("hooks").flat_map(|hook| hook["args"].as_array().into_iter().flatten());
        // `create-symlinks --link TARGET::LINK`; no other hook has such words.
        let links = words.filter_map(|word| word.as_str()?.split_once("::"));
        self.links.extend(links.map(|(target, link)| (link.to_owned(), target.to_owned())));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_are_those_of_the_device_and_its_spec() {
        let spec = r#"{"kind": "k/c", "devices": [
            {"name": "other", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia1"}]}},
            {"name": "own", "containerEdits":
              {"deviceNodes": [{"path": "/dev/nvidia0", "hostPath": "/d/dev/nvidia0"}]}}],
          "containerEdits": {"env": ["A=b=c"], "deviceNodes": [{"path": "/dev/nvidiactl"}],
            "mounts": [{"hostPath": "/d/lib.so.1", "containerPath": "/lib.so.1"}],
            "hooks": [{"args":
              ["nvidia-cdi-hook", "create-symlinks", "--link", "libcuda.so.1::/usr/lib/libcuda.so"]}]}}"#;
        let edits = Edits::of(spec, "own").unwrap();
        let pairs =
            |of: &BTreeMap<String, String>| of.clone().into_iter().map(|(a, b)| format!("{a}<{b}")).collect::<Vec<_>>();
        assert_eq!(pairs(&edits.nodes), ["/dev/nvidia0</d/dev/nvidia0", "/dev/nvidiactl</dev/nvidiactl"]);
        assert_eq!(pairs(&edits.mounts), ["/lib.so.1</d/lib.so.1"]);
        assert_eq!(pairs(&edits.links), ["/usr/lib/libcuda.so<libcuda.so.1"]);
        assert_eq!(pairs(&edits.env), ["A<b=c"]);
        assert!(Edits::of(spec, "none").is_err() && Edits::of("x", "own").is_err());
    }
}
