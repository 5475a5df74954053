//! `linkwise doctor` on healthy and broken machines. Tests cause the faults behind most findings that are not `ok`.

mod gpus;

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;

use linkwise_kubelet_box::KubeletBox;
use serde_json::Value;
use tokio::process::Command;
use tokio::time::timeout;

use crate::dra::published::golden;
use crate::run::node::{LIMIT, Setup, fifo, machine, started_by, stranger, wait_registered};

/// A machine without faults; the test's folder stands for the file system that a container sees.
fn healthy() -> (Setup, KubeletBox) {
    let setup = Setup::on("dgx1-v100");
    setup.all_on_bus();
    with_host(setup)
}

/// Adds the rest of a healthy node: device nodes (any character device will do), a kernel module's version, a kubelet.
fn with_host(setup: Setup) -> (Setup, KubeletBox) {
    for folder in ["dev/nvidia-caps", "proc/driver/nvidia"] {
        fs::create_dir_all(setup.at(folder)).unwrap();
    }
    for node in (0..8).map(|minor| format!("nvidia{minor}")).chain(["nvidiactl".into(), "nvidia-uvm".into()]) {
        symlink("/dev/null", setup.at("dev").join(node)).unwrap();
    }
    let module = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025\n";
    fs::write(setup.at("proc/driver/nvidia/version"), module).unwrap();
    let kubelet = setup.kubelet();
    (setup, kubelet)
}

/// Runs a command, and returns its exit code and standard output.
async fn run(mut command: Command) -> (Option<i32>, String) {
    let output = timeout(LIMIT, command.output()).await.expect("the doctor did not end in time").unwrap();
    let lines: Vec<&str> = std::str::from_utf8(&output.stderr).unwrap().lines().collect();
    assert!(lines.iter().all(|line| line.starts_with("fake-nvml:")), "{lines:?}");
    (output.status.code(), String::from_utf8(output.stdout).unwrap())
}

/// Runs the doctor, and checks that its exit code fits and that each bad finding has advice.
async fn look(setup: &Setup, more: &[&str]) -> Value {
    let mut command = setup.doctor();
    command.args(["--format", "json"]).args(more);
    let (code, text) = run(command).await;
    let report: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert_eq!(code, Some(i32::from(report["failed"].as_u64().unwrap() > 0)), "{text}");
    for finding in report["findings"].as_array().unwrap() {
        let bad = finding["status"] == "warning" || finding["status"] == "failed";
        assert!(!bad || finding["advice"].as_str().is_some_and(|advice| advice.len() > 10), "{finding}");
    }
    report
}

/// The number of findings of a check with this status and this text.
fn count(report: &Value, check: &str, status: &str, text: &str) -> usize {
    let is = |finding: &&Value| {
        let what = finding["what"].as_str().unwrap();
        finding["check"] == check && finding["status"] == status && what.contains(text)
    };
    report["findings"].as_array().unwrap().iter().filter(is).count()
}

/// Asserts that there is such a finding.
fn found(report: &Value, check: &str, status: &str, text: &str) {
    assert!(count(report, check, status, text) > 0, "no {status} in {check} with '{text}': {report:#}");
}

/// Asserts that there is no such finding.
fn absent(report: &Value, check: &str, status: &str, text: &str) {
    assert_eq!(count(report, check, status, text), 0, "{status} in {check} with '{text}': {report:#}");
}

/// Asserts that findings have this text, each with this advice.
fn advised(report: &Value, what: &str, advice: &str) {
    let says = |value: &Value, text: &str| value.as_str().is_some_and(|words| words.contains(text));
    let findings = report["findings"].as_array().unwrap();
    let is = |finding: &&Value| says(&finding["what"], what);
    let advised = findings.iter().filter(is).all(|finding| says(&finding["advice"], advice));
    assert!(advised && findings.iter().any(|finding| is(&finding)), "'{what}', '{advice}': {findings:#?}");
}

