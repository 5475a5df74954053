//! CDI specs, written for a driver root in a temporary folder, and what a container gets with its GPUs. Two tests
//! compare specs with golden files; `cdi/schema.rs` checks specs against the format's rules.

mod injection;
pub mod root;
pub mod schema;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use linkwise_core::state::{Event, MigStrategy, NodeState, ResourcePlan};
use linkwise_core::topology::{GpuObservation, NodeObservation};
use linkwise_host::cdi::{
    self, Description, DeviceEntry, DriverFiles, Extra, Options, Roots, Scan, Scanner, Spec, Warning,
};
use root::{LIBRARIES, Root, VERSION};
use tempfile::{TempDir, tempdir};

/// The state of a node with these GPUs, each by index, UUID, PCI address and minor number.
fn snapshot(gpus: &[(u32, &str, &str, Option<u32>)]) -> NodeState {
    observed(NodeState::default(), gpus)
}

fn observed(snapshot: NodeState, gpus: &[(u32, &str, &str, Option<u32>)]) -> NodeState {
    let gpu = |&(index, uuid, pci, minor): &(u32, &str, &str, Option<u32>)| {
        let yaml = format!("{{index: {index}, uuid: {uuid}, pci: '{pci}'}}");
        GpuObservation { minor, ..serde_saphyr::from_str(&yaml).unwrap() }
    };
    let gpus = gpus.iter().map(gpu).collect();
    let observed = NodeObservation { gpus, ..NodeObservation::default() };
    snapshot.apply(Event::Observed(Box::new(observed)), Duration::ZERO).0
}

const TWO: [(u32, &str, &str, Option<u32>); 2] =
    [(0, "GPU-a", "0000:01:00.0", Some(0)), (1, "GPU-b", "0000:41:00.0", Some(1))];

/// A host with the driver in a container: the driver root has one path on the host, another in our container.
fn in_driver_container(folder: &TempDir) -> Roots {
    let here = folder.path().to_owned();
    let sysfs = here.join("sys");
    Roots { driver: "/run/nvidia/driver".into(), driver_here: here, dev: "/".into(), sysfs }
}

fn full() -> (TempDir, Root) {
    let folder = tempdir().unwrap();
    let root = Root::full(folder.path());
    (folder, root)
}

fn empty() -> (TempDir, Root) {
    let folder = tempdir().unwrap();
    let root = Root::empty(folder.path());
    (folder, root)
}

/// A host with the driver installed on the host itself.
fn on_host(folder: &TempDir) -> Roots {
    Roots { driver: "/".into(), dev: "/".into(), ..in_driver_container(folder) }
}

fn scan(roots: Roots, options: Options, snapshot: &NodeState) -> Scan {
    Scanner::new(roots, options).scan(snapshot)
}

/// The text of all specs, each checked against the format.
fn written(description: &Description) -> String {
    let text = |spec: &Spec| {
        let text = spec.json().unwrap();
        assert_eq!(schema::check(&text), [""; 0], "{}:\n{text}", spec.kind);
        format!("{}:\n{text}", spec.file_name())
    };
    cdi::specs(description).iter().map(text).collect::<Vec<_>>().join("\n")
}

#[test]
fn host_with_hooks_gets_complete_specs() {
    let (folder, root) = full();
    root.hook();
    root.loaded(VERSION);
    root.drm("0000:01:00.0", &["card1", "renderD128", "controlD64"]);
    root.drm("0000:41:00.0", &["card2", "renderD129"]);
    let options = Options {
        extras: BTreeSet::from([Extra::GdrCopy, Extra::Gds, Extra::Mofed]),
        imex_channels: vec![1, 0, 1, 7],
        ..Options::default()
    };
    root.node("nvidia-caps-imex-channels/channel0");
    root.node("nvidia-caps-imex-channels/channel1");
    let scanned = scan(on_host(&folder), options, &snapshot(&TWO));
    assert_eq!(scanned.warnings, []);
    insta::assert_snapshot!(written(&scanned.description));
}

