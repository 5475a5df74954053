//! The kit for a first run on a real GPU (`lab/gpu-kit`), packed from the test build and run on the fake NVML library.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use fake_nvml::Control;
use tempfile::TempDir;

/// Packs the kit from the programs of the test build; returns its folder.
fn packed(folder: &TempDir) -> PathBuf {
    let built = Path::new(env!("CARGO_BIN_EXE_linkwise")).parent().unwrap();
    assert!(built.join("linkwise-lab").exists(), "run cargo build -p linkwise-lab, as make test does");
    let kit = folder.path().join("kit");
    let pack = Path::new(env!("CARGO_MANIFEST_DIR")).join("lab/gpu-kit/pack.sh");
    // The kit's size limit is raised because these programs are not optimised.
    let output = Command::new(pack).arg(built).arg(&kit).env("GPU_KIT_MOST_MIB", "500").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    kit
}

fn run(kit: &Path, report: &Path, variables: &[(&str, &Path)]) -> (Output, String) {
    let mut command = Command::new(kit.join("run.sh"));
    command.arg(report).env_remove("LINKWISE_NVML_LIBRARY").env("LINKWISE_KIT_IDLE", "0");
    command.envs(variables.iter().copied());
    let output = command.output().unwrap();
    let summary = fs::read_to_string(report.join("summary.txt")).unwrap_or_default();
    (output, summary)
}

/// A libcuda whose faults go through a GPU's device node, here a file: it writes the XID into the file and waits until
/// [`report_xids`] has answered in the file. In a container it has the GPU whose node it sees, if it sees only one.
const LIBCUDA: &str = include_str!("gpu_kit.c");

/// Makes a driver root with the fake NVML library and [`LIBCUDA`]; returns the path of its NVML library.
fn driver_root(root: &Path) -> PathBuf {
    let libraries = root.join("usr/lib/x86_64-linux-gnu");
    fs::create_dir_all(&libraries).unwrap();
    fs::create_dir_all(root.join("dev")).unwrap();
    for gpu in 0..8 {
        fs::write(root.join(format!("dev/nvidia{gpu}")), "").unwrap();
    }
    fs::write(root.join("libcuda.c"), LIBCUDA).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-Wall", "-Werror", "-Wl,-soname,libcuda.so.1", "-o"]);
    compiler.arg(libraries.join("libcuda.so.570.1")).arg(root.join("libcuda.c"));
    // NVIDIA's libcuda depends on these parts of the C library, which a container without an image lacks.
    compiler.args(["-Wl,--no-as-needed", "-l:libdl.so.2", "-l:libpthread.so.0", "-l:librt.so.1"]);
    assert!(compiler.status().unwrap().success());
    symlink("libcuda.so.570.1", libraries.join("libcuda.so.1")).unwrap();
    let library = libraries.join("libnvidia-ml.so.1");
    symlink(fake_nvml::library_path(), &library).unwrap();
    library
}

/// Reports each XID that a process writes into a GPU's device node, until `end` is true; returns GPUs and XIDs.
fn report_xids(root: &Path, control: &Control, end: &AtomicBool) -> Vec<(usize, String)> {
    let mut reported = Vec::new();
    while !end.load(Ordering::Relaxed) {
        for gpu in 0..8 {
            let node = root.join(format!("dev/nvidia{gpu}"));
            let text = fs::read_to_string(&node).unwrap();
            if let Some(xid) = text.strip_suffix('\n').filter(|xid| !xid.starts_with("ok")) {
                control.send(&format!("xid {gpu} {xid}")).unwrap();
                reported.push((gpu, xid.to_owned()));
                fs::write(node, "ok\n").unwrap();
            }
        }
        thread::park_timeout(Duration::from_millis(10));
    }
    reported
}