/// Compares a report with its golden file in tests/snapshots.
fn assert_golden(setup: &Setup, name: &str, text: &str) {
    let uid = std::os::unix::fs::MetadataExt::uid(&fs::metadata(setup.at("")).unwrap());
    let root = setup.at("").display().to_string();
    let text = text.replace(root.trim_end_matches('/'), "ROOT").replace(&format!("as uid {uid}"), "as uid N");
    golden::assert_golden(name, &text);
}

#[tokio::test]
async fn healthy_report_matches_golden_files() {
    let (setup, _kubelet) = healthy();
    let (code, text) = run(setup.doctor()).await;
    assert_golden(&setup, "doctor-dgx1-v100.txt", &text);
    assert_eq!(code, Some(0), "{text}");
    let mut command = setup.doctor();
    command.args(["--format", "json"]);
    let (code, json) = run(command).await;
    assert_golden(&setup, "doctor-dgx1-v100.json", &json);
    assert_eq!(code, Some(0), "{json}");
}

#[tokio::test]
async fn node_without_gpus_is_ok() {
    let mut setup = Setup::on("dgx1-v100");
    setup.library = "/no/such/libnvidia-ml.so.1".into();
    fs::create_dir_all(setup.at("sys/bus/pci/devices")).unwrap();
    let _kubelet = setup.kubelet();
    let (code, text) = run(setup.doctor()).await;
    assert_golden(&setup, "doctor-no-gpu.txt", &text);
    assert_eq!(code, Some(0), "{text}");
}

#[tokio::test]
async fn unavailable_driver_reports_cause_and_remedy() {
    let remedy = |report: &Value, text: &str| {
        let advice = report["findings"][0]["advice"].as_str().unwrap();
        assert!(advice.contains(text), "{advice}");
    };
    for (code, cause, advice) in [
        ("9", "NVML_ERROR_DRIVER_NOT_LOADED (9)", "modprobe nvidia"),
        ("18", "NVML_ERROR_LIB_RM_VERSION_MISMATCH (18)", "different releases"),
        ("4", "NVML_ERROR_NO_PERMISSION (4)", "permissions"),
        ("15", "NVML_ERROR_GPU_IS_LOST (15)", "reboot"),
        ("999", "NVML_ERROR_UNKNOWN (999)", "dmesg"),
    ] {
        let (setup, _kubelet) = healthy();
        fs::remove_file(setup.at("proc/driver/nvidia/version")).unwrap();
        setup.tell(&format!("init {code}"));
        let report = look(&setup, &[]).await;
        found(&report, "driver", "failed", cause);
        remedy(&report, advice);
        found(&report, "gpus", "skipped", "NVML unavailable");
    }
    let (mut setup, _kubelet) = healthy();
    setup.tell("init 9");
    remedy(&look(&setup, &[]).await, "cannot reach it");
    setup.library = "/no/such/libnvidia-ml.so.1".into();
    let report = look(&setup, &[]).await;
    found(&report, "driver", "failed", "cannot load /no/such/libnvidia-ml.so.1");
    remedy(&report, "runtimeClassName: nvidia");
}

#[tokio::test]
async fn hung_check_times_out_and_delays_no_other() {
    let (setup, _kubelet) = healthy();
    let look = async |setup: &Setup| look(setup, &["--timeout", "1"]).await;
    for call in ["nvmlInit_v2", "nvmlDeviceGetName"] {
        setup.tell(&format!("hang {call}"));
        let report = look(&setup).await;
        found(&report, "driver", "failed", "NVML does not answer within 1s");
        found(&report, "sysfs", "ok", "8 NVIDIA GPUs on the PCI bus");
        setup.tell(&format!("unhang {call}"));
    }
    // An agent that does not end is killed.
    setup.tell("hang nvmlShutdown");
    found(&look(&setup).await, "driver", "ok", "NVML answers");
    let recorded = setup.at("host.xml");
    fifo(&recorded);
    let setup = setup.host(recorded.to_str().unwrap());
    let report = look(&setup).await;
    found(&report, "topology", "failed", "no answer within 1s");
    found(&report, "kubelet", "ok", "kubelet.sock answers");
    found(&report, "container runtime", "skipped", "no CDI spec");
    fifo(&setup.at("etc/cdi/nvidia.yaml"));
    found(&look(&setup).await, "container runtime", "failed", "no answer within 1s");
    setup.hung_on_bus();
    found(&look(&setup).await, "sysfs", "failed", "no answer within 1s");
}