#[test]
fn driver_container_without_hooks_gets_mounts() {
    let (folder, root) = full();
    // The hook has to be on the host. This one is in a driver container, so it is not found.
    root.hook();
    let roots = Roots { dev: "/run/nvidia/driver".into(), ..in_driver_container(&folder) };
    let scanned = scan(roots, Options::default(), &snapshot(&TWO));
    assert_eq!(scanned.warnings, [Warning::NoHook("/usr/bin/nvidia-cdi-hook".to_owned())]);
    insta::assert_snapshot!(written(&scanned.description));
}

#[test]
fn nvidia_ctk_has_hooks_as_subcommands() {
    let (folder, _) = full();
    let options = Options { hook: Some("/usr/bin/nvidia-ctk".to_owned()), ..Options::default() };
    let scanned = scan(in_driver_container(&folder), options, &snapshot(&TWO));
    assert_eq!(scanned.warnings, []);
    let spec = &cdi::specs(&scanned.description)[0];
    let args: Vec<String> = spec.container_edits.hooks.iter().map(|hook| hook.args[..4].join(" ")).collect();
    assert_eq!(args[0], "nvidia-ctk hook create-symlinks --link");
    assert_eq!(args[1], "nvidia-ctk hook update-ldcache --folder");
}

#[test]
fn disabled_hooks_are_left_out_and_links_mounted() {
    let (folder, root) = full();
    root.hook();
    // The hooks of the spec, and whether libcuda.so.1, the name of a link, is mounted.
    let made = |names: &[&str]| {
        let disabled_hooks = names.iter().map(|name| (*name).to_owned()).collect();
        let options = Options { disabled_hooks, ..Options::default() };
        let scanned = scan(on_host(&folder), options, &snapshot(&TWO));
        assert_eq!(scanned.warnings, []);
        written(&scanned.description);
        let edits = &cdi::specs(&scanned.description)[0].container_edits;
        let mounted = edits.mounts.iter().any(|mount| mount.container_path.ends_with("/libcuda.so.1"));
        (edits.hooks.iter().map(|hook| hook.args[1].clone()).collect::<Vec<_>>(), mounted)
    };
    let (links, cache) = ("create-symlinks".to_owned(), "update-ldcache".to_owned());
    assert_eq!(made(&[]), (vec![links.clone(), cache.clone()], false));
    assert_eq!(made(&["update-ldcache"]), (vec![links], false));
    assert_eq!(made(&["create-symlinks"]), (vec![cache], true));
    for all in [&["all"] as &[&str], &["create-symlinks", "update-ldcache"]] {
        assert_eq!(made(all), (vec![], true));
    }
}

const LATER_HOOKS: [&str; 3] = ["enable-cuda-compat", "disable-device-node-modification", "update-application-profile"];

/// The hooks of the GPUs' spec: for each its arguments without the program.
fn hooks(folder: &TempDir, options: Options) -> Vec<String> {
    let scanned = scan(on_host(folder), options, &snapshot(&TWO));
    written(&scanned.description);
    let spec = &cdi::specs(&scanned.description)[0];
    spec.container_edits.hooks.iter().map(|hook| hook.args[1..].join(" ")).collect()
}

