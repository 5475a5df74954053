//! The driver's other files for containers: programs, firmware, configuration, sockets. Reads folders below the driver
//! root.
//!
//! Which files those are: `pkg/nvcdi/driver-nvml.go`, `internal/discover/graphics.go` and `internal/discover/ipc.go` of
//! NVIDIA/nvidia-container-toolkit.

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;

use super::description::{DriverFiles, Socket};
use super::libraries::Found;

/// Where programs are, relative to the driver root.
const PROGRAM_FOLDERS: [&str; 6] = ["usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin", "sbin", "bin"];

/// The driver's programs.
const PROGRAMS: [&str; 5] =
    ["nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"];

/// Where the kernel looks for firmware, without the folders that an operator names.
const FIRMWARE_FOLDERS: [&str; 2] = ["lib/firmware/updates/nvidia", "lib/firmware/nvidia"];

/// What OpenGL, Vulkan and OptiX read to find the driver.
const CONFIGURATION: [&str; 9] = [
    "usr/share/glvnd/egl_vendor.d/10_nvidia.json",
    "usr/share/egl/egl_external_platform.d/10_nvidia_wayland.json",
    "usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json",
    "usr/share/nvidia/nvoptix.bin",
    "usr/share/vulkan/icd.d/nvidia_icd.json",
    "usr/share/vulkan/icd.d/nvidia_icd.x86_64.json",
    "etc/vulkan/icd.d/nvidia_icd.json",
    "usr/share/vulkan/implicit_layer.d/nvidia_layers.json",
    "etc/vulkan/implicit_layer.d/nvidia_layers.json",
];

/// The daemons' sockets: folder and name below /run or /var/run.
const SOCKETS: [&str; 2] = ["nvidia-persistenced/socket", "nvidia-fabricmanager/socket"];

/// The driver's files below `root`, the driver root. `loaded`: the version of the driver that is loaded.
pub(super) fn files(root: &Path, loaded: Option<&str>, found: Option<&Found>) -> DriverFiles {
    let version = found.map(|found| found.version.as_str()).or(loaded);
    let programs = PROGRAMS.iter().filter_map(|name| {
        let mut paths = PROGRAM_FOLDERS.iter().map(|folder| format!("{folder}/{name}"));
        paths.find(|path| is_program(&root.join(path)))
    });
    let firmware = version.map(|version| firmware(root, version)).unwrap_or_default();
    let configuration = CONFIGURATION.iter().filter(|path| is_file(&root.join(path))).map(|path| (*path).to_owned());
    DriverFiles {
        version: version.map(str::to_owned),
        library_folder: found.map(|found| absolute(found.folder)).unwrap_or_default(),
        libraries: found.map(|found| found.libraries.clone()).unwrap_or_default(),
        files: programs.chain(firmware).chain(configuration).map(absolute).collect(),
        sockets: SOCKETS.iter().filter_map(|name| socket(root, name)).collect(),
    }
}

/// The firmware of the GPU's own processor, relative to the driver root: gsp*.bin of that version.
fn firmware(root: &Path, version: &str) -> Vec<String> {
    let mut files = Vec::new();
    for folder in FIRMWARE_FOLDERS.map(|folder| format!("{folder}/{version}")) {
        let mut names = entries(&root.join(&folder));
        names.retain(|name| name.starts_with("gsp") && name.ends_with(".bin"));
        files.extend(names.into_iter().map(|name| format!("{folder}/{name}")));
    }
    files
}

/// A daemon's socket. The driver connects to /var/run, which hosts have as a link to /run; a host's link with an
/// absolute target leads elsewhere in our container.
fn socket(root: &Path, name: &str) -> Option<Socket> {
    let is_socket =
        |path: &String| root.join(path).symlink_metadata().is_ok_and(|metadata| metadata.file_type().is_socket());
    let host = ["run", "var/run"].map(|folder| format!("{folder}/{name}")).into_iter().find(is_socket)?;
    Some(Socket { host: absolute(host), container: format!("/var/run/{name}") })
}

/// The names in a folder, sorted; none where it cannot be read. A name that is not UTF-8 cannot stand in JSON.
pub(super) fn entries(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names
}

pub(super) fn is_file(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.is_file())
}

fn is_program(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

fn absolute(path: impl std::fmt::Display) -> String {
    format!("/{path}")
}