#[tokio::test]
async fn other_module_version_and_missing_minor_are_named() {
    let (setup, _kubelet) = healthy();
    let setup = setup.env("FAKE_NVML_FAIL", "3:nvmlDeviceGetMinorNumber:3");
    let module = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.1.2  Release Build\n";
    fs::write(setup.at("proc/driver/nvidia/version"), module).unwrap();
    let report = look(&setup, &[]).await;
    found(&report, "driver", "failed", "the kernel module has version 570.1.2, but the driver reports 580.95.05");
    found(&report, "device nodes", "ok", "all 8 nodes are there");
    found(&report, "device nodes", "warning", "NVML does not report the device nodes of 1 of the GPUs");
}

#[tokio::test]
async fn missing_or_unusable_device_nodes_are_named() {
    let (setup, _kubelet) = healthy();
    for name in ["nvidia3", "nvidia-uvm", "nvidia4", "nvidia5"] {
        fs::remove_file(setup.at("dev").join(name)).unwrap();
    }
    fs::remove_dir(setup.at("dev/nvidia-caps")).unwrap();
    fs::write(setup.at("dev/nvidia4"), "").unwrap();
    // A process without a terminal cannot open /dev/tty.
    symlink("/dev/tty", setup.at("dev/nvidia5")).unwrap();
    let mut command = started_by(&["setsid", "--wait"], &setup.doctor());
    command.args(["--format", "json"]);
    let (code, text) = run(command).await;
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(code, Some(1), "{text}");
    found(&report, "device nodes", "failed", "dev/nvidia3: No such file");
    found(&report, "device nodes", "failed", "dev/nvidia4 is not a character device");
    found(&report, "device nodes", "skipped", "there is no");
    found(&report, "permissions", "failed", "dev/nvidia5: No such device");
    absent(&report, "device nodes", "ok", "nodes are there");
    absent(&report, "permissions", "ok", "can be opened");
}

#[tokio::test]
async fn gpus_of_kernel_and_nvml_are_compared() {
    let (setup, _kubelet) = healthy();
    for (pci, driver) in [("0000:b0:00.0", Some("nvidia")), ("0000:b1:00.0", Some("vfio-pci")), ("0000:b2:00.0", None)]
    {
        setup.on_bus(pci);
        if let Some(driver) = driver {
            symlink(format!("../../drivers/{driver}"), setup.at("sys/bus/pci/devices").join(pci).join("driver"))
                .unwrap();
        }
    }
    absent(&look(&setup, &[]).await, "sysfs", "ok", "NVML lists the same");
    fs::remove_dir_all(setup.at("sys/bus/pci/devices/0000:8a:00.0")).unwrap();
    let report = look(&setup, &[]).await;
    found(&report, "sysfs", "failed", "0000:b0:00.0 is on the PCI bus, but NVML does not list it");
    found(&report, "sysfs", "warning", "0000:b1:00.0 is on the PCI bus, and bound to vfio-pci");
    found(&report, "sysfs", "failed", "0000:b2:00.0 is on the PCI bus, and bound to no driver");
    found(&report, "sysfs", "warning", "1 of 8 GPUs that NVML lists are not on the PCI bus");
    fs::remove_dir_all(setup.at("sys")).unwrap();
    found(&look(&setup, &[]).await, "sysfs", "failed", "there is no PCI bus under");
    // Without a PCI bus the node may have GPUs, so that an unavailable driver is a failure.
    setup.tell("init 9");
    found(&look(&setup, &[]).await, "driver", "failed", "NVML_ERROR_DRIVER_NOT_LOADED (9)");
}