#[test]
fn later_hooks_are_used_if_the_program_has_them() {
    let (folder, root) = full();
    let later = |hooks: Vec<String>| {
        let is_later = |hook: &String| !hook.starts_with("create-symlinks") && !hook.starts_with("update-ldcache");
        hooks.into_iter().filter(is_later).collect::<Vec<_>>()
    };
    root.hook();
    assert_eq!(later(hooks(&folder, Options::default())), [""; 0]);
    root.hook_with(&LATER_HOOKS[..2]);
    let compat = format!("enable-cuda-compat --host-driver-version={VERSION}");
    assert_eq!(later(hooks(&folder, Options::default())), [compat.as_str(), LATER_HOOKS[1]]);
    root.hook_with(&LATER_HOOKS);
    let all = hooks(&folder, Options::default());
    assert!(all[0].starts_with("create-symlinks") && all[2].starts_with("update-ldcache"), "{all:?}");
    assert_eq!(later(all), [compat.as_str(), LATER_HOOKS[1], LATER_HOOKS[2]]);
    for name in LATER_HOOKS {
        let options = Options { disabled_hooks: BTreeSet::from([name.to_owned()]), ..Options::default() };
        let left = later(hooks(&folder, options));
        assert!(left.len() == 2 && left.iter().all(|hook| !hook.starts_with(name)), "{name}: {left:?}");
    }
    // The configured program of another toolkit is found at its path on the host.
    let options = Options { hook: Some("/opt/toolkit/nvidia-cdi-hook".to_owned()), ..Options::default() };
    assert_eq!(later(hooks(&folder, options.clone())), [""; 0], "a missing program has hooks");
    root.program("opt/toolkit/nvidia-cdi-hook");
    fs::write(folder.path().join("opt/toolkit/nvidia-cdi-hook"), LATER_HOOKS[2]).unwrap();
    assert_eq!(later(hooks(&folder, options)), [LATER_HOOKS[2]]);
}

/// The mounts of the driver's files: for each the host's path below the driver root, and the container's.
fn mounts(folder: &TempDir) -> Vec<(String, String)> {
    let scanned = scan(on_host(folder), Options::default(), &snapshot(&TWO));
    let spec = &cdi::specs(&scanned.description)[0];
    let mounts = spec.container_edits.mounts.iter();
    mounts.map(|mount| (mount.host_path.clone(), mount.container_path.clone())).collect()
}

#[test]
fn libraries_come_from_all_folders_and_once() {
    let (folder, root) = empty();
    root.hook();
    root.loaded(VERSION);
    let current = format!("{LIBRARIES}/nvidia/current");
    root.file(&format!("{current}/libcuda.so.{VERSION}"));
    root.link(&format!("{current}/libcuda.so.1"), &format!("libcuda.so.{VERSION}"));
    // Debian's alternatives: a link to the library, and a link whose target our container lacks.
    root.link(&format!("{LIBRARIES}/libcuda.so.{VERSION}"), &format!("nvidia/current/libcuda.so.{VERSION}"));
    root.link(&format!("{LIBRARIES}/libnvidia-ml.so.{VERSION}"), &format!("/nowhere/libnvidia-ml.so.{VERSION}"));
    root.file(&format!("{LIBRARIES}/libnvidia-eglcore.so.{VERSION}"));
    root.file(&format!("{LIBRARIES}/vdpau/libvdpau_nvidia.so.{VERSION}"));
    for other in ["libnvidia-egl-wayland2.so.1.0.1", "libnvidia-egl-wayland.so.1.1.9", "libnvidia-nvvm70.so.4"] {
        root.file(&format!("{LIBRARIES}/{other}"));
    }
    for unrelated in ["libcuda.so.535.1", "libnvidia-egl-wayland.so.1", "libc.so.6"] {
        root.file(&format!("{LIBRARIES}/{unrelated}"));
    }
    // A second path leads to the same folder.
    root.link("lib", "usr/lib");
    let mut expected = [
        format!("/{LIBRARIES}/libnvidia-egl-wayland.so.1.1.9"),
        format!("/{LIBRARIES}/libnvidia-egl-wayland2.so.1.0.1"),
        format!("/{LIBRARIES}/libnvidia-eglcore.so.{VERSION}"),
        format!("/{LIBRARIES}/libnvidia-nvvm70.so.4"),
        format!("/{current}/libcuda.so.{VERSION}"),
        format!("/{LIBRARIES}/vdpau/libvdpau_nvidia.so.{VERSION}"),
    ];
    expected.sort();
    assert_eq!(mounts(&folder).into_iter().map(|(host, _)| host).collect::<Vec<_>>(), expected);
    let cache = hooks(&folder, Options::default()).pop().unwrap();
    let folders = format!("--folder /{LIBRARIES} --folder /{current} --folder /{LIBRARIES}/vdpau");
    assert_eq!(cache, format!("update-ldcache {folders}"));
}

