//! Regression tests: machines, configurations and measurements that an earlier version misread.

use std::fs;
use std::path::PathBuf;

use serde_json::json;
use tempfile::TempDir;

use super::linkwise;

/// A temporary folder of input files.
struct Files(TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn put(&self, name: &str, text: &str) -> String {
        let path: PathBuf = self.0.path().join(name);
        fs::write(&path, text).unwrap();
        path.into_os_string().into_string().unwrap()
    }
}

/// Runs a command; returns its exit status and all that it printed.
fn output(args: &[&str]) -> (i32, String) {
    let output = linkwise(args).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout) + &text(output.stderr))
}

/// A node file with these GPUs, each below a host bridge of its own.
fn machine(gpus: &[serde_json::Value]) -> String {
    let gpu = |(index, about): (usize, &serde_json::Value)| {
        let mut gpu = json!({"index": index, "uuid": format!("GPU-00000000-0000-4000-8000-00000000000{index}"),
            "pci": format!("0000:0{}:00.0", index + 1), "numa": 0});
        gpu.as_object_mut().unwrap().extend(about.as_object().unwrap().clone());
        gpu
    };
    let all: Vec<_> = gpus.iter().enumerate().map(gpu).collect();
    let bridges: Vec<_> =
        all.iter().map(|gpu| json!({"numa": 0, "devices": [{"kind": "gpu", "pci": gpu["pci"]}]})).collect();
    json!({"version": 1, "name": "node", "observed": {"gpus": all, "host": {
        "numa_nodes": [{"id": 0, "package": 0, "cpus": "0-15"}], "host_bridges": bridges}}})
    .to_string()
}

/// A GPU with this number of NVLinks to NVSwitches.
fn switched(links: u32) -> serde_json::Value {
    let group = json!({"links": (0..links).collect::<Vec<_>>(), "remote": {"switch": null}});
    let groups = if links == 0 { json!([]) } else { json!([group]) };
    let pcie = json!({"mts": 32000, "width": 16});
    json!({"model": "NVIDIA B200", "compute_capability": "10.0", "pcie": pcie, "nvlinks": groups})
}

const HEAD: &str = "# nThread 1 nGpus 2 minBytes 8589934592 maxBytes 8589934592\n";

#[test]
fn wrong_values_fail_a_run_of_any_bandwidth() {
    let files = Files::new();
    let row = "8589934592 2147483648 float sum -1 23166.0 370.80 370.80 WRONG 23166.0 370.80 370.80 WRONG\n";
    let rows = |wrong: &str| HEAD.to_owned() + &row.replace("WRONG", wrong);
    let verify = |run: &str| output(&["verify", "--node", "dgx-h100", "--gpus", "0,1", &files.put("run.txt", run)]);
    let summary = "# Out of bounds values : 50 FAILED\n";
    let (status, text) = verify(&(rows("50") + summary));
    assert!(status == 1 && text.starts_with("wrong values: ") && text.contains("\n  100 wrong values: "), "{text}");
    for (run, sum) in [
        // The rows or the summary alone suffice.
        (rows("50"), 100),
        (rows("N/A") + summary, 50),
        (rows("N/A") + "[1,0]<stdout>: # Out of bounds values : 4 FAILED\n", 4),
        // A count in exponential notation, or `nan`, is not taken as a tolerance.
        (rows("1.23457e+06"), 2_469_140),
        (rows("nan"), 2),
    ] {
        let (_, text) = verify(&run);
        assert!(text.contains(&format!("  {sum} wrong values: ")), "{text}");
    }
    // Older versions of nccl-tests print the largest error in that column, here within the tolerance.
    assert_eq!(verify(&rows("5e-07")).0, 0);
}