#[tokio::test]
async fn same_finding_on_eight_gpus_is_one_entry() {
    let (setup, _kubelet) = healthy();
    let faults: Vec<String> = (0..8).map(|gpu| format!("{gpu}:nvmlDeviceRegisterEvents:999")).collect();
    let setup = setup.env("FAKE_NVML_FAIL", &faults.join(","));
    for minor in 0..8 {
        fs::remove_file(setup.at(&format!("dev/nvidia{minor}"))).unwrap();
        setup.on_bus(&format!("0000:b{minor}:00.0"));
    }
    let report = look(&setup, &[]).await;
    for (check, status, text) in [
        ("device nodes", "failed", "dev/nvidia0: No such file or directory (os error 2) (and 7 like it)"),
        ("sysfs", "failed", "GPU 0000:b0:00.0 is on the PCI bus, and bound to no driver (and 7 like it)"),
        ("gpus", "warning", "nvmlDeviceRegisterEvents: NVML_ERROR_UNKNOWN (999) (and 7 like it)"),
    ] {
        found(&report, check, status, text);
        assert_eq!(count(&report, check, status, ""), 1, "{check}: {report:#}");
    }
    // Findings of two kinds stay two entries, whatever their advice. Up to three of a kind are listed one by one.
    setup.tell_all(&["recovery 0 1", "rows 1 false true"]);
    for gpu in 2..8 {
        setup.tell(&format!("recovery {gpu} 2"));
    }
    let report = look(&setup, &[]).await;
    found(&report, "gpus", "failed", "the driver asks for: GPU reset");
    found(&report, "gpus", "failed", "a row remapping failed");
    found(&report, "gpus", "failed", "(and 5 like it)");
    assert_eq!(count(&report, "gpus", "failed", ""), 3, "{report:#}");
}

#[tokio::test]
async fn topology_warnings_come_with_advice() {
    let link = ", nvlinks: [{links: [0, 1], remote: {gpu: \"0000:02:00.0\"}}]";
    let gpus = [("GPU-a", "0000:01:00.0", link), ("GPU-b", "0000:02:00.0", ", nvlinks: []")];
    let (setup, _kubelet) = with_host(Setup::with(&machine(&gpus)));
    setup.on_bus("0000:01:00.0");
    setup.on_bus("0000:02:00.0");
    let report = look(&setup, &[]).await;
    found(&report, "topology", "warning", "2 NVLink(s) seen from one end, 0 from the other");
    found(&report, "topology", "warning", "GPU 0000:01:00.0: not in the host's PCI tree");
}

#[tokio::test]
async fn odd_gpu_and_unknown_nvlinks_are_reported() {
    let links = ", nvlinks: [{links: [0, 1], remote: {switch: null}}]";
    let gpus = [
        ("GPU-a", "0000:01:00.0", links),
        ("GPU-b", "0000:02:00.0", ", nvlinks: []"),
        ("GPU-c", "0000:03:00.0", links),
    ];
    let (setup, _kubelet) = with_host(Setup::with(&machine(&gpus)));
    let report = look(&setup, &[]).await;
    let odd = "GPU 0000:02:00.0 is the odd one of 3 GPUs of its model: 0 of its NVLinks are up";
    found(&report, "topology", "warning", odd);
    advised(&report, odd, "drain the node, then linkwise admin release, nvidia-smi --gpu-reset");
    let node = setup.start().await;
    node.metric("linkwise_gpu_odd{uuid=\"GPU-b\",what=\"nvlinks\"}", 1).await;
    let setup = node.end().await.env("FAKE_NVML_FAIL", "*:nvmlDeviceGetNvLinkState:999");
    let report = look(&setup, &[]).await;
    advised(&report, "their NVLinks are unknown", "update the driver or reboot");
}