#[test]
fn expected_links_are_made_whatever_the_host_has() {
    let (folder, root) = empty();
    root.loaded(VERSION);
    for name in ["cuda", "GLX_nvidia", "nvidia-opticalflow", "nvidia-vulkan-producer", "nvidia-allocator"] {
        root.file(&format!("{LIBRARIES}/lib{name}.so.{VERSION}"));
    }
    root.link(&format!("{LIBRARIES}/libGLX_indirect.so.0"), "libGLX_mesa.so.0");
    root.file(&format!("{LIBRARIES}/xorg/modules/extensions/libglxserver_nvidia.so.{VERSION}"));
    let (producer, server) = ("libnvidia-vulkan-producer.so", "libglxserver_nvidia.so");
    let server_below = "xorg/modules/extensions/libglxserver_nvidia.so";
    let links = [
        ("libGLX_indirect.so.0", format!("libGLX_nvidia.so.{VERSION}"), "libGLX_nvidia.so"),
        ("libcuda.so", "libcuda.so.1".to_owned(), "libcuda.so"),
        ("gbm/nvidia-drm_gbm.so", "../libnvidia-allocator.so.1".to_owned(), "libnvidia-allocator.so"),
        ("libnvidia-opticalflow.so", "libnvidia-opticalflow.so.1".to_owned(), "libnvidia-opticalflow.so"),
        (producer, format!("{producer}.{VERSION}"), producer),
        (server_below, format!("{server}.{VERSION}"), server_below),
    ];
    let without = mounts(&folder);
    root.hook();
    let with = hooks(&folder, Options::default())[0].clone();
    for (link, target, library) in links {
        let (link, library) = (format!("/{LIBRARIES}/{link}"), format!("/{LIBRARIES}/{library}.{VERSION}"));
        assert!(with.contains(&format!("--link {target}::{link}")), "{link}: {with}");
        assert!(without.contains(&(library, link.clone())), "{link}: {without:?}");
        assert!(!mounts(&folder).iter().any(|(_, container)| *container == link), "{link} is mounted beside the hook");
    }
}

#[test]
fn driver_files_are_those_of_nvidias_generator() {
    let (folder, root) = empty();
    root.loaded(VERSION);
    root.hook();
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let architecture = std::env::consts::ARCH;
    root.file("sys/module/firmware_class/parameters/path");
    fs::write(folder.path().join("sys/module/firmware_class/parameters/path"), "/opt/firmware\n").unwrap();
    let same = [
        "etc/OpenCL/vendors/nvidia.icd".to_owned(),
        "usr/local/share/glvnd/egl_vendor.d/10_nvidia.json".to_owned(),
        "usr/share/egl/egl_external_platform.d/09_nvidia_wayland2.json".to_owned(),
        "usr/share/X11/xorg.conf.d/10-nvidia.conf".to_owned(),
        "usr/lib/xorg/modules/drivers/nvidia_drv.so".to_owned(),
        format!("opt/firmware/nvidia/{VERSION}/gsp_tu10x.bin"),
        format!("lib/firmware/{}/nvidia/{VERSION}/gsp_ga10x.bin", kernel.trim()),
    ];
    same.iter().for_each(|path| root.file(path));
    root.file(&format!("{LIBRARIES}/libcuda.so.{VERSION}"));
    root.program("usr/bin/nvidia-imex");
    root.program("usr/bin/nvidia-imex-ctl");
    root.file("usr/share/vulkan/icd.d/nvidia_icd.json");
    root.file(&format!("usr/share/vulkan/icd.d/nvidia_icd.{architecture}.json"));
    root.file("usr/share/vulkan/icd.d/nvidia_icd.of_another.json");
    root.file("vulkan/implicit_layer.d/nvidia_layers.json");
    let mounts = mounts(&folder);
    let expected = same.iter().map(String::as_str).chain(["usr/bin/nvidia-imex", "usr/bin/nvidia-imex-ctl"]);
    for path in expected {
        assert!(mounts.contains(&(format!("/{path}"), format!("/{path}"))), "{path}: {mounts:#?}");
    }
    let of_architecture = format!("vulkan/icd.d/nvidia_icd.{architecture}.json");
    for (host, container) in [
        ("usr/share/vulkan/icd.d/nvidia_icd.json", "vulkan/icd.d/nvidia_icd.json"),
        (&format!("usr/share/{of_architecture}"), &of_architecture),
        ("vulkan/implicit_layer.d/nvidia_layers.json", "vulkan/implicit_layer.d/nvidia_layers.json"),
    ] {
        assert!(mounts.contains(&(format!("/{host}"), format!("/etc/{container}"))), "{host}: {mounts:#?}");
    }
    assert_eq!(mounts.len(), same.len() + 2 + 3 + 1, "the above and libcuda: {mounts:#?}");
}