#[test]
fn row_without_time_and_run_of_one_rank_are_refused() {
    let files = Files::new();
    let zero =
        files.put("zero.txt", &format!("{HEAD}8589934592 2147483648 float sum -1 0.0 0.00 0.00 0 0.0 0.00 0.00 0\n"));
    let (status, text) = output(&["verify", "--node", "dgx-h100", "--gpus", "0,1", &zero]);
    assert!(status == 1 && text.contains("no readable row"), "{text}");
    let one = "#  Rank  0 Group  0 Pid    127 on node device  0 [0x07] NVIDIA A100-SXM4-40GB\n";
    let row = "8589934592 2147483648 float sum -1 3500.0 2454.27 0.00 0 0.05 171798.00 0.00 0\n";
    let (status, text) = output(&["verify", "--node", "dgx-h100", &files.put("one.txt", &format!("{HEAD}{one}{row}"))]);
    assert!(status == 1 && text.contains("an all-reduce of one GPU has no bandwidth"), "{text}");
}

#[test]
fn unknown_nvlinks_are_named_by_each_command() {
    let files = Files::new();
    let cloud = files.put(
        "cloud.xml",
        r#"<system version="1">
            <cpu numaid="0" affinity="ff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
            <pci busid="0001:00:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16"/>
            <pci busid="0002:00:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16"/></cpu></system>"#,
    );
    let hwloc = files.put(
        "hwloc.xml",
        r#"<topology version="2.0"><object type="Machine" os_index="0">
            <object type="Bridge" bridge_type="0-1" depth="0"><object type="PCIDev" pci_busid="0001:00:00.0"
             pci_type="0302 [10de:2941] [10de:2046] a1"/></object>
            <object type="Bridge" bridge_type="0-1" depth="0"><object type="PCIDev" pci_busid="0002:00:00.0"
             pci_type="0302 [10de:2941] [10de:2046] a1"/></object></object></topology>"#,
    );
    let run = files.put(
        "run.txt",
        &format!("{HEAD}8589934592 2147483648 float sum -1 23166.0 370.80 370.80 0 23166.0 370.80 370.80 0\n"),
    );
    for (machine, name) in [(&cloud, "cloud"), (&hwloc, "hwloc")] {
        let (status, text) = output(&["expect", "--node", machine]);
        let expected = "rings         unknown\nNVLink SHARP  unknown\nnote: GPUs 0001:00:00.0, ";
        assert!(status == 0 && text.contains(expected), "{text}");
        let (_, text) = output(&["labels", "--node", machine]);
        assert!(!text.contains("gpu.link=") && !text.contains("island-size="), "{text}");
        assert!(text.contains("gpu.rails=0"), "{text}");
        for command in [&["topology"][..], &["verify", &run]] {
            let (_, text) = output(&[command, &["--node", machine]].concat());
            assert!(text.contains("GPUs 0001:00:00.0, 0002:00:00.0: their NVLinks are unknown"), "{text}");
        }
        let two = ["claim", "--gpus", "2"];
        let (exact, fleet) = ([&two[..], &["--exact"]].concat(), [&two[..], &["--node", "dgx-h100"]].concat());
        for command in [&["allocate", "--size", "2"][..], &two, &exact, &fleet, &["dra"]] {
            let (status, text) = output(&[command, &["--node", machine]].concat());
            let warning = |of: &str| format!("{of}: its NVLinks are unknown, and taken as none");
            let is_warned = text.contains(&warning(name)) || text.contains(&warning(machine));
            assert!(is_warned && !text.contains("GB/s each"), "{command:?}: {status} {text}");
        }
    }
}

#[test]
fn gpu_without_its_own_memory_shows_none() {
    let gb10 = "version: 1\nname: spark\nobserved:\n  gpus:\n    - {index: 0, uuid: GPU-0, pci: \"000f:01:00.0\", \
                model: NVIDIA GB10, minor: 0, compute_capability: \"12.1\", architecture: Blackwell, nvlinks: []}\n";
    let files = Files::new();
    let file = files.put("gb10.yaml", gb10);
    for command in ["labels", "dra", "topology"] {
        let (status, text) = output(&[command, "--node", &file]);
        assert!(status == 0 && text.contains("GB10") && !text.contains("memory"), "{text}");
    }
}

