//! `linkwise-lab kit-container`: runs a command in a root folder with the files of CDI devices.
//!
//! It stands in for a container runtime on a machine without one. The process gets a mount namespace of its own, so
//! that its mounts end with it. A user other than root gets a user namespace too. Besides the edits of the CDI devices,
//! the root has the paths that every runtime gives (/proc, /sys, /dev/null and the like) and the kit's folder. Of
//! CDI's hooks it carries out only `create-symlinks`, which needs no program here.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Error, Result};
use clap::Args;
use linkwise_kubelet_box::runtime;
use linkwise_system::output::print;
use rustix::mount::{MountPropagationFlags, mount_bind_recursive, mount_change};
use rustix::process::{chroot, getegid, geteuid};
use rustix::thread::UnshareFlags;

/// The first words of the line that is printed before the command starts.
pub(super) const INSIDE: &str = "in a container with";

/// The paths that every runtime gives a container.
const RUNTIME_PATHS: [&str; 7] =
    ["/proc", "/sys", "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"];

/// The arguments.
#[derive(Debug, Args)]
pub struct ContainerArgs {
    /// An empty folder, which becomes the container's root
    #[arg(long, value_name = "PATH")]
    root: PathBuf,
    /// The folder of CDI specs
    #[arg(long, value_name = "PATH")]
    cdi: PathBuf,
    /// The full name of a CDI device
    #[arg(long, value_name = "NAME")]
    device: Vec<String>,
    /// The folder with the command and, in lib, its libraries; the container gets it at the same path
    #[arg(long, value_name = "PATH")]
    kit: PathBuf,
    /// The command; without one the container ends once it is made
    #[arg(last = true)]
    command: Vec<String>,
}

/// Runs the command in place of this process.
pub fn run(args: &ContainerArgs) -> Result<()> {
    let edits = runtime::container(&args.cdi, &args.device).map_err(Error::msg)?;
    isolate().context("no right to a mount namespace")?;
    let root = Root(&args.root);
    for path in RUNTIME_PATHS {
        root.bind(path, path)?;
    }
    for folder in ["/tmp", "/dev/shm"] {
        fs::create_dir_all(root.at(folder))?;
    }
    let kit = args.kit.display().to_string();
    root.bind(&kit, &kit)?;
    let (mut folders, mut absent) = (vec![format!("{kit}/lib")], Vec::new());
    for (container, host) in edits.hosts.iter().chain(&edits.mounts) {
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
    let nodes: Vec<&String> = edits.hosts.keys().collect();
    print(&format!("{INSIDE} {nodes:?}, {} mounts; absent on this machine: {absent:?}\n", edits.mounts.len()))?;
    let Some((program, words)) = args.command.split_first() else { return Ok(()) };
    let mut command = Command::new(program);
    command.args(words).env_clear().envs(&edits.env).env("LD_LIBRARY_PATH", folders.join(":"));
    Err(command.exec()).with_context(|| format!("cannot start {program}"))
}

/// Enters a mount namespace of its own, so that no other process sees its mounts.
fn isolate() -> io::Result<()> {
    let (uid, gid) = (geteuid(), getegid());
    let namespaces = if uid.is_root() { UnshareFlags::NEWNS } else { UnshareFlags::NEWNS | UnshareFlags::NEWUSER };
    #[allow(deprecated, reason = "only its flag FILES is unsound: it breaks promises about file descriptors")]
    rustix::thread::unshare(namespaces)?;
    if !uid.is_root() {
        fs::write("/proc/self/setgroups", "deny")?;
        fs::write("/proc/self/uid_map", format!("0 {} 1", uid.as_raw()))?;
        fs::write("/proc/self/gid_map", format!("0 {} 1", gid.as_raw()))?;
    }
    Ok(mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?)
}

/// The folder that becomes the container's root.
struct Root<'a>(&'a Path);

impl Root<'_> {
    fn at(&self, path: &str) -> PathBuf {
        self.0.join(path.trim_start_matches('/'))
    }

    /// Mounts a file or folder of the host, together with the mounts below it.
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