#[test]
fn libraries_match_the_loaded_driver() {
    let names = |driver: &DriverFiles| {
        let names = driver.libraries.iter().map(|path| path.rsplit('/').next().unwrap().to_owned());
        names.collect::<Vec<_>>()
    };
    let scanned = |folder: &TempDir| scan(on_host(folder), Options::default(), &snapshot(&TWO));
    let (folder, root) = empty();
    root.driver("535.9");
    root.driver("535.10.1");
    let newest = ["libcuda.so.535.10.1", "libnvidia-ml.so.535.10.1", "libnvidia-ptxjitcompiler.so.535.10.1"];
    assert_eq!(names(&scanned(&folder).description.driver), newest, "libcuda.so.1 leads to it");
    fs::remove_file(folder.path().join(LIBRARIES).join("libcuda.so.1")).unwrap();
    assert_eq!(names(&scanned(&folder).description.driver), newest, "535.10 is newer than 535.9");
    root.link(&format!("{LIBRARIES}/libcuda.so.1"), "libcuda.so.535.9");
    assert_eq!(scanned(&folder).description.driver.version.as_deref(), Some("535.9"));
    root.loaded("535.10.1");
    assert_eq!(names(&scanned(&folder).description.driver), newest, "the loaded driver is 535.10.1");
    // In an unfinished update the libraries' version differs from the kernel module's, and they do not work.
    root.loaded("550.1");
    let seen = scanned(&folder);
    assert_eq!(names(&seen.description.driver), [""; 0]);
    let warnings: Vec<String> = seen.warnings.iter().map(ToString::to_string).collect();
    assert!(warnings[0].contains("no libcuda.so.550.1 below"), "{warnings:?}");
}

#[test]
fn root_without_libraries_still_gets_device_nodes() {
    let (folder, root) = empty();
    root.node("nvidiactl");
    let scanned = scan(on_host(&folder), Options::default(), &snapshot(&TWO));
    let warning = scanned.warnings[0].to_string();
    for part in ["libcuda.so.*", &folder.path().display().to_string(), "usr/lib64, usr/lib/x86_64-linux-gnu,"] {
        assert!(warning.contains(part), "{warning}");
    }
    let specs = cdi::specs(&scanned.description);
    let nodes = specs[0].devices.iter().map(|device| &device.container_edits.device_nodes[0].path);
    assert_eq!(
        nodes.collect::<Vec<_>>(),
        ["/dev/nvidia0", "/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia1", "/dev/nvidia0"]
    );
    assert_eq!(specs[0].container_edits.device_nodes[0].path, "/dev/nvidiactl");
    assert_eq!(specs[0].container_edits.mounts, []);
    written(&scanned.description);
}

