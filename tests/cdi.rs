//! CDI specs: from a driver root in a temporary folder to the files. Goldens of what is written, each held against the
//! format retold in `cdi/schema.rs`.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "what a helper cannot do fails the test"
)]

#[path = "cdi/root.rs"]
mod root;
#[path = "cdi/schema.rs"]
mod schema;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use linkwise::cdi::{self, Description, Extra, GpuEntry, Library, MigEntry, Oddity, Options, Roots, Spec};
use linkwise::state::{Event, NodeState};
use linkwise::topology::{GpuObservation, MigCapabilities, NodeObservation};
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

/// All specs as they are written, each held against the format.
fn written(description: &Description) -> String {
    let text = |spec: &Spec| {
        let text = spec.json().unwrap();
        assert_eq!(schema::check(&text), [""; 0], "{}:\n{text}", spec.kind);
        format!("{}:\n{text}", spec.file_name())
    };
    cdi::specs(description).iter().map(text).collect::<Vec<_>>().join("\n")
}

#[test]
fn a_host_with_hooks_and_everything_else() {
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
    let look = cdi::look(&on_host(&folder), &options, &snapshot(&TWO));
    assert_eq!(look.oddities, []);
    insta::assert_snapshot!(written(&look.description));
}

#[test]
fn a_driver_container_without_hooks() {
    let folder = tempdir().unwrap();
    let root = Root::full(folder.path());
    // On a driver container's root nobody looks for the host's programs.
    root.hook();
    let roots = Roots { dev: "/run/nvidia/driver".into(), ..in_driver_container(&folder) };
    let look = cdi::look(&roots, &Options::default(), &snapshot(&TWO));
    assert_eq!(look.oddities, [Oddity::NoHook { path: "/usr/bin/nvidia-cdi-hook".to_owned() }]);
    insta::assert_snapshot!(written(&look.description));
}

#[test]
fn an_older_toolkit_has_its_hooks_one_level_down() {
    let folder = tempdir().unwrap();
    Root::full(folder.path());
    let options = Options { hook: Some("/usr/bin/nvidia-ctk".to_owned()), ..Options::default() };
    let look = cdi::look(&in_driver_container(&folder), &options, &snapshot(&TWO));
    assert_eq!(look.oddities, []);
    let spec = &cdi::specs(&look.description)[0];
    let args: Vec<String> = spec.container_edits.hooks.iter().map(|hook| hook.args[..4].join(" ")).collect();
    assert_eq!(args[0], "nvidia-ctk hook create-symlinks --link");
    assert_eq!(args[1], "nvidia-ctk hook update-ldcache --folder");
}

