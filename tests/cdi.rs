//! CDI specs, from a driver root in a temporary folder to the files, and what a container gets with its GPUs. Goldens
//! of the specs, each checked against the format's rules in `cdi/schema.rs`.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "what a helper cannot do fails the test"
)]

#[path = "cdi/injection.rs"]
mod injection;
#[path = "cdi/root.rs"]
mod root;
#[path = "cdi/schema.rs"]
mod schema;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use linkwise::cdi::{self, Description, DeviceEntry, Extra, Library, Options, Roots, Scan, Scanner, Spec, Warning};
use linkwise::state::{Event, MigStrategy, NodeState, ResourcePlan};
use linkwise::topology::{GpuObservation, NodeObservation};
use root::{LIBRARIES, Root, VERSION};
use tempfile::{TempDir, tempdir};

/// GPUs by index, UUID, PCI address and minor number.
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

/// A host with the driver in a container: the host has it elsewhere than we do.
fn in_driver_container(folder: &TempDir) -> Roots {
    let here = folder.path().to_owned();
    let sysfs = here.join("sys");
    Roots { driver: "/run/nvidia/driver".into(), driver_here: here, dev: "/".into(), sysfs }
}

/// A host with the driver on it.
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
    let folder = tempdir().unwrap();
    let root = Root::full(folder.path());
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
    let folder = tempdir().unwrap();
    let root = Root::full(folder.path());
    // The root of a driver container does not show the host's programs.
    root.hook();
    let roots = Roots { dev: "/run/nvidia/driver".into(), ..in_driver_container(&folder) };
    let scanned = scan(roots, Options::default(), &snapshot(&TWO));
    assert_eq!(scanned.warnings, [Warning::NoHook { path: "/usr/bin/nvidia-cdi-hook".to_owned() }]);
    insta::assert_snapshot!(written(&scanned.description));
}

#[test]
fn nvidia_ctk_hooks_are_nested() {
    let folder = tempdir().unwrap();
    Root::full(folder.path());
    let options = Options { hook: Some("/usr/bin/nvidia-ctk".to_owned()), ..Options::default() };
    let scanned = scan(in_driver_container(&folder), options, &snapshot(&TWO));
    assert_eq!(scanned.warnings, []);
    let spec = &cdi::specs(&scanned.description)[0];
    let args: Vec<String> = spec.container_edits.hooks.iter().map(|hook| hook.args[..4].join(" ")).collect();
    assert_eq!(args[0], "nvidia-ctk hook create-symlinks --link");
    assert_eq!(args[1], "nvidia-ctk hook update-ldcache --folder");
}

#[test]
fn disabled_hooks_are_replaced_by_mounts() {
    let folder = tempdir().unwrap();
    Root::full(folder.path()).hook();
    // The hooks of the spec, and whether a link's name is mounted.
    let made = |names: &[&str]| {
        let disabled_hooks = names.iter().map(|name| (*name).to_owned()).collect();
        let options = Options { disabled_hooks, ..Options::default() };
        let scanned = scan(on_host(&folder), options, &snapshot(&TWO));
        // Disabled hooks are no reason to warn about a missing program.
        assert_eq!(scanned.warnings, []);
        written(&scanned.description);
        let edits = &cdi::specs(&scanned.description)[0].container_edits;
        let mounted = edits.mounts.iter().any(|mount| mount.container_path.ends_with("/libcuda.so.1"));
        (edits.hooks.iter().map(|hook| hook.args[1].clone()).collect::<Vec<_>>(), mounted)
    };
    let (links, cache) = ("create-symlinks".to_owned(), "update-ldcache".to_owned());
    assert_eq!(made(&[]), (vec![links.clone(), cache.clone()], false));
    assert_eq!(made(&["enable-cuda-compat"]), (vec![links.clone(), cache.clone()], false));
    assert_eq!(made(&["update-ldcache"]), (vec![links], false));
    assert_eq!(made(&["create-symlinks"]), (vec![cache], true));
    for all in [&["all"] as &[&str], &["create-symlinks", "update-ldcache"]] {
        assert_eq!(made(all), (vec![], true));
    }
}