#[test]
fn gone_gpu_keeps_its_uuid_and_loses_its_index() {
    let (folder, _) = full();
    let names = |snapshot: &NodeState| {
        let scanned = scan(on_host(&folder), Options::default(), snapshot);
        written(&scanned.description);
        let specs = cdi::specs(&scanned.description);
        specs[0].devices.iter().map(|device| device.name.clone()).collect::<Vec<_>>()
    };
    let before = snapshot(&TWO);
    assert_eq!(names(&before), ["0", "GPU-a", "1", "GPU-b", "all"]);
    // GPU-a is gone, so NVML gives index 0 to GPU-b.
    let after = observed(before, &[(0, "GPU-b", "0000:41:00.0", Some(1))]);
    assert_eq!(names(&after), ["GPU-a", "0", "GPU-b", "all"]);
    let scanned = scan(on_host(&folder), Options::default(), &after);
    let specs = cdi::specs(&scanned.description);
    let all = &specs[0].devices[3].container_edits.device_nodes;
    assert_eq!(all.iter().map(|node| node.path.as_str()).collect::<Vec<_>>(), ["/dev/nvidia1"]);
}

#[test]
fn gpu_without_minor_number_is_left_out() {
    let (folder, root) = full();
    root.hook();
    let gpus = [TWO[0], (1, "GPU-b", "0000:41:00.0", None)];
    let scanned = scan(on_host(&folder), Options::default(), &snapshot(&gpus));
    assert_eq!(scanned.warnings, [Warning::NoMinor("GPU-b".parse().unwrap())]);
    assert!(!written(&scanned.description).contains("GPU-b"));
    // The format allows no spec without a device.
    let scanned = scan(on_host(&folder), Options::default(), &snapshot(&gpus[1..]));
    assert_eq!(cdi::specs(&scanned.description), []);
}

#[test]
fn mig_device_has_parent_node_and_capabilities() {
    let (folder, root) = full();
    root.hook();
    root.drm("0000:81:00.0", &["card2", "renderD128"]);
    let mig = |index: u32, uuid: &str, capabilities: &str| {
        format!(
            "{{index: {index}, uuid: {uuid}, gpu_instance: {index}, compute_instance: 0, gpu_slices: 1, \
             compute_slices: 1, memory_mib: 9984{capabilities}}}"
        )
    };
    let migs = [
        mig(0, "MIG-1", ", capabilities: {gpu_instance: 66, compute_instance: 67}"),
        // CDI allows no name of this form, which UUIDs had before driver R470.
        mig(1, "MIG-GPU-p/8/0", ", capabilities: {gpu_instance: 75, compute_instance: 76}"),
        mig(3, "MIG-gfx", ", extension: graphics, capabilities: {gpu_instance: 84, compute_instance: 85}"),
        mig(2, "MIG-3", ""),
    ];
    let yaml = format!(
        "[{{index: 3, uuid: GPU-p, pci: '0000:81:00.0', minor: 5, mig: {{enabled: true, devices: [{}]}}}}]",
        migs.join(", ")
    );
    let gpus = serde_saphyr::from_str(&yaml).unwrap();
    let plan = ResourcePlan { mig_strategy: MigStrategy::Mixed, ..ResourcePlan::default() };
    let snapshot = NodeState::default().apply(Event::Planned(Box::new(plan)), Duration::ZERO).0;
    let observed = NodeObservation { gpus, ..NodeObservation::default() };
    let snapshot = snapshot.apply(Event::Observed(Box::new(observed)), Duration::ZERO).0;
    let scanned = scan(on_host(&folder), Options::default(), &snapshot);
    assert_eq!(scanned.warnings, [Warning::NoCapabilities("MIG-3".parse().unwrap())]);
    written(&scanned.description);
    let specs = cdi::specs(&scanned.description);
    let devices = specs[0].devices.iter().map(|device| {
        let nodes = device.container_edits.device_nodes.iter();
        (device.name.clone(), nodes.map(|node| node.path.trim_start_matches("/dev/")).collect())
    });
    let devices: Vec<(String, Vec<&str>)> = devices.collect();
    let first = vec!["nvidia5", "nvidia-caps/nvidia-cap66", "nvidia-caps/nvidia-cap67"];
    let second = vec!["nvidia5", "nvidia-caps/nvidia-cap75", "nvidia-caps/nvidia-cap76"];
    let whole = vec!["nvidia5", "dri/card2", "dri/renderD128"];
    // Of the MIG devices, only one with graphics gets the GPU's DRM nodes.
    let caps = ["nvidia-caps/nvidia-cap84", "nvidia-caps/nvidia-cap85"];
    let graphics: Vec<&str> = [&whole[..1], &caps, &whole[1..]].concat();
    let mut all: Vec<&str> = [&first[1..], &second[1..], &graphics].concat();
    all.sort_unstable();
    let expected = [
        ("3".to_owned(), whole.clone()),
        ("GPU-p".to_owned(), whole),
        ("3:0".to_owned(), first.clone()),
        ("MIG-1".to_owned(), first),
        ("3:1".to_owned(), second),
        ("3:3".to_owned(), graphics.clone()),
        ("MIG-gfx".to_owned(), graphics),
        ("all".to_owned(), all),
    ];
    assert_eq!(devices, expected);
}

