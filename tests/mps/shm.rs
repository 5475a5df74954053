//! Tests of the shared memory of MPS clients, with a stand-in for mount(8) that notes its arguments.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use linkwise_host::mps::{Layout, Shm, mount_shm};
use tempfile::TempDir;
use tokio::process::Command;

fn fake_mount() -> TempDir {
    let bin = tempfile::tempdir().unwrap();
    let program = bin.path().join("mount");
    fs::write(&program, format!("#!/bin/sh\necho \"$@\" > {}\n", bin.path().join("noted").display())).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    bin
}

fn noted(bin: &TempDir) -> String {
    fs::read_to_string(bin.path().join("noted")).unwrap_or_default().trim().to_owned()
}

/// Mounts the shared memory below `root` as on a machine with this memory; returns the outcome and mount's arguments.
async fn with_memory(root: &Path, kib: Option<u64>) -> (Shm, String) {
    let bin = fake_mount();
    let meminfo = bin.path().join("meminfo");
    if let Some(kib) = kib {
        fs::write(&meminfo, format!("MemTotal: {kib:>14} kB\nMemFree: 7 kB\n")).unwrap();
    }
    let done = mount_shm(&Layout::new(root), &meminfo, &bin.path().join("mount")).await.unwrap();
    (done, noted(&bin))
}

#[tokio::test]
async fn shared_memory_is_half_of_the_machines_memory() {
    let (root, bin) = (tempfile::tempdir().unwrap(), fake_mount());
    let mut command = Command::new(env!("CARGO_BIN_EXE_linkwise"));
    command.args(["mps-control-daemon", "mount-shm", "--mps-container-root"]).arg(root.path());
    let output = command.env("PATH", format!("{}:/usr/bin:/bin", bin.path().display())).output().await.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
    let total: u64 = meminfo.split_whitespace().nth(1).unwrap().parse().unwrap();
    let path = root.path().join("shm");
    let expected = format!("-t tmpfs -o rw,nosuid,nodev,noexec,relatime,size={}k shm {}", total / 2, path.display());
    assert_eq!(noted(&bin), expected);
    assert!(path.is_dir());
    // If the machine's memory is unknown, the size is the default of container runtimes.
    let (done, asked) = with_memory(root.path(), None).await;
    assert!(done == Shm::Mounted && asked.contains(",size=65536k "), "{asked}");
}

#[tokio::test]
async fn smaller_shared_memory_grows_and_larger_stays() {
    // The machine's own /dev/shm stands in for one that an earlier process mounted.
    let dev = Path::new("/dev");
    let device = |path: &Path| fs::metadata(path).unwrap().dev();
    if device(&dev.join("shm")) == device(dev) {
        println!("skipped: nothing is mounted at /dev/shm");
        return;
    }
    let output = Command::new("df").args(["-k", "--output=size", "/dev/shm"]).output().await.unwrap();
    let size: u64 = String::from_utf8(output.stdout).unwrap().lines().nth(1).unwrap().trim().parse().unwrap();
    assert_eq!(with_memory(dev, Some(size)).await, (Shm::Kept, String::new()));
    assert_eq!(with_memory(dev, Some(size * 2)).await, (Shm::Kept, String::new()));
    let grown = format!("-t tmpfs -o remount,rw,nosuid,nodev,noexec,relatime,size={}k shm /dev/shm", size * 2);
    assert_eq!(with_memory(dev, Some(size * 4)).await, (Shm::Grown, grown));
    // A file system that linkwise did not mount is left alone.
    let root = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("/proc", root.path().join("shm")).unwrap();
    assert_eq!(with_memory(root.path(), Some(size * 4)).await, (Shm::Kept, String::new()));
}