#[tokio::test]
async fn absent_kubelet_is_reported_by_cause() {
    let (mut setup, kubelet) = healthy();
    kubelet.stop().await.unwrap();
    found(&look(&setup, &[]).await, "kubelet", "failed", "kubelet.sock: no process listens on it");
    fs::remove_file(&setup.kubelet_socket).unwrap();
    found(&look(&setup, &[]).await, "kubelet", "failed", "kubelet.sock: does not exist");
    fs::write(&setup.kubelet_socket, "").unwrap();
    found(&look(&setup, &[]).await, "kubelet", "failed", "kubelet.sock: is not a socket");
    found(&look(&setup, &[]).await, "kubelet", "skipped", "p/kubelet.sock: no process listens on it");
    // A kubelet that hangs: the kernel accepts connections for it until its queue is full.
    fs::remove_file(&setup.kubelet_socket).unwrap();
    let _hanging = UnixListener::bind(&setup.kubelet_socket).unwrap();
    let silent = "kubelet.sock: a process listens, and does not answer within 2s";
    found(&look(&setup, &[]).await, "kubelet", "failed", silent);
    let mut waiting = Vec::new();
    while let Ok(stream) = tokio::net::UnixStream::connect(&setup.kubelet_socket).await {
        waiting.push(stream);
    }
    let report = look(&setup, &[]).await;
    found(&report, "kubelet", "failed", silent);
    advised(&report, silent, "the kubelet hangs");
    fs::remove_dir_all(setup.at("k")).unwrap();
    found(&look(&setup, &[]).await, "kubelet", "failed", "No such file or directory");
    fs::write(setup.at("k"), "").unwrap();
    found(&look(&setup, &[]).await, "kubelet", "failed", "Not a directory");
    // A folder that takes no file, and a path without a folder.
    setup.kubelet_socket = "/proc/kubelet.sock".into();
    found(&look(&setup, &[]).await, "kubelet", "failed", "/proc: ");
    setup.kubelet_socket = "kubelet.sock".into();
    found(&look(&setup, &[]).await, "kubelet", "failed", "'kubelet.sock' is not the path of a kubelet socket");
}

#[tokio::test]
async fn other_plugins_in_kubelet_folder_are_named() {
    let (setup, kubelet) = healthy();
    let node = setup.start().await;
    wait_registered(&kubelet, 1, 8).await;
    let setup = &node.setup;
    let own = setup.sockets().remove(0);
    let report = look(setup, &[]).await;
    found(&report, "plugins", "ok", "linkwise serves linkwise-nvidia.com_gpu-");
    assert_eq!(kubelet.state().resources["nvidia.com/gpu"].open_streams, 1, "the kubelet lost its stream");

    // Symlinks to linkwise's socket stand for other plugins.
    let folder = own.parent().unwrap();
    let mig = "linkwise-nvidia.com_mig-1g.10gb-";
    let twins = [format!("{mig}00000000.sock"), format!("{mig}11111111.sock")];
    for name in ["nvidia-gpu.sock", "linkwise-nvidia.com_gpu-00000000.sock", "sriov.sock", &twins[0], &twins[1]] {
        symlink(&own, folder.join(name)).unwrap();
    }
    drop(UnixListener::bind(folder.join("linkwise-nvidia.com_gpu-11111111.sock")).unwrap());
    drop(UnixListener::bind(folder.join("dead.sock")).unwrap());
    let _silent = UnixListener::bind(folder.join("silent.sock")).unwrap();
    let listener = UnixListener::bind(folder.join("stranger.sock")).unwrap();
    let answering = stranger(listener, 1, b"HTTP/1.1 400 Bad Request\r\n\r\n");
    let report = look(setup, &[]).await;
    answering.join().unwrap();
    found(&report, "plugins", "failed", "the NVIDIA device plugin serves nvidia-gpu.sock");
    found(&report, "plugins", "warning", "2 linkwise serve nvidia.com/gpu: linkwise-nvidia.com_gpu-00000000.sock, ");
    found(&report, "plugins", "warning", "linkwise-nvidia.com_gpu-11111111.sock was left by a linkwise that has ended");
    found(&report, "plugins", "warning", "silent.sock: a process listens, and does not answer within 2s");
    found(&report, "plugins", "warning", "stranger.sock: a process listens, and is not a device plugin");
    found(&report, "plugins", "ok", "other plugins: sriov.sock");
    let both = format!("2 linkwise serve nvidia.com/mig-1g.10gb: {}", twins.join(", "));
    found(&report, "plugins", "warning", &both);
    assert!(!report.to_string().contains("dead.sock"), "no plugin is known to own it, and the next kubelet removes it");
}