/// Returns true for a control character other than a line feed, and for one that changes the direction of writing.
fn is_hostile(char: char) -> bool {
    (char.is_control() && char != '\n') || matches!(char, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[test]
fn control_characters_of_inputs_are_escaped() {
    const HOSTILE: &str = "a\u{1b}[31m\u{9b}2J\u{202e}\nFORGED";
    let files = Files::new();
    let written = r"a\u001b[31m\u009b2J\u202e\nFORGED";
    let (mut plain, mut hostile) = (switched(0), switched(0));
    // The model of the first GPU needs no quotes in YAML.
    (plain["model"], hostile["model"]) = ("a\u{202e}b".into(), "HOSTILE".into());
    let nic = r#"{"kind":"nic","nics":[{"name":"HOSTILE","kind":"rdma"}]},{"kind":"gpu""#;
    let text = machine(&[plain, hostile]).replace(r#"{"kind":"gpu""#, nic).replace(r#""node""#, r#""HOSTILE""#);
    let node = files.put("node.yaml", &text.replace("HOSTILE", written));
    let root = files.put("root.yaml", &format!("version: v1\nflags: {{nvidiaDriverRoot: \"/{written}\"}}\n"));
    let keys =
        files.put("keys.yaml", &format!("version: v1\n\"{written}\": 1\nflags: {{migStrategy: \"{written}\"}}\n"));
    let run = files.put("run.txt", &format!("{HEAD}8589934592 2147483648 float sum -1 23166.0 370.80 370.80 0\n"));
    let shown = |args: &[&str]| {
        let (_, text) = output(args);
        let is_forged = text.lines().any(|line| line.starts_with("FORGED"));
        assert!(!text.contains(is_hostile) && !is_forged, "{args:?}: {text:?}");
        text
    };
    for command in [
        &["topology"][..],
        &["topology", "--format", "svg"],
        &["allocate", "--size", "1", "--explain"],
        &["allocate", "--size", "1", "--explain", "--format", "json"],
        &["expect"],
        &["expect", "--format", "json"],
        &["verify", &run, "--gpus", "0"],
        &["verify", &run, "--format", "json"],
        &["labels"],
        &["labels", "--config-file", &root],
        &["claim", "--gpus", "2", "--exact"],
        &["claim", "--gpus", "2", "--node", "dgx-h100"],
        &["claim", "--gpus", "2", "--node", "dgx-h100", "--format", "json"],
    ] {
        shown(&[command, &["--node", &node]].concat());
    }
    shown(&["topology", "--node", HOSTILE]);
    for file in [&root, &keys] {
        shown(&["config", "check", file]);
        shown(&["config", "show", "--config-file", file]);
        shown(&["config", "show", "--config-file", file, "--format", "json"]);
    }
    // The escapes do not change the values that a parser reads.
    let topology = |node: &str| -> serde_json::Value {
        serde_json::from_str(&shown(&["topology", "--format", "json", "--node", node])).unwrap()
    };
    let read = topology(&node);
    assert_eq!(read["gpus"][0]["model"], "a\u{202e}b");
    assert_eq!((&read["gpus"][1]["model"], &read["nics"][0]["names"][0]), (&json!(HOSTILE), &json!(HOSTILE)));
    assert_eq!(topology(&files.put("snapshot.yaml", &shown(&["snapshot", "--node", &node]))), read);
    let slices = |format: &str| shown(&["dra", "--node", &node, "--config-file", &root, "--format", format]);
    let slices =
        [slices("yaml"), slices("json")].map(|text| serde_saphyr::from_str::<serde_json::Value>(&text).unwrap());
    assert_eq!(slices[0], slices[1]);
}

#[test]
fn odd_gpu_is_named_and_allocated_alone_first() {
    let files = Files::new();
    let odd = files.put("odd.yaml", &machine(&[switched(18), switched(0), switched(18), switched(18)]));
    let words =
        "GPU 0000:02:00.0 is the odd one of 4 GPUs of its model: 0 of its NVLinks are up, 18 on every other GPU";
    assert!(output(&["topology", "--node", &odd]).1.contains(&format!("warning: {words}")));
    let (_, text) = output(&["expect", "--node", &odd]);
    assert!(text.contains(&format!("note: {words}")), "{text}");
    assert!(output(&["allocate", "--size", "1", "--node", &odd]).1.starts_with("GPU 1  "));
    assert!(output(&["allocate", "--size", "3", "--node", &odd]).1.contains("GPU 0,2,3 (3 of 4)"));
    // The bandwidth that the odd GPU costs is a fault, so the expectation does not drop.
    let run = files.put("run.txt", &format!("{HEAD}8589934592 2147483648 float sum -1 268435.0 32.00 48.00 0\n"));
    let (status, text) = output(&["verify", "--node", &odd, "--gpus", "0,1,2,3", &run]);
    assert!(status == 1 && text.starts_with("below: 48.00 GB/s of "), "{text}");
    assert!(text.contains("18 of its 18 NVLinks are down"), "{text}");
    // Other differences make one GPU of three odd, too.
    let refused = json!({"0": "chipset", "1": "chipset"});
    for (key, value, words) in [
        ("pcie", json!({"mts": 32000, "width": 8}), "its PCIe link has 8 lanes, 16 on every other GPU"),
        ("pcie", json!({"mts": 16000, "width": 16}), "its PCIe link can do 16000 MT/s, 32000 on every other GPU"),
        ("p2p_refused", refused, "the driver refuses P2P between it and every other GPU"),
    ] {
        let mut last = switched(18);
        last[key] = value;
        let odd = files.put("other.yaml", &machine(&[switched(18), switched(18), last]));
        let (_, text) = output(&["topology", "--node", &odd]);
        let warning = format!("warning: GPU 0000:03:00.0 is the odd one of 3 GPUs of its model: {words}");
        assert!(text.contains(&warning), "{text}");
    }
    // Neither of two GPUs is odd, nor are two of four: such machines exist.
    for gpus in [vec![switched(18), switched(0)], vec![switched(18), switched(18), switched(12), switched(12)]] {
        assert!(!output(&["topology", "--node", &files.put("even.yaml", &machine(&gpus))]).1.contains("odd one"));
    }
}

#[test]
fn fastest_of_the_nearest_nics_is_named() {
    let files = Files::new();
    let nics = |other: &str| {
        format!(
            "version: 1\nname: nics\nobserved:\n  \
             gpus: [{{index: 0, uuid: GPU-0, pci: \"0000:05:00.0\", nvlinks: []}}]\n  \
             host:\n    host_bridges:\n      - devices:\n          - kind: switch\n            devices:\n              \
             - {{pci: \"0000:03:00.0\", kind: nic, nics: [{{name: mlx5_0, kind: rdma{other}}}]}}\n              \
             - {{pci: \"0000:04:00.0\", kind: nic, nics: [{{name: mlx5_1, kind: rdma, mbps: 400000}}]}}\n              \
             - {{pci: \"0000:05:00.0\", kind: gpu}}\n"
        )
    };
    // A NIC whose link is down has no rate, and is named too.
    for (other, nearest) in [(", mbps: 25000", "mlx5_1"), ("", "mlx5_0, mlx5_1")] {
        let file = files.put("nics.yaml", &nics(other));
        let (_, text) = output(&["allocate", "--size", "1", "--explain", "--node", &file]);
        assert!(text.contains(&format!("nearest NIC {nearest} (PIX)")), "{text}");
    }
}

#[test]
fn virtual_interfaces_are_not_taken_as_nics() {
    let files = Files::new();
    let cpu = |id: u32| {
        format!(
            r#"<cpu numaid="{id}" affinity="ff" arch="x86_64">
            <pci busid="0000:0{}:00.0" class="0x030000"><gpu dev="{id}" sm="89"/></pci>
            <nic><net name="tunl0" dev="0" speed="10000" port="0" guid="0x0"/></nic></cpu>"#,
            id + 1
        )
    };
    let dump = files.put("virtual.xml", &format!("<system version=\"1\">{}{}</system>", cpu(0), cpu(1)));
    let (_, text) = output(&["topology", "--node", &dump]);
    assert!(!text.contains("tunl0"), "{text}");
    assert!(text.contains("a NIC without a PCI function is virtual; left out (1 more like it)"), "{text}");
    // An IP over InfiniBand interface is not counted as a second NIC.
    let host = files.put(
        "ipoib.xml",
        r#"<topology version="2.0"><object type="Machine" os_index="0">
            <object type="Bridge" bridge_type="0-1" depth="0">
            <object type="PCIDev" pci_busid="0000:3e:00.0" pci_type="0207 [15b3:1021] [15b3:1113] 00">
             <object type="OSDev" name="ibp62s0" osdev_type="2"/>
             <object type="OSDev" name="ibp62s0" osdev_type="3"/></object>
            <object type="PCIDev" pci_busid="0000:3f:00.0" pci_type="0302 [10de:2941] [10de:2046] a1"/>
            </object></object></topology>"#,
    );
    let (_, text) = output(&["topology", "--node", &host]);
    assert!(text.contains("NIC 0000:3e:00.0  ibp62s0\n") && text.contains("  NIC0: ibp62s0\n"), "{text}");
}

#[test]
fn one_lane_of_a_virtual_switch_is_ignored() {
    let branch = |domain: u32, dev: u32| {
        format!(
            r#"<pci busid="000{domain}:01:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="1">
            <pci busid="000{domain}:04:00.0" class="0x060400" link_speed="64.0 GT/s PCIe" link_width="16">
            <pci busid="000{domain}:06:00.0" class="0x030200" link_speed="64.0 GT/s PCIe" link_width="16">
            <gpu dev="{dev}" sm="103"/></pci></pci></pci>"#
        )
    };
    let dump = format!(
        "<system version=\"1\"><cpu numaid=\"0\" affinity=\"ff\" arch=\"arm64\">{}{}</cpu></system>",
        branch(8, 0),
        branch(9, 1)
    );
    let (_, text) = output(&["expect", "--node", &Files::new().put("gb300.xml", &dump)]);
    assert!(text.contains("rings         12.00 GB/s"), "{text}");
}

#[test]
fn numbers_of_a_file_are_bounded_and_named_by_key() {
    let files = Files::new();
    let node = |gpu: &str, cpus: &str| {
        format!(
            "version: 1\nname: two\nobserved:\n  gpus:\n    - {{index: 0, uuid: GPU-0, pci: \"0000:01:00.0\"}}\n    \
             - {{{gpu}}}\n  host:\n    numa_nodes: [{{id: 0, cpus: \"{cpus}\"}}]\n"
        )
    };
    let second = |more: &str| format!("index: 1, uuid: GPU-1, pci: \"0000:02:00.0\"{more}");
    let gpu = |more: &str| node(&second(more), "0-7");
    let nic = |nic: &str| gpu("") + &format!("    host_bridges: [{{devices: [{{kind: nic, nics: [{{{nic}}}]}}]}}]\n");
    let cpus = |cpus: &str| node(&second(""), cpus);
    let (long, memory) = ("x".repeat(257), ", memory_mib: 18446744073709551615");
    let links = format!(", nvlinks: [{{links: {:?}, remote: cpu}}]", [0; 65]);
    for (text, words) in [
        (node("index: 0, uuid: GPU-1, pci: \"0000:02:00.0\"", "0-7"), "observed.gpus: two GPUs have the index 0"),
        (gpu(", numa: -1"), "observed.gpus[1].numa: "),
        (gpu(", pcie: {mts: 32000, width: 4294967295}"), "observed.gpus[1].pcie.width: 4294967295 is more than 32"),
        (gpu(", pcie: {mts: 4000000000, width: 16}"), "observed.gpus[1].pcie.mts: 4000000000 is more than 128000"),
        (gpu(&links), "observed.gpus[1].nvlinks: a count of 65 is more than 64"),
        (gpu(memory), "observed.gpus[1].memory_mib: 18446744073709551615 is more than 1073741824"),
        (gpu(&format!(", model: {long}")), "observed.gpus[1].model: a length of 257 is more than 256"),
        (nic("name: a, kind: rdma, mbps: 10000001"), "devices[0].nics[0].mbps: 10000001 is more than 10000000"),
        (nic(&format!("name: {long}, kind: rdma")), "devices[0].nics[0].name: a length of 257 is more than 256"),
        (cpus("47-0,x"), "observed.host.numa_nodes[0].cpus: '47-0,x' is not a list of CPUs below 8192"),
        (cpus("0-99999999999999999999"), "is not a list of CPUs below 8192"),
        (cpus("0,1,1"), "is not a list of CPUs below 8192"),
    ] {
        let (status, printed) = output(&["topology", "--node", &files.put("odd.yaml", &text)]);
        assert!(status == 1 && printed.contains(words) && printed.contains(" line "), "{printed}");
    }
    // A wrong value in a dump is a warning. A long list of CPUs is cut.
    let mask = ["55555555"; 255].join(",");
    let dump = |mask: &str| {
        format!(
            "<system version=\"1\"><cpu numaid=\"0\" affinity=\"{mask}\" arch=\"x86_64\"><pci busid=\"0000:01:00.0\" \
             class=\"0x030200\" link_speed=\"999999.0 GT/s PCIe\" link_width=\"16\"><gpu dev=\"0\" sm=\"89\"/></pci>\
             </cpu></system>"
        )
    };
    let (status, text) = output(&["topology", "--node", &files.put("long.xml", &dump(&mask))]);
    assert!(status == 0 && text.contains("GPU0  X     0,2,4,") && text.contains(" ...  0"), "{text}");
    assert!(text.contains("NUMA node 0, CPUs 0,2,4,") && text.lines().all(|line| line.len() < 250), "{text}");
    assert!(text.contains("999999000 MT/s x16 is not a PCIe link; taken as unknown"), "{text}");
    let (_, text) = output(&["topology", "--node", &files.put("longer.xml", &dump(&["55555555"; 1000].join(",")))]);
    assert!(text.contains("is not a CPU mask; its CPUs are unknown"), "{text}");
}

#[test]
fn parts_of_mlopart_are_taken_as_one_gpu() {
    let dump = r#"<system version="1"><cpu numaid="0" affinity="ff" arch="arm64">
        <pci busid="0002:81:00.0" class="0x030200">
        <gpu dev="0" sm="107" mlopart="0"/><gpu dev="0" sm="107" mlopart="1"/></pci></cpu></system>"#;
    let (_, text) = output(&["topology", "--node", &Files::new().put("parts.xml", dump)]);
    assert!(text.contains("a part of a GPU that is divided by MLOPart; the parts are taken as one GPU"), "{text}");
}

#[test]
fn configuration_with_no_known_key_is_refused() {
    let files = Files::new();
    let whole = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: slicing}\ndata:\n  any: |-\n    version: v1\n";
    let (status, text) = output(&["config", "show", "--config-file", &files.put("map.yaml", whole)]);
    assert!(status == 1 && text.contains("this file has no key of a configuration"), "{text}");
    // An unknown key beside known ones is a warning.
    let one = files.put("one.yaml", "version: v1\nflags: {renameByDefault: true}\n");
    assert_eq!(output(&["config", "show", "--config-file", &one]).0, 0);
}

#[test]
fn too_many_or_unlike_replicas_are_refused() {
    let files = Files::new();
    let check = |kind: &str, replicas: u32| {
        let text = format!(
            "version: v1\nsharing: {{{kind}: {{resources: [{{name: nvidia.com/gpu, replicas: {replicas}}}]}}}}\n"
        );
        output(&["config", "check", &files.put("sharing.yaml", &text)])
    };
    assert_eq!((check("timeSlicing", 16_384).0, check("mps", 48).0), (0, 0));
    assert!(check("timeSlicing", 16_385).1.contains("expected a whole number from 2 to 16384"));
    assert!(check("mps", 49).1.contains("expected a whole number from 2 to 48"));
    let rows = |replicas: u32| {
        format!(
            "linkwise: {{naming: true}}\nsharing: {{mps: {{resources: [{{name: gpu, devices: [0], replicas: 2}}, \
             {{name: gpu, devices: [1], replicas: {replicas}}}]}}}}\n"
        )
    };
    assert_eq!(output(&["config", "check", &files.put("rows.yaml", &rows(2))]).0, 0);
    let (_, text) = output(&["config", "check", &files.put("rows.yaml", &rows(3))]);
    assert!(text.contains("MPS: nvidia.com/gpu has 2 replicas in line 2"), "{text}");
}