#[test]
fn libraries_match_the_loaded_driver() {
    let names = |libraries: &[Library]| libraries.iter().map(|library| library.name.clone()).collect::<Vec<_>>();
    let scanned = |folder: &TempDir| scan(on_host(folder), Options::default(), &snapshot(&TWO));
    let folder = tempdir().unwrap();
    let root = Root::empty(folder.path());
    root.driver("535.9");
    root.driver("535.10.1");
    let newest = ["libcuda.so.535.10.1", "libnvidia-ml.so.535.10.1", "libnvidia-ptxjitcompiler.so.535.10.1"];
    assert_eq!(names(&scanned(&folder).description.driver.libraries), newest, "libcuda.so.1 leads to it");
    fs::remove_file(folder.path().join(LIBRARIES).join("libcuda.so.1")).unwrap();
    assert_eq!(names(&scanned(&folder).description.driver.libraries), newest, "10 is more than 9");
    root.link(&format!("{LIBRARIES}/libcuda.so.1"), "libcuda.so.535.9");
    assert_eq!(scanned(&folder).description.driver.version.as_deref(), Some("535.9"));
    root.loaded("535.10.1");
    assert_eq!(names(&scanned(&folder).description.driver.libraries), newest, "the loaded driver decides");
    // An unfinished update: libraries of another version than the kernel module's do not work.
    root.loaded("550.1");
    let seen = scanned(&folder);
    assert_eq!(names(&seen.description.driver.libraries), [""; 0]);
    let warnings: Vec<String> = seen.warnings.iter().map(ToString::to_string).collect();
    assert!(warnings[0].contains("no libcuda.so.550.1 below"), "{warnings:?}");
}

#[test]
fn root_without_libraries_still_gets_device_nodes() {
    let folder = tempdir().unwrap();
    let root = Root::empty(folder.path());
    root.node("nvidiactl");
    let scanned = scan(on_host(&folder), Options::default(), &snapshot(&TWO));
    let warning = scanned.warnings[0].to_string();
    for part in ["libcuda.so.*", &folder.path().display().to_string(), "usr/lib64, usr/lib/x86_64-linux-gnu,"] {
        assert!(warning.contains(part), "{warning}");
    }
    let specs = cdi::specs(&scanned.description);
    let nodes: Vec<&str> =
        specs[0].devices.iter().map(|device| device.container_edits.device_nodes[0].path.as_str()).collect();
    assert_eq!(nodes, ["/dev/nvidia0", "/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia1", "/dev/nvidia0"]);
    assert_eq!(specs[0].container_edits.device_nodes[0].path, "/dev/nvidiactl");
    assert_eq!(specs[0].container_edits.mounts, []);
    written(&scanned.description);
}

#[test]
fn gone_gpu_keeps_its_uuid_and_loses_its_index() {
    let folder = tempdir().unwrap();
    Root::full(folder.path());
    let names = |snapshot: &NodeState| {
        let scanned = scan(on_host(&folder), Options::default(), snapshot);
        written(&scanned.description);
        let specs = cdi::specs(&scanned.description);
        specs[0].devices.iter().map(|device| device.name.clone()).collect::<Vec<_>>()
    };
    let before = snapshot(&TWO);
    assert_eq!(names(&before), ["0", "GPU-a", "1", "GPU-b", "all"]);
    // GPU-a left; GPU-b is the first now, as NVML counts.
    let after = observed(before, &[(0, "GPU-b", "0000:41:00.0", Some(1))]);
    assert_eq!(names(&after), ["GPU-a", "0", "GPU-b", "all"]);
    let scanned = scan(on_host(&folder), Options::default(), &after);
    let specs = cdi::specs(&scanned.description);
    let all = &specs[0].devices[3].container_edits.device_nodes;
    assert_eq!(all.iter().map(|node| node.path.as_str()).collect::<Vec<_>>(), ["/dev/nvidia1"]);
}

