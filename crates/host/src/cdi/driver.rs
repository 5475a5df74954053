//! The driver's files for containers, except its libraries: programs, firmware, configuration, the X server's modules,
//! sockets. Reads the driver root, sysfs and /proc.
//!
//! The files are those of `pkg/nvcdi/driver-nvml.go`, `internal/discover/graphics.go` and `internal/discover/ipc.go` of
//! NVIDIA/nvidia-container-toolkit v1.20.

use std::collections::BTreeSet;
use std::env::consts::ARCH;
use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::libraries::Found;
use super::{DriverFile, DriverFiles, Link};

const PROGRAM_FOLDERS: [&str; 6] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];

const PROGRAMS: [&str; 7] = [
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-imex",
    "nvidia-imex-ctl",
];

const CONFIGURATION_FOLDERS: [&str; 3] = ["/etc", "/usr/local/share", "/usr/share"];

/// The files by which OpenGL, OpenCL, OptiX and the X server find the driver.
const CONFIGURATION: [&str; 8] = [
    "glvnd/egl_vendor.d/10_nvidia.json",
    "egl/egl_external_platform.d/09_nvidia_wayland2.json",
    "egl/egl_external_platform.d/10_nvidia_wayland.json",
    "egl/egl_external_platform.d/15_nvidia_gbm.json",
    "nvidia/nvoptix.bin",
    "OpenCL/vendors/nvidia.icd",
    "X11/xorg.conf.d/10-nvidia.conf",
    "X11/xorg.conf.d/nvidia-drm-outputclass.conf",
];

/// The files that Vulkan reads, beside `icd.d/nvidia_icd.ARCHITECTURE.json`.
const VULKAN: [&str; 3] = ["icd.d/nvidia_icd.json", "icd.d/nvidia_layers.json", "implicit_layer.d/nvidia_layers.json"];

/// The X server's folders, beside `xorg` in each folder of libraries.
const X_FOLDERS: [&str; 4] = ["/usr/lib/xorg", "/usr/lib64/xorg", "/usr/X11R6/lib", "/usr/X11R6/lib64"];

/// The folders of modules below each of the X server's folders.
const X_MODULES: [&str; 4] =
    ["modules/drivers", "modules/extensions", "modules/updates/drivers", "modules/updates/extensions"];

/// The daemons' sockets: folder and name below /run or /var/run.
const SOCKETS: [&str; 2] = ["nvidia-persistenced/socket", "nvidia-fabricmanager/socket"];

/// The driver's files below `root`, the driver root. `loaded` is the version of the loaded driver.
pub(super) fn files(root: &Path, sysfs: &Path, loaded: Option<&str>, found: Option<&Found>) -> DriverFiles {
    let version = found.map(|found| found.version.as_str()).or(loaded);
    let first = |folders: &[&str], name: &str, is_wanted: fn(&Path) -> bool| {
        let mut paths = folders.iter().map(|folder| format!("{folder}/{name}"));
        paths.find(|path| is_wanted(&below(root, path)))
    };
    let mut same: Vec<String> = PROGRAMS.iter().filter_map(|name| first(&PROGRAM_FOLDERS, name, is_program)).collect();
    same.extend(version.into_iter().flat_map(|version| firmware(root, sysfs, version)));
    for name in CONFIGURATION {
        let paths = CONFIGURATION_FOLDERS.iter().map(|folder| format!("{folder}/{name}"));
        same.extend(paths.filter(|path| below(root, path).is_file()));
    }
    let mut links = found.map(|found| found.links.values().cloned().collect()).unwrap_or_default();
    same.extend(found.into_iter().flat_map(|found| x_modules(root, found, &mut links)));
    let same = same.into_iter().map(|path| DriverFile { host: path.clone(), container: path });
    let of_architecture = format!("icd.d/nvidia_icd.{ARCH}.json");
    let vulkan = VULKAN.into_iter().chain([of_architecture.as_str()]).filter_map(|name| {
        // Google's installer puts Vulkan's files into the driver root itself.
        let host = first(&["/etc", "/usr/local/share", "/usr/share", ""], &format!("vulkan/{name}"), Path::is_file)?;
        Some(DriverFile { host, container: format!("/etc/vulkan/{name}") })
    });
    // The driver connects to sockets below /var/run, which not every image has as a link to /run. The host's /run is
    // tried first, because a link with an absolute target leads elsewhere in our container.
    let sockets = SOCKETS.iter().filter_map(|name| {
        Some(DriverFile { host: first(&["/run", "/var/run"], name, is_socket)?, container: format!("/var/run/{name}") })
    });
    DriverFiles {
        version: version.map(str::to_owned),
        libraries: found.map(|found| found.libraries.iter().cloned().collect()).unwrap_or_default(),
        files: same.chain(vulkan).collect(),
        sockets: sockets.collect(),
        links,
    }
}

/// The firmware of the GPU's own processor, gsp*.bin of this version, from all folders in which the kernel searches.
fn firmware(root: &Path, sysfs: &Path, version: &str) -> Vec<String> {
    let text = |path: &Path| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let kernel = text(Path::new("/proc/sys/kernel/osrelease"));
    let (updates, standard) = ("/lib/firmware/updates", "/lib/firmware");
    let folders = [
        text(&sysfs.join("module/firmware_class/parameters/path")),
        format!("{updates}/{kernel}"),
        updates.to_owned(),
        format!("{standard}/{kernel}"),
        standard.to_owned(),
    ];
    let mut files = Vec::new();
    for folder in folders.iter().filter(|folder| !folder.is_empty()) {
        let folder = format!("{}/nvidia/{version}", folder.trim_end_matches('/'));
        let mut names = entries(&below(root, &folder));
        names.retain(|name| name.starts_with("gsp") && name.ends_with(".bin"));
        files.extend(names.into_iter().map(|name| format!("{folder}/{name}")));
    }
    files
}

/// The X server's modules. Adds the link to one of them to `links`.
fn x_modules(root: &Path, found: &Found, links: &mut Vec<Link>) -> Vec<String> {
    let libraries: BTreeSet<&str> = found.libraries.iter().filter_map(|path| Some(path.rsplit_once('/')?.0)).collect();
    let xorg = libraries.iter().map(|folder| format!("{folder}/xorg"));
    let servers = xorg.chain(X_FOLDERS.map(str::to_owned));
    let modules = servers.flat_map(|server| X_MODULES.map(|modules| format!("{server}/{modules}")));
    let folders: Vec<String> = libraries.iter().map(|folder| format!("{folder}/nvidia/xorg")).chain(modules).collect();
    let first = |name: &str| {
        let mut paths = folders.iter().map(|folder| format!("{folder}/{name}"));
        paths.find(|path| below(root, path).is_file())
    };
    let server = "libglxserver_nvidia.so";
    let target = format!("{server}.{}", found.version);
    let glx = first(&target);
    if let Some(library) = &glx {
        let path = library.trim_end_matches(&target).to_owned() + server;
        links.push(Link { path, target, library: library.clone() });
    }
    first("nvidia_drv.so").into_iter().chain(glx).collect()
}

/// The names in a folder, sorted; empty if it cannot be read. Names that are not UTF-8 are left out: JSON has none.
pub(super) fn entries(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names
}

/// An absolute path, taken below another root.
pub(super) fn below(root: &Path, path: &str) -> PathBuf {
    root.join(path.trim_start_matches('/'))
}

fn is_program(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

fn is_socket(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|metadata| metadata.file_type().is_socket())
}
