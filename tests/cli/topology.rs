//! `linkwise topology`: the machines it takes, the fields and matrices of its output.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;

use linkwise_host::machines;
use serde_json::Value;

use crate::cli::{MACHINES, json, linkwise, text, this_is};

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

fn square(value: &Value) -> Vec<Vec<u64>> {
    list(value).iter().map(|row| list(row).iter().map(|cell| cell.as_u64().unwrap()).collect()).collect()
}

/// Asserts the invariants that hold for any machine's JSON.
fn check(topology: &Value) {
    let keys: Vec<&String> = topology.as_object().unwrap().keys().collect();
    let mut expected =
        ["gpus", "level", "nvlink_mbps", "pcie_mbps", "bandwidth_mbps", "nvswitch_plane", "nics", "warnings"];
    expected.sort_unstable();
    assert_eq!(keys, expected.iter().collect::<Vec<_>>());
    let gpus = list(&topology["gpus"]);
    for (number, gpu) in gpus.iter().enumerate() {
        assert_eq!(gpu["index"], number);
        assert!(gpu["uuid"].as_str().unwrap().starts_with("GPU-"), "{gpu}");
        // Not every source names the model: the key may be null, but not missing.
        assert!(gpu["pci"].is_string() && gpu.get("model").is_some(), "{gpu}");
        // A kernel may report no NUMA node (-1), a guest no package.
        for key in ["numa", "package"] {
            assert!(gpu[key].is_u64() || gpu.get(key).is_some_and(Value::is_null), "{gpu}");
        }
    }
    let [level, nvlink, pcie, bandwidth] =
        ["level", "nvlink_mbps", "pcie_mbps", "bandwidth_mbps"].map(|key| square(&topology[key]));
    for matrix in [&level, &nvlink, &pcie, &bandwidth] {
        assert_eq!(matrix.len(), gpus.len());
        for (a, row) in matrix.iter().enumerate() {
            assert_eq!((row.len(), row[a]), (gpus.len(), 0));
            assert!(row.iter().enumerate().all(|(b, value)| *value == matrix[b][a]), "{matrix:?}");
        }
    }
    for a in 0..gpus.len() {
        for b in (0..gpus.len()).filter(|b| *b != a) {
            assert!(level[a][b] <= 5 && pcie[a][b] > 0);
            let best = if nvlink[a][b] > 0 { nvlink[a][b] } else { pcie[a][b] };
            assert_eq!(bandwidth[a][b], best);
            let one_package = gpus[a]["package"] == gpus[b]["package"];
            assert_eq!(level[a][b] == 5, !one_package, "{a} {b}");
        }
    }
    assert_eq!(list(&topology["nvswitch_plane"]).len(), gpus.len());
    for nic in list(&topology["nics"]) {
        assert_eq!(list(&nic["level"]).len(), gpus.len());
    }
}

#[test]
fn json_has_all_fields_for_each_machine() {
    for machine in machines::built_in() {
        let topology = json(&["topology", "--node", machine.name, "--format", "json"]);
        check(&topology);
        assert!(list(&topology["warnings"]).is_empty(), "{}: {}", machine.name, topology["warnings"]);
    }
    for machine in MACHINES {
        let topology = json(&["topology", "--node", machine, "--format", "json"]);
        assert_eq!(list(&topology["gpus"]).len(), 8);
        let planes = list(&topology["nvswitch_plane"]);
        let on_plane = if machine == "dgx-h100" { Value::from(0) } else { Value::Null };
        assert!(planes.iter().all(|plane| *plane == on_plane), "{machine}: {planes:?}");
        assert_eq!(list(&topology["nics"]).is_empty(), machine == "pcie-8x-pix-pairs");
    }
}

#[test]
fn json_bandwidths_are_those_of_nccl() {
    let v100 = json(&["topology", "--node", "dgx1-v100", "--format", "json"]);
    assert_eq!(square(&v100["nvlink_mbps"])[0], [0, 20_000, 20_000, 40_000, 40_000, 0, 0, 0]);
    assert_eq!(square(&v100["level"])[0], [0, 0, 3, 3, 5, 5, 5, 5]);
    let h100 = json(&["topology", "--node", "dgx-h100", "--format", "json"]);
    assert!(square(&h100["nvlink_mbps"])[0].iter().skip(1).all(|mbps| *mbps == 18 * 20_600));
    let pcie = json(&["topology", "--node", "pcie-8x-pix-pairs", "--format", "json"]);
    assert!(square(&pcie["nvlink_mbps"]).concat().iter().all(|mbps| *mbps == 0));
    assert_eq!(square(&pcie["level"])[0][1], 0);
}