#[test]
fn gpu_without_minor_number_is_left_out() {
    let folder = tempdir().unwrap();
    Root::full(folder.path()).hook();
    let gpus = [TWO[0], (1, "GPU-b", "0000:41:00.0", None)];
    let scanned = scan(on_host(&folder), Options::default(), &snapshot(&gpus));
    assert_eq!(scanned.warnings, [Warning::NoMinor { uuid: "GPU-b".parse().unwrap() }]);
    assert!(!written(&scanned.description).contains("GPU-b"));
    // The format allows no spec without a device.
    let scanned = scan(on_host(&folder), Options::default(), &snapshot(&gpus[1..]));
    assert_eq!(cdi::specs(&scanned.description), []);
}

#[test]
fn mig_device_has_parent_node_and_capabilities() {
    let folder = tempdir().unwrap();
    Root::full(folder.path()).hook();
    let mig = |index: u32, uuid: &str, capabilities: &str| {
        format!(
            "{{index: {index}, uuid: {uuid}, gpu_instance: {index}, compute_instance: 0, gpu_slices: 1, \
             compute_slices: 1, memory_mib: 9984{capabilities}}}"
        )
    };
    let migs = [
        mig(0, "MIG-1", ", capabilities: {gpu_instance: 66, compute_instance: 67}"),
        // A UUID in the form of drivers before R470, which CDI does not allow as a name.
        mig(1, "MIG-GPU-p/8/0", ", capabilities: {gpu_instance: 75, compute_instance: 76}"),
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
    assert_eq!(scanned.warnings, [Warning::NoCapabilities { uuid: "MIG-3".parse().unwrap() }]);
    written(&scanned.description);
    let specs = cdi::specs(&scanned.description);
    let devices: Vec<(String, Vec<&str>)> = specs[0]
        .devices
        .iter()
        .map(|device| {
            let nodes = device.container_edits.device_nodes.iter();
            (device.name.clone(), nodes.map(|node| node.path.trim_start_matches("/dev/")).collect())
        })
        .collect();
    let first = vec!["nvidia5", "nvidia-caps/nvidia-cap66", "nvidia-caps/nvidia-cap67"];
    let second = vec!["nvidia5", "nvidia-caps/nvidia-cap75", "nvidia-caps/nvidia-cap76"];
    let mut all: Vec<&str> = first.iter().chain(&second[1..]).copied().collect();
    all.sort_unstable();
    let expected = [
        ("3".to_owned(), vec!["nvidia5"]),
        ("GPU-p".to_owned(), vec!["nvidia5"]),
        ("3:0".to_owned(), first.clone()),
        ("MIG-1".to_owned(), first),
        ("3:1".to_owned(), second),
        ("all".to_owned(), all),
    ];
    assert_eq!(devices, expected);
}

/// Specs whose texts differ in length by far.
fn versions(count: u32) -> Vec<Spec> {
    let gpu = |minor: u32| DeviceEntry {
        names: vec![minor.to_string(), format!("GPU-{minor}")],
        nodes: vec![format!("/dev/nvidia{minor}")],
        files: vec![],
        present: true,
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
                let text = fs::read_to_string(&path).expect("it is always there");
                assert!(texts.contains(&text), "a partial spec:\n{text}");
                seen.insert(text);
            }
            seen
        });
        for turn in 0..300 {
            assert!(cdi::write(folder.path(), &specs[turn % 2 + 1]).unwrap());
        }
        done.store(true, Ordering::Relaxed);
        reader.join().unwrap();
    });
    let names: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, [path.file_name().unwrap()], "nothing is left over");
}

#[test]
fn unchanged_spec_is_not_rewritten() {
    let folder = tempdir().unwrap();
    let inner = folder.path().join("var/run/cdi");
    let spec = &versions(1)[0];
    assert!(cdi::write(&inner, spec).unwrap(), "the folder is made");
    let path = inner.join("k8s.device-plugin.nvidia.com-gpu.json");
    let inode = || std::os::unix::fs::MetadataExt::ino(&fs::metadata(&path).unwrap());
    let before = inode();
    assert!(!cdi::write(&inner, spec).unwrap());
    assert_eq!(inode(), before);
    fs::remove_file(&path).unwrap();
    assert!(cdi::write(&inner, spec).unwrap(), "an operator removed it");
    fs::write(&path, "{}").unwrap();
    assert!(cdi::write(&inner, spec).unwrap(), "an operator changed it");
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