#[test]
fn hooks_are_left_out_by_name_and_what_they_would_do_is_done_without_them() {
    let folder = tempdir().unwrap();
    Root::full(folder.path()).hook();
    // The hooks of the spec, and whether a link's name is mounted.
    let made = |names: &[&str]| {
        let disabled_hooks = names.iter().map(|name| (*name).to_owned()).collect();
        let options = Options { disabled_hooks, ..Options::default() };
        let look = cdi::look(&on_host(&folder), &options, &snapshot(&TWO));
        // Who wants none is not told that there are none.
        assert_eq!(look.oddities, []);
        written(&look.description);
        let edits = &cdi::specs(&look.description)[0].container_edits;
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
fn libraries_are_those_of_the_driver_that_is_loaded() {
    let names = |libraries: &[Library]| libraries.iter().map(|library| library.name.clone()).collect::<Vec<_>>();
    let look = |folder: &TempDir| cdi::look(&on_host(folder), &Options::default(), &snapshot(&TWO));
    let folder = tempdir().unwrap();
    let root = Root::empty(folder.path());
    root.driver("535.9");
    root.driver("535.10.1");
    let newest = ["libcuda.so.535.10.1", "libnvidia-ml.so.535.10.1", "libnvidia-ptxjitcompiler.so.535.10.1"];
    assert_eq!(names(&look(&folder).description.driver.libraries), newest, "libcuda.so.1 says so");
    fs::remove_file(folder.path().join(LIBRARIES).join("libcuda.so.1")).unwrap();
    assert_eq!(names(&look(&folder).description.driver.libraries), newest, "10 is more than 9");
    root.link(&format!("{LIBRARIES}/libcuda.so.1"), "libcuda.so.535.9");
    assert_eq!(look(&folder).description.driver.version.as_deref(), Some("535.9"));
    root.loaded("535.10.1");
    assert_eq!(names(&look(&folder).description.driver.libraries), newest, "the kernel knows best");
    // An update that is not finished: other libraries than the kernel's are of no use.
    root.loaded("550.1");
    let seen = look(&folder);
    assert_eq!(names(&seen.description.driver.libraries), [""; 0]);
    let said: Vec<String> = seen.oddities.iter().map(ToString::to_string).collect();
    assert!(said[0].contains("no libcuda.so.550.1 below"), "{said:?}");
}

#[test]
fn a_root_without_libraries_is_told_of_with_its_folders_and_has_device_nodes_all_the_same() {
    let folder = tempdir().unwrap();
    let root = Root::empty(folder.path());
    root.node("nvidiactl");
    let look = cdi::look(&on_host(&folder), &Options::default(), &snapshot(&TWO));
    let said = look.oddities[0].to_string();
    for part in ["libcuda.so.*", &folder.path().display().to_string(), "usr/lib64, usr/lib/x86_64-linux-gnu,"] {
        assert!(said.contains(part), "{said}");
    }
    let specs = cdi::specs(&look.description);
    let nodes: Vec<&str> =
        specs[0].devices.iter().map(|device| device.container_edits.device_nodes[0].path.as_str()).collect();
    assert_eq!(nodes, ["/dev/nvidia0", "/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia1", "/dev/nvidia0"]);
    assert_eq!(specs[0].container_edits.device_nodes[0].path, "/dev/nvidiactl");
    assert_eq!(specs[0].container_edits.mounts, []);
    written(&look.description);
}

#[test]
fn a_gpu_that_is_gone_keeps_its_uuid_and_not_its_index() {
    let folder = tempdir().unwrap();
    Root::full(folder.path());
    let names = |snapshot: &NodeState| {
        let look = cdi::look(&on_host(&folder), &Options::default(), snapshot);
        written(&look.description);
        let specs = cdi::specs(&look.description);
        specs[0].devices.iter().map(|device| device.name.clone()).collect::<Vec<_>>()
    };
    let before = snapshot(&TWO);
    assert_eq!(names(&before), ["0", "GPU-a", "1", "GPU-b", "all"]);
    // GPU-a left; GPU-b is the first now, as NVML counts.
    let after = observed(before, &[(0, "GPU-b", "0000:41:00.0", Some(1))]);
    assert_eq!(names(&after), ["GPU-a", "0", "GPU-b", "all"]);
    let look = cdi::look(&on_host(&folder), &Options::default(), &after);
    let specs = cdi::specs(&look.description);
    let all = &specs[0].devices[3].container_edits.device_nodes;
    assert_eq!(all.iter().map(|node| node.path.as_str()).collect::<Vec<_>>(), ["/dev/nvidia1"]);
}

#[test]
fn a_gpu_without_a_minor_number_is_left_out_and_told_of() {
    let folder = tempdir().unwrap();
    Root::full(folder.path()).hook();
    let gpus = [TWO[0], (1, "GPU-b", "0000:41:00.0", None)];
    let look = cdi::look(&on_host(&folder), &Options::default(), &snapshot(&gpus));
    assert_eq!(look.oddities, [Oddity::NoMinor { uuid: "GPU-b".parse().unwrap() }]);
    assert!(!written(&look.description).contains("GPU-b"));
    // With no GPU at all there is nothing that the format can say.
    let look = cdi::look(&on_host(&folder), &Options::default(), &snapshot(&gpus[1..]));
    assert_eq!(cdi::specs(&look.description), []);
}

#[test]
fn mig_devices_have_their_parents_node_and_their_capabilities() {
    let mig = |index, uuid: &str, caps: (u32, u32)| MigEntry {
        uuid: uuid.parse().unwrap(),
        gpu_index: 3,
        gpu_minor: 5,
        index,
        capabilities: MigCapabilities { gpu_instance: caps.0, compute_instance: caps.1 },
    };
    let gpu = GpuEntry {
        uuid: "GPU-p".parse().unwrap(),
        index: 3,
        pci: "0000:81:00.0".parse().unwrap(),
        minor: 5,
        present: true,
        dri: vec![],
    };
    let description = Description {
        driver_root: "/".to_owned(),
        dev_root: "/".to_owned(),
        gpus: vec![gpu],
        // The second has a UUID in the form of drivers before R470, which is no name in CDI.
        migs: vec![mig(0, "MIG-1", (66, 67)), mig(1, "MIG-GPU-p/8/0", (75, 76))],
        ..Description::default()
    };
    written(&description);
    let specs = cdi::specs(&description);
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

/// Three specs whose texts differ in length by far.
fn versions(count: u32) -> Vec<Spec> {
    let gpu = |minor| GpuEntry {
        uuid: format!("GPU-{minor}").parse().unwrap(),
        index: minor,
        pci: "0000:01:00.0".parse().unwrap(),
        minor,
        present: true,
        dri: vec![],
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
fn a_reader_sees_one_whole_spec_or_the_other() {
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
                assert!(texts.contains(&text), "neither the one nor the other:\n{text}");
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
fn what_is_there_already_is_not_written_again() {
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
    assert!(cdi::write(&inner, spec).unwrap(), "somebody took it away");
    fs::write(&path, "{}").unwrap();
    assert!(cdi::write(&inner, spec).unwrap(), "somebody wrote into it");
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
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
fn the_retold_format_sees_what_is_wrong() {
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