/// Specs whose texts differ much in length, so that a partial write would show.
fn versions(count: u32) -> Vec<Spec> {
    let gpu = |minor: u32| DeviceEntry {
        names: vec![minor.to_string(), format!("GPU-{minor}")],
        nodes: vec![format!("/dev/nvidia{minor}")],
        files: vec![],
        is_present: true,
    };
    let description = |gpus: u32| Description {
        driver_root: "/".to_owned(),
        dev_root: "/".to_owned(),
        gpus: (0..gpus).map(gpu).collect(),
        ..Description::default()
    };
    (0..count).flat_map(|step| cdi::specs(&description(1 + 30 * step))).collect()
}

#[test]
fn reader_never_sees_a_partial_spec() {
    let folder = tempdir().unwrap();
    let specs = versions(3);
    let path = folder.path().join(specs[0].file_name());
    let texts: BTreeSet<String> = specs.iter().map(|spec| spec.json().unwrap()).collect();
    assert_eq!(texts.len(), 3);
    cdi::write(folder.path(), &specs[0]).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut seen = BTreeSet::new();
            while !done.load(Ordering::Relaxed) {
                let text = fs::read_to_string(&path).expect("the spec always exists");
                assert!(texts.contains(&text), "a partial spec:\n{text}");
                seen.insert(text);
            }
            seen
        });
        for step in 0..300 {
            assert!(cdi::write(folder.path(), &specs[step % 2 + 1]).unwrap());
        }
        done.store(true, Ordering::Relaxed);
        reader.join().unwrap();
    });
    let names: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, [path.file_name().unwrap()], "a temporary file is left");
}

#[test]
fn unwritable_folder_is_named() {
    let folder = tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let inside = file.join("cdi");
    let error = cdi::prepare(&inside).unwrap_err();
    assert_eq!(error.to_string(), format!("cannot write CDI specs to the folder {}", inside.display()));
    let error = cdi::write(&inside, &versions(1)[0]).unwrap_err();
    assert!(error.to_string().contains("k8s.device-plugin.nvidia.com-gpu.json"), "{error}");
    assert!(cdi::prepare(Path::new("/proc/nothing/cdi")).is_err());
    cdi::prepare(&folder.path().join("new/cdi")).unwrap();
}

#[test]
fn schema_check_rejects_broken_specs() {
    let good = versions(1)[0].json().unwrap();
    assert_eq!(schema::check(&good), [""; 0]);
    for (from, to) in [
        ("\"kind\"", "\"sort\""),
        ("plugin.nvidia.com/gpu", "plugin.nvidia.com"),
        ("0.5.0", "0.3.0"),
        ("0.5.0", "1.0.0"),
        ("\"path\"", "\"Path\""),
        ("/dev/nvidia0", "dev/nvidia0"),
        ("\"name\": \"GPU-0\"", "\"name\": \"-GPU\""),
        ("\"name\": \"GPU-0\"", "\"name\": \"0\""),
        ("VISIBLE_DEVICES=void", "VISIBLE_DEVICES"),
        ("\"devices\"", "\"unknown\": 1, \"devices\""),
    ] {
        let broken = good.replace(from, to);
        assert_ne!(broken, good, "{from}");
        assert_ne!(schema::check(&broken), [""; 0], "{from} -> {to}");
    }
}
