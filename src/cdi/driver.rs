//! The driver's files for containers: libraries, programs, firmware, sockets. Reads folders below the driver root.
//!
//! Which files those are: `pkg/nvcdi/driver-nvml.go`, `internal/discover/graphics.go` and `internal/discover/ipc.go` of
//! NVIDIA/nvidia-container-toolkit.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::description::{DriverFiles, Library, Socket};
use super::oddity::Oddity;

/// Where distributions and installers put the driver's 64-bit libraries, relative to the driver root: Red Hat, Debian and
/// Ubuntu, Debian's alternatives, SUSE and Arch, Google's and Talos' installers.
const LIBRARY_FOLDERS: [&str; 12] = [
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "usr/lib",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/local/nvidia/lib64",
    "glibc/lib",
    "usr/local/glibc/usr/lib",
];

/// The library without which there is no CUDA; where it is, the others are.
const CUDA: &str = "libcuda.so.";

/// Libraries of the driver with version numbers of their own.
const OTHER_LIBRARIES: [&str; 2] = ["libnvidia-egl-gbm.so.", "libnvidia-egl-wayland.so."];

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

/// Looks for the driver's files below `root`. `version`: of the driver that is loaded, as the kernel names it; without one,
/// the version of the libcuda that is there.
pub(super) fn look(root: &Path, version: Option<&str>) -> (DriverFiles, Option<Oddity>) {
    let mut found = DriverFiles { version: version.map(str::to_owned), ..DriverFiles::default() };
    let library_folder = LIBRARY_FOLDERS.iter().find_map(|folder| {
        let version = match version {
            Some(version) => is_file(&root.join(folder).join(format!("{CUDA}{version}"))).then(|| version.to_owned()),
            None => version_in(&root.join(folder)),
        };
        version.map(|version| (*folder, version))
    });
    let oddity = match library_folder {
        Some((folder, version)) => {
            found.libraries = libraries(&root.join(folder), &version);
            found.library_folder = format!("/{folder}");
            found.version = Some(version);
            None
        }
        None => Some(Oddity::NoLibraries {
            wanted: format!("{CUDA}{}", version.unwrap_or("*")),
            root: root.display().to_string(),
            folders: LIBRARY_FOLDERS.join(", "),
        }),
    };
    let program = |name: &&str| {
        let places = PROGRAM_FOLDERS.iter().map(|folder| format!("{folder}/{name}"));
        places.into_iter().find(|place| is_program(&root.join(place)))
    };
    found.files.extend(PROGRAMS.iter().filter_map(program).map(absolute));
    if let Some(version) = &found.version {
        found.files.extend(firmware(root, version));
    }
    let configuration = CONFIGURATION.iter().filter(|path| is_file(&root.join(path)));
    found.files.extend(configuration.map(absolute));
    found.sockets = SOCKETS.iter().filter_map(|name| socket(root, name)).collect();
    (found, oddity)
}

/// The version of the libcuda in a folder: the one that `libcuda.so.1` leads to, else the newest.
fn version_in(folder: &Path) -> Option<String> {
    let names = entries(folder);
    let versions = names.iter().filter_map(|name| name.strip_prefix(CUDA)).filter(|rest| is_version(rest));
    let linked = fs::read_link(folder.join("libcuda.so.1")).ok();
    let linked = linked.as_deref().and_then(Path::file_name).and_then(|name| name.to_str()?.strip_prefix(CUDA));
    let versions: Vec<&str> = versions.collect();
    let newest = versions.iter().max_by_key(|version| numbers(version)).copied();
    linked.filter(|linked| versions.contains(linked)).or(newest).map(str::to_owned)
}

/// The libraries of a version in a folder, with the links beside them that lead to them.
fn libraries(folder: &Path, version: &str) -> Vec<Library> {
    let names = entries(folder);
    let ending = format!(".so.{version}");
    let is_library = |name: &String| {
        let other = OTHER_LIBRARIES.iter().find_map(|other| name.strip_prefix(other)).is_some_and(is_version);
        (other || name.ends_with(&ending)) && is_file(&folder.join(name))
    };
    let mut found: BTreeMap<&str, Vec<(String, String)>> =
        names.iter().filter(|name| is_library(name)).map(|name| (name.as_str(), Vec::new())).collect();
    let links: BTreeMap<&str, String> =
        names.iter().filter_map(|name| Some((name.as_str(), link_beside(&folder.join(name))?))).collect();
    for (name, target) in links.iter().filter(|(name, _)| !found_has(&found, name)).collect::<Vec<_>>() {
        // libcuda.so says libcuda.so.1 says libcuda.so.550.54.15; a chain longer than that is no library's.
        let chain = std::iter::successors(Some(target.as_str()), |name| links.get(name).map(String::as_str));
        if let Some(end) = chain.take(4).find(|name| found_has(&found, name))
            && let Some(to) = found.get_mut(end)
        {
            to.push(((*name).to_owned(), target.clone()));
        }
    }
    found.into_iter().map(|(name, links)| Library { name: name.to_owned(), links }).collect()
}

fn found_has(found: &BTreeMap<&str, Vec<(String, String)>>, name: &str) -> bool {
    found.contains_key(name)
}

/// What a link says, where that is a name in its own folder.
fn link_beside(path: &Path) -> Option<String> {
    let target = fs::read_link(path).ok()?;
    let target = target.to_str()?;
    (!target.contains('/')).then(|| target.to_owned())
}

/// The firmware of the GPU's own processor: gsp*.bin of that version.
fn firmware(root: &Path, version: &str) -> Vec<String> {
    let folders = FIRMWARE_FOLDERS.iter().map(|folder| format!("{folder}/{version}"));
    let files = folders.flat_map(|folder| {
        let names = entries(&root.join(&folder)).into_iter();
        let names = names.filter(|name| name.starts_with("gsp") && name.ends_with(".bin"));
        names.map(|name| format!("/{folder}/{name}")).collect::<Vec<_>>()
    });
    files.collect()
}

/// A daemon's socket. The driver connects to /var/run, which hosts have as a link to /run; a link of theirs with
/// an absolute target leads astray in our container.
fn socket(root: &Path, name: &str) -> Option<Socket> {
    let hosts = ["run", "var/run"].map(|folder| format!("{folder}/{name}"));
    let is_socket = |path: PathBuf| path.symlink_metadata().is_ok_and(|there| there.file_type().is_socket());
    let host = hosts.into_iter().find(|host| is_socket(root.join(host)))?;
    Some(Socket { host: absolute(host), container: format!("/var/run/{name}") })
}

/// The names in a folder, sorted; none where it cannot be read. A name that is no text cannot stand in JSON.
pub(super) fn entries(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names
}

/// Digits and dots, two numbers at least: `550.54.15`, not the `1` of `libcuda.so.1`.
fn is_version(text: &str) -> bool {
    let parts: Vec<&str> = text.split('.').collect();
    let digits = |part: &&str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    parts.len() >= 2 && parts.iter().all(digits)
}

fn numbers(version: &str) -> Vec<u64> {
    version.split('.').map(|part| part.parse().unwrap_or(u64::MAX)).collect()
}

fn is_file(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|there| there.is_file())
}

fn is_program(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|there| there.is_file() && there.permissions().mode() & 0o111 != 0)
}

fn absolute(path: impl std::fmt::Display) -> String {
    format!("/{path}")
}