#[tokio::test]
async fn broken_and_duplicate_cdi_specs_are_reported() {
    let (setup, _kubelet) = healthy();
    let spec = "cdiVersion: 0.6.0\nkind: nvidia.com/gpu\ndevices: [{name: '0'}, {name: all}]\ncontainerEdits: {}\n";
    let write = |path: &str, text: &str| {
        fs::create_dir_all(setup.at(path).parent().unwrap()).unwrap();
        fs::write(setup.at(path), text).unwrap();
    };
    let before = look(&setup, &[]).await["warnings"].clone();
    write("etc/cdi/nvidia.yaml", spec);
    write("etc/cdi/other.json", "{\"cdiVersion\": \"0.6.0\", \"kind\": \"example.com/nic\", \"devices\": []}");
    write("etc/cdi/notes.txt", "no spec");
    write(
        "var/run/cdi/ours.json",
        "{\"kind\": \"k8s.device-plugin.nvidia.com/gpu\", \"devices\": [{\"name\": \"0\"}]}",
    );
    write("var/run/cdi/far.json", "{\"kind\": \"notnvidia.com/gpu\", \"devices\": [{\"name\": \"0\"}]}");
    let report = look(&setup, &[]).await;
    found(&report, "container runtime", "ok", "etc/cdi/nvidia.yaml: 2 devices of nvidia.com/gpu");
    found(&report, "container runtime", "ok", "ours.json: 1 device of k8s.device-plugin.nvidia.com/gpu");
    absent(&report, "container runtime", "ok", "example.com/nic");
    absent(&report, "container runtime", "ok", "notnvidia");
    assert_eq!(report["warnings"], before);
    write("var/run/cdi/nvidia.yaml", spec);
    write("var/run/cdi/broken.json", "{\"cdiVersion\": ");
    let report = look(&setup, &[]).await;
    found(&report, "container runtime", "warning", "both have 2 devices of nvidia.com/gpu");
    found(&report, "container runtime", "warning", "broken.json is not a CDI spec");
    fs::remove_dir_all(setup.at("etc/cdi")).unwrap();
    write("etc/cdi", "a file");
    found(&look(&setup, &[]).await, "container runtime", "warning", "Not a directory");
}

#[tokio::test]
async fn topology_manager_findings_depend_on_numa_hints() {
    let examine = async |synthetic: &str, gpus: &[(&str, &str, &str)], more: &[&str]| {
        let (setup, _kubelet) = with_host(Setup::with(&machine(gpus)).env("HWLOC_SYNTHETIC", synthetic));
        look(&setup, more).await
    };
    let on = |node: u32| format!(", numa: {node}");
    let (near, far) = (on(0), on(1));
    let two = [("GPU-a", "0000:01:00.0", near.as_str()), ("GPU-b", "0000:02:00.0", far.as_str())];
    let report = examine("pack:1 numa:2 pu:2", &two, &[]).await;
    found(&report, "topology manager", "warning", "packages have several NUMA nodes with CPUs");
    let report = examine("pack:1 numa:2 pu:2", &two, &["--numa-hints=package"]).await;
    assert!(!report.to_string().contains("packages have several"), "{report}");
    let report = examine("pack:9 numa:1 pu:2", &two, &[]).await;
    found(&report, "topology manager", "warning", "9 NUMA nodes, 0 of them without CPUs: more than the 8");
    let some = [("GPU-a", "0000:01:00.0", near.as_str()), ("GPU-b", "0000:02:00.0", "")];
    let report = examine("pack:2 numa:1 pu:2", &some, &[]).await;
    found(&report, "topology manager", "warning", "1 of 2 GPUs have no NUMA node (-1)");
    let report = examine("pack:2 numa:1 pu:2", &some, &["--numa-hints=off"]).await;
    absent(&report, "topology manager", "warning", "");
    let report = examine("pack:2 numa:1 pu:2", &[("GPU-a", "0000:01:00.0", "")], &[]).await;
    found(&report, "topology manager", "ok", "no GPU has a NUMA node (-1)");
    // A NUMA node that NVML reports and the host does not list.
    let beyond = [("GPU-a", "0000:01:00.0", ", numa: 7")];
    let report = examine("pack:2 numa:1 pu:2", &beyond, &[]).await;
    found(&report, "topology manager", "warning", "1 of 1 GPU are on NUMA nodes unknown to this host (such as 7)");
    absent(&report, "topology manager", "warning", "without CPUs");
    let report = examine("pack:2 numa:1 pu:2", &beyond, &["--numa-hints=off"]).await;
    absent(&report, "topology manager", "warning", "");
}