#[test]
fn node_file_equals_built_in_name() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/crates/host/src/machines/dgx1-v100.yaml");
    for format in ["text", "json"] {
        let by_name = text(&mut linkwise(&["topology", "--node", "dgx1-v100", "--format", format]));
        assert_eq!(text(&mut linkwise(&["topology", "--node", path, "--format", format])), by_name);
    }
}

#[test]
fn live_machine_combines_nvml_and_hwloc() {
    let mut command = linkwise(&["topology", "--format", "json"]);
    this_is(&mut command, "dgx1-v100");
    let seen: Value = serde_json::from_str(&text(&mut command)).unwrap();
    check(&seen);
    let mut written = json(&["topology", "--node", "dgx1-v100", "--format", "json"]);
    // hwloc sees no NICs, so no GPU has a rail.
    written["gpus"].as_array_mut().unwrap().iter_mut().for_each(|gpu| gpu["rail"] = Value::Null);
    for key in ["gpus", "nvlink_mbps", "nvswitch_plane"] {
        assert_eq!(seen[key], written[key], "{key}");
    }
    // hwloc does not see these GPUs either: each has a warning, and its levels come from NVML.
    let warnings: Vec<&str> = list(&seen["warnings"]).iter().map(|text| text.as_str().unwrap()).collect();
    assert_eq!(warnings.iter().filter(|text| text.contains("its levels come from NVML")).count(), 8, "{warnings:?}");
    assert_eq!(square(&seen["level"]), square(&written["level"]));
    let mut command = linkwise(&["topology"]);
    this_is(&mut command, "dgx1-v100");
    let shown = text(&mut command);
    assert!(shown.contains("GPU7") && shown.contains("NV2") && shown.contains("warning: "), "{shown}");
}

#[test]
fn machine_without_gpus_is_shown() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bare.yaml");
    std::fs::write(&file, "version: 1\nname: bare\ntitle: A bare node\nobserved: {gpus: []}\n").unwrap();
    let file = file.to_str().unwrap();
    let topology = json(&["topology", "--node", file, "--format", "json"]);
    check(&topology);
    let shown = text(&mut linkwise(&["topology", "--node", file]));
    assert!(shown.starts_with("A bare node\n") && shown.contains("no GPUs"), "{shown}");
}

#[test]
fn closed_pipe_is_not_an_error() {
    for args in [["topology", "--node", "dgx-h100"], ["topology", "--list", "--format=text"]] {
        let mut child = linkwise(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        // The reader takes one line and closes the pipe, as `head -1` does.
        BufReader::with_capacity(1, child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    }
    // A reader may also close the pipe before the command writes.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = linkwise(&["topology", "--node", "dgx-h100"]).stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
    let output = output.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

#[test]
fn machine_is_read_from_standard_input() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/host/src/machines/dgx-h100.yaml");
    let mut command = linkwise(&["topology", "--node", "-", "--format", "json"]);
    let read: Value = serde_json::from_str(&text(command.stdin(File::open(file).unwrap()))).unwrap();
    assert_eq!(read, json(&["topology", "--node", "dgx-h100", "--format", "json"]));
}

#[test]
fn nvidia_smi_matrix_is_read_as_a_machine() {
    let head = (0..8).map(|gpu| format!("GPU{gpu}\t")).collect::<String>() + "CPU Affinity\tNUMA Affinity\n";
    let row = |gpu: usize| {
        let cells: String = (0..8).map(|to| if to == gpu { " X \t" } else { "NV12\t" }).collect();
        format!("GPU{gpu}\t{cells}0-63\t0\n")
    };
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), head + &(0..8).map(row).collect::<String>()).unwrap();
    let output = |args: &[&str]| text(linkwise(args).stdin(File::open(file.path()).unwrap()));
    assert!(output(&["topology", "--node", "-"]).contains("GPU7  NV12  NV12"));
    assert!(output(&["allocate", "--node", "-", "--size", "4"]).contains("NV12"));
    let text = output(&["expect", "--node", "-"]);
    assert!(text.contains("rings         unknown\n") && text.contains("name the model with --gpu-model"), "{text}");
    let text = output(&["expect", "--node", "-", "--gpu-model", "NVIDIA A100-SXM4-80GB"]);
    assert!(text.contains("240.00 GB/s") && text.contains("published results: A100 behind NVSwitches"), "{text}");
}