#[test]
#[cfg_attr(not(target_arch = "x86_64"), ignore = "the kit is for x86-64 only")]
fn kit_reports_calls_admission_claim_and_faults() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let kit = packed(&folder);
    let (root, library, end) = (at("driver"), driver_root(&at("driver")), Arc::new(AtomicBool::new(false)));
    fs::create_dir(at("sys")).unwrap();
    let (nodes, control, ends) = (root.clone(), Control::new(at("control")), Arc::clone(&end));
    let driver = thread::spawn(move || report_xids(&nodes, &control, &ends));
    let machine = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/host/src/machines/dgx-h100.yaml");
    let (control, device, sys) = (at("control"), root.join("dev/nvidia0"), at("sys"));
    let variables = [
        ("LINKWISE_NVML_LIBRARY", library.as_path()),
        ("NVIDIA_DRIVER_ROOT", root.as_path()),
        ("LINKWISE_SYSFS", sys.as_path()),
        ("FAKE_NVML_MACHINE", machine.as_path()),
        ("FAKE_NVML_CONTROL", control.as_path()),
        ("FAKE_CUDA_DEVICE", device.as_path()),
    ];
    let (output, summary) = run(&kit, &at("report"), &variables);
    end.store(true, Ordering::Relaxed);
    let reported = driver.join().unwrap();
    let labels = fs::read_to_string(at("report/labels.txt"));
    assert!(output.status.success(), "{summary}\n{output:?}\nlabels.txt: {labels:?}");
    let xids: Vec<&str> = reported.iter().map(|(_, xid)| xid.as_str()).collect();
    // First the device plugin's two faults, then one after the resume, those during the takeover, one after it, and
    // DRA's two.
    let [first, second, resumed, takeover @ .., after, third, fourth] = &xids[..] else {
        panic!("{xids:?}: {summary}")
    };
    assert_eq!([first, second, resumed, after, third, fourth].map(|xid| *xid), ["31", "13", "31", "31", "31", "13"]);
    assert!(!takeover.is_empty() && takeover.iter().all(|xid| *xid == "31"), "{xids:?}: {summary}");
    for line in [
        "ok: registered, 8 healthy",
        "ok: plugin: ",
        "ok: agent: ",
        "ok: fault mmu (exit status: 0): its XID 31 is logged and counted: 0, then 1",
        "ok: fault misaligned (exit status: 0): its XID 13 is logged and counted: 0, then 1",
        "ok: after the faults 8 of 8 GPUs are healthy",
        "ok: processes with the driver's library or nodes: 1, after the release 0",
        "ok: NVML is available after the resume; processes using the driver: 1",
        "ok: after the resume the kubelet has the same healthy devices, and the pod its own",
        "ok: an XID after the resume is counted",
        &format!("ok: XIDs during a takeover: {}, unseen: 0; counted ", takeover.len()),
        "ok: an XID after the end of the first process is counted by the second",
        "ok: after the takeover the kubelet has the same healthy devices, and the pod its own",
        "ok: DRA: published GPUs: 8, slices: 1",
        "ok: DRA: a claim for gpu-",
        "ok: DRA: after the faults 8 of 8 GPUs have no taint",
        "ok: DRA: the claim is unprepared, and its CDI spec is gone",
        "all steps passed",
    ] {
        assert!(summary.contains(line), "{line}: {summary}");
    }
    // Root can make containers. Another user cannot on some machines, and then the summary reports it.
    if is_root() || !summary.contains("LOOK: DRA: the faulting programs run without a container: ") {
        let (gpu, _) = reported[reported.len() - 2];
        let contained = format!(r#"run in a container with ["/dev/nvidia{gpu}""#);
        assert!(summary.contains(&format!("ok: DRA: the faulting programs {contained}")), "{summary}");
        for xid in [31, 13] {
            let counted = format!("its XID {xid} is logged and counted for GPU-");
            assert!(summary.lines().any(|line| line.starts_with("ok: fault ") && line.contains(&counted)), "{summary}");
        }
        let inside = fs::read_to_string(at("report/fault-0-dra.txt")).unwrap();
        assert!(inside.contains("cuInit: 0") && inside.ends_with("cuCtxSynchronize: 700\n"), "{inside}");
    }
    let read = |name: &str| fs::read_to_string(at("report").join(name)).unwrap();
    let calls = read("nvml-calls.tsv");
    let init = calls.lines().next().unwrap();
    assert!(init.starts_with("nvmlInit_v2\t-\t0\t"), "{init}");
    assert!(calls.lines().any(|line| line.starts_with("nvmlDeviceGetName\t7\t0\t")), "{calls}");
    let spec = read("cdi-claim.json");
    assert!(spec.contains("libcuda.so.570.1"), "{spec}");
    let named = |gpu: &usize| spec.contains(&format!("\"/dev/nvidia{gpu}\""));
    assert_eq!((0..8).filter(named).count(), 1, "{spec}");
    for (file, text) in [("slices.json", "\"gpu-7\""), ("idle.tsv", "\nagent\t0\t"), ("system-calls.tsv", "\t")] {
        assert!(read(file).contains(text), "{file}: {}", read(file));
    }
    let machine = fs::read_to_string(at("report/machine.yaml")).unwrap();
    assert!(machine.contains("NVIDIA H100 80GB HBM3") && !machine.contains("GPU-00000002-0000-4000-8000-000000000000"));
    let answer = fs::read_to_string(at("report/allocate.txt")).unwrap();
    assert!(answer.contains("/dev/nvidia") && answer.contains("NVIDIA_VISIBLE_DEVICES"), "{answer}");
}

fn is_root() -> bool {
    fs::metadata("/proc/self").unwrap().uid() == 0
}

#[test]
fn machine_without_a_driver_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let kit = Path::new(env!("CARGO_MANIFEST_DIR")).join("lab/gpu-kit");
    // The machine that runs this test may have a driver, so the kit looks in an empty folder.
    let (output, summary) = run(&kit, &folder.path().join("report"), &[("LINKWISE_KIT_FOLDERS", folder.path())]);
    assert!(output.status.success());
    assert_eq!(summary, "no GPU: there is no libnvidia-ml.so.1, and nothing was done\n");
}