#[tokio::test]
async fn gpu_faults_are_reported_by_gpu() {
    let faults =
        "1:nvmlDeviceGetName:999,1:nvmlDeviceRegisterEvents:999,2:nvmlDeviceGetUUID:999,4:nvmlDeviceGetName:16";
    let (setup, _kubelet) = healthy();
    let setup = setup.env("FAKE_NVML_FAIL", faults);
    setup.tell("lost 6");
    let report = look(&setup, &[]).await;
    found(&report, "gpus", "ok", "GPU 0 (0000:06:00.0, GPU-00000001-0000-4000-8000-000000000000)");
    found(
        &report,
        "gpus",
        "warning",
        "GPU 1 (0000:07:00.0, GPU-00000001-0000-4000-8000-000000000001): nvmlDeviceGetName",
    );
    found(&report, "gpus", "warning", "nvmlDeviceRegisterEvents: NVML_ERROR_UNKNOWN (999)");
    found(&report, "gpus", "failed", "0000:0a:00.0: nvmlDeviceGetUUID");
    found(&report, "gpus", "warning", "NVML_ERROR_RESET_REQUIRED (16)");
    found(&report, "gpus", "failed", "NVML_ERROR_GPU_IS_LOST (15)");
    advised(&report, "nvmlDeviceRegisterEvents", "XIDs");
    advised(&report, "(16)", "nvidia-smi --gpu-reset");
    advised(&report, "(15)", "fallen off the bus");
    // The PCI bus still has GPUs that NVML does not list.
    found(&report, "sysfs", "failed", "0000:0a:00.0");
}

#[tokio::test]
async fn failed_driver_call_warns_unless_it_counts_the_gpus() {
    for (fault, status) in [("nvmlEventSetCreate", "warning"), ("nvmlDeviceGetCount_v2", "failed")] {
        let (setup, _kubelet) = with_host(Setup::on("dgx1-v100"));
        let report = look(&setup.env("FAKE_NVML_FAIL", &format!("*:{fault}:999")), &[]).await;
        found(&report, "gpus", status, &format!("driver: {fault}: NVML_ERROR_UNKNOWN (999)"));
    }
    let (setup, _kubelet) = with_host(Setup::with("version: 1\nname: bare\nobserved: {gpus: []}\n"));
    found(&look(&setup, &[]).await, "gpus", "skipped", "NVML lists no GPU");
}

#[tokio::test]
async fn pods_too_large_for_policy_are_named() {
    let (setup, _kubelet) = healthy();
    fs::create_dir_all(setup.at("var/lib/kubelet")).unwrap();
    let refused = "single-numa-node never admits a pod of 8 GPUs here";
    for (policy, hints, refuses) in [
        ("single-numa-node", "node", true),
        ("single-numa-node", "off", false),
        ("restricted", "node", false),
        ("none", "node", false),
    ] {
        fs::write(setup.at("var/lib/kubelet/config.yaml"), format!("topologyManagerPolicy: {policy}\n")).unwrap();
        let report = look(&setup, &["--numa-hints", hints]).await;
        found(&report, "topology manager", "ok", &format!("the kubelet's policy is {policy}"));
        match refuses {
            true => found(&report, "topology manager", "warning", refused),
            false => absent(&report, "topology manager", "warning", "never admits"),
        }
    }
}

#[tokio::test]
async fn missing_prerequisites_of_dra_are_named() {
    let (setup, _kubelet) = healthy();
    let command = |env: &[(&str, &str)]| {
        let mut command = setup.doctor();
        command.args(["--format", "json"]).envs(env.iter().copied());
        command
    };
    let look = async |env: &[(&str, &str)]| -> Value { serde_json::from_str(&run(command(env)).await.1).unwrap() };
    let report = look(&[]).await;
    for status in ["ok", "warning", "failed", "skipped"] {
        // No GPU goes through DRA.
        absent(&report, "DRA", status, "");
    }
    let report = look(&[("LINKWISE_DRA_GPUS", "all")]).await;
    found(&report, "DRA", "failed", "no API server");
    found(&report, "DRA", "failed", "plugins_registry");
    let account = setup.at("account");
    let pod = [
        ("LINKWISE_DRA_GPUS", "all"),
        ("KUBERNETES_SERVICE_HOST", "10.0.0.1"),
        ("LINKWISE_SERVICE_ACCOUNT_DIR", account.to_str().unwrap()),
    ];
    found(&look(&pod).await, "DRA", "failed", "cannot read the ServiceAccount's token");
    fs::create_dir(&account).unwrap();
    fs::write(account.join("token"), "token").unwrap();
    let registry = setup.at("var/lib/kubelet/plugins_registry");
    fs::create_dir_all(&registry).unwrap();
    fs::create_dir_all(setup.at("var/lib/kubelet/plugins")).unwrap();
    fs::write(registry.join("linkwise-00000001@gpu.nvidia.com-reg.sock"), "").unwrap();
    let report = look(&pod).await;
    absent(&report, "DRA", "failed", "");
    found(&report, "DRA", "ok", "no other DRA driver is called gpu.nvidia.com");
    fs::write(registry.join("gpu.nvidia.com-reg.sock"), "").unwrap();
    found(&look(&pod).await, "DRA", "failed", "another DRA driver registers as gpu.nvidia.com");
}

#[tokio::test]
async fn second_writer_of_labels_is_named() {
    let (setup, _kubelet) = healthy();
    absent(&look(&setup, &[]).await, "labels", "skipped", "");
    let folder = setup.at("etc/kubernetes/node-feature-discovery/features.d");
    fs::create_dir_all(&folder).unwrap();
    let write = |name: &str, text: &str| fs::write(folder.join(name), text).unwrap();
    let labels = "# +expiry-time=2999-01-01T00:00:00Z\nnvidia.com/gpu.count=8\nnvidia.com/gpu.present\n";
    write("custom", "# nvidia.com/gpu.count=8\n# +no-label\nnvidia.com/gpu.count=8\nvendor.io/nvidia.com=1\n");
    write(".gfd.tmp", labels);
    write("long", &labels.repeat(1000));
    for status in ["ok", "warning", "skipped"] {
        absent(&look(&setup, &[]).await, "labels", status, "");
    }
    write("other", labels);
    found(
        &look(&setup, &[]).await,
        "labels",
        "skipped",
        "other has 2 labels nvidia.com/gpu.*, and linkwise writes none",
    );
    write("gfd", labels);
    let report = look(&setup, &[]).await;
    found(&report, "labels", "warning", "other has 2 labels nvidia.com/gpu.*, and so has");
    advised(&report, "other has 2 labels", "last by name");
    absent(&report, "labels", "ok", "");

    // The configuration names the other file as linkwise's own.
    let config = setup.at("config.yaml");
    let own = "version: v1\nflags: {gfd: {outputFile: /etc/kubernetes/node-feature-discovery/features.d/other}}\n";
    fs::write(&config, own).unwrap();
    fs::remove_file(folder.join("gfd")).unwrap();
    let setup = setup.env("CONFIG_FILE", config.to_str().unwrap());
    found(&look(&setup, &[]).await, "labels", "ok", "other has 2 labels nvidia.com/gpu.*");
}
