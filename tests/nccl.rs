//! `linkwise expect` and `linkwise verify`, with published results of nccl-tests (`tests/nccl/`: address, sizes and
//! bandwidths) and with faults on built-in machines. The tests write the text of nccl-tests around the numbers.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use linkwise_core::benchmark::{Cause, Comparison, Expectation, MatchError, NcclReport, Verdict};
use linkwise_core::topology::{
    ComputeCapability, NodeObservation, NodeTopology, NvLinkObservation, NvLinkRemote, P2pRefusal,
};
use linkwise_host::machines;
use serde::Deserialize;
use serde_json::Value;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Published {
    source: String,
    run: String,
    machine: String,
    /// The indices of the run's GPUs; all GPUs of the machine if missing.
    gpus: Option<String>,
    ranks: u64,
    verdict: String,
    /// A part of the likeliest cause, if there is a fault.
    cause: Option<String>,
    /// Bytes, and GB/s out of place and in place.
    rows: Vec<String>,
}

impl Published {
    fn all() -> BTreeMap<String, Self> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nccl");
        let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let read = |path: PathBuf| {
            let published = serde_saphyr::from_str(&fs::read_to_string(&path).unwrap());
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            (name, published.unwrap_or_else(|error| panic!("{}: {error}", path.display())))
        };
        files.map(read).collect()
    }

    /// Bytes, and MB/s out of place and in place.
    fn numbers(&self) -> Vec<(u64, Vec<f64>)> {
        let numbers = self.rows.iter().map(|row| {
            let mut words = row.split(' ');
            let bytes = words.next().unwrap().parse().unwrap();
            (bytes, words.map(|word| word.parse::<f64>().unwrap() * 1000.0).collect())
        });
        numbers.collect()
    }

    /// The highest bandwidth, MB/s.
    fn measured(&self) -> f64 {
        self.numbers().into_iter().flat_map(|(_, bus)| bus).fold(0.0, f64::max)
    }

    /// The expectation for the run's GPUs, MB/s.
    fn expected(&self) -> f64 {
        let observed = machines::load(&self.machine).unwrap().observed;
        let (topology, _) = NodeTopology::assemble(&observed);
        let places: Vec<usize> = match &self.gpus {
            Some(gpus) => gpus.split(',').map(|gpu| place(&topology, gpu.parse().unwrap())).collect(),
            None => (0..topology.gpus().len()).collect(),
        };
        assert_eq!(places.len() as u64, self.ranks);
        Expectation::of(&topology, &places).bandwidth().unwrap() as f64
    }
}

fn place(topology: &NodeTopology, index: u32) -> usize {
    topology.gpus().iter().position(|gpu| gpu.index == index).unwrap()
}

/// A table as nccl-tests print it, with all columns computed from sizes and bus bandwidths in MB/s.
pub fn table(ranks: u64, rows: &[(u64, Vec<f64>)]) -> String {
    let mut text = "# Collective test starting: all_reduce_perf\n# nThread 1 nGpus 8\n".to_owned();
    for (bytes, bus) in rows {
        write!(text, "{bytes:12} {:12} float sum -1", bytes / 4).unwrap();
        for bus in bus {
            let algorithm = bus / 1000.0 * ranks as f64 / (2.0 * (ranks - 1) as f64);
            let microseconds = *bytes as f64 / algorithm / 1000.0;
            write!(text, " {microseconds:.2} {algorithm:.2} {:.2} 0", bus / 1000.0).unwrap();
        }
        text += "\n";
    }
    text + "# Out of bounds values : 0 OK\n"
}

/// Runs `linkwise verify` on a text; returns its output and exit code.
fn verify(text: &str, args: &[&str]) -> (String, i32) {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), text).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_linkwise"));
    let output = command.env_clear().arg("verify").args(args).arg(file.path()).output().unwrap();
    let printed = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    (printed, output.status.code().unwrap())
}

#[test]
fn published_results_get_their_verdict_and_cause() {
    let all = Published::all();
    let with = |verdict: &str| all.values().filter(|published| published.verdict == verdict).count();
    assert!(all.len() >= 10 && with("below") >= 3 && with("as-expected") >= 6, "{} results", all.len());
    for (name, published) in &all {
        assert!(published.source.starts_with("https://") && !published.run.is_empty(), "{name}");
        let mut args = vec!["--node", &published.machine, "--format", "json"];
        args.extend(published.gpus.iter().flat_map(|gpus| ["--gpus", gpus]));
        let (printed, code) = verify(&table(published.ranks, &published.numbers()), &args);
        let answer: Value = serde_json::from_str(&printed).unwrap_or_else(|error| panic!("{name}: {error}: {printed}"));
        assert_eq!(answer["verdict"], published.verdict.as_str(), "{name}: {answer}");
        assert_eq!(code, i32::from(published.verdict == "below"), "{name}");
        assert_eq!(answer["measured"].to_string(), format!("{:.0}", published.measured()), "{name}");
        let cause = answer["causes"].as_array().unwrap().first().map(|cause| cause.as_str().unwrap());
        match &published.cause {
            Some(part) => assert!(cause.is_some_and(|cause| cause.contains(part.as_str())), "{name}: {cause:?}"),
            None => assert_eq!(cause, None, "{name}"),
        }
    }
}

#[test]
fn documented_errors_are_those_of_the_model() {
    let all = Published::all();
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/bandwidth.md")).unwrap();
    let (_, section) = page.split_once("\n## Promised against measured\n").expect("the section");
    let section = section.split("\n## ").next().unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| [") || line.starts_with("| `"));
    let (mut documented, mut errors) = (BTreeSet::new(), Vec::new());
    for row in rows {
        let row: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [name, expected, measured] = row[..] else { panic!("{row:?}") };
        let (name, address) = name.trim_start_matches('[').split_once("](").unwrap();
        let published = all.get(name).unwrap_or_else(|| panic!("tests/nccl has no {name}"));
        assert_eq!(address.trim_end_matches(')'), published.source, "{name}");
        assert_eq!(published.verdict, "as-expected", "{name}");
        let (model, reached) = (published.expected(), published.measured());
        assert_eq!((expected, measured), (&*gb(model), &*gb(reached)), "{name}");
        errors.push((model - reached).abs() / reached * 100.0);
        documented.insert(name);
    }
    let healthy: BTreeSet<&str> =
        all.iter().filter(|(_, published)| published.verdict == "as-expected").map(|(name, _)| name.as_str()).collect();
    assert_eq!(documented, healthy);
    errors.sort_by(f64::total_cmp);
    let (median, largest) = (errors[errors.len() / 2], errors[errors.len() - 1]);
    assert!(errors.len() % 2 == 1 && median <= 10.0, "{errors:?}");
    let sentence = format!("The median error is {median:.1} %, the largest {largest:.1} %.");
    assert!(section.contains(&sentence), "{sentence}");
}

/// GB/s with one decimal.
fn gb(megabytes: f64) -> String {
    format!("{:.1}", megabytes / 1000.0)
}

fn machine(name: &str) -> NodeObservation {
    machines::load(name).unwrap().observed
}

/// Compares a log and a table of one large size with a machine.
fn compare(machine: &NodeObservation, log: &str, bus: f64) -> Result<Comparison, MatchError> {
    let text = log.to_owned() + &table(machine.gpus.len() as u64, &[(1 << 33, vec![bus])]);
    Comparison::of(&NcclReport::read(&text).unwrap(), machine, None)
}

/// Takes down `number` NVLinks of a GPU; their far end is then `remote`.
fn links_down(machine: &mut NodeObservation, gpu: usize, number: usize, remote: NvLinkRemote) {
    let groups = machine.gpus[gpu].nvlinks.as_mut().unwrap();
    let kept = groups[0].links.len() - number;
    let links = groups[0].links.split_off(kept);
    groups.push(NvLinkObservation { links, remote, active: false });
}

#[test]
fn links_that_are_down_are_named_before_other_causes() {
    let healthy = machine("dgx-h100");
    let promised = compare(&healthy, "", 480_000.0).unwrap();
    assert_eq!((promised.verdict, promised.whole, &*promised.causes), (Verdict::AsExpected, Some(490_280), &[][..]));
    let far = healthy.gpus[3].nvlinks.as_ref().unwrap()[0].remote;
    for remote in [far, NvLinkRemote::Unknown] {
        let mut sick = healthy.clone();
        // Only links of the first group go down.
        let links = sick.gpus[3].nvlinks.as_ref().unwrap()[0].links.len();
        links_down(&mut sick, 3, links.min(4), remote);
        let comparison = compare(&sick, "", 370_000.0).unwrap();
        assert_eq!((comparison.verdict, comparison.whole), (Verdict::Below, Some(490_280)), "{comparison:?}");
        assert!(comparison.expectation.bandwidth() < Some(400_000), "{comparison:?}");
        let down = Cause::LinksDown { pci: sick.gpus[3].pci, down: links.min(4), of: 18 };
        assert_eq!(comparison.causes.first(), Some(&down));
    }
    // A GPU unlike the others and unknown NVLinks are named first too.
    let (mut odd, mut unknown) = (healthy.clone(), healthy);
    odd.gpus[3].pcie.as_mut().unwrap().width = 8;
    unknown.gpus[3].nvlinks = None;
    for (machine, words) in [(odd, "its PCIe link has 8 lanes"), (unknown, "their NVLinks are unknown")] {
        let comparison = compare(&machine, "", 300_000.0).unwrap();
        assert!(comparison.causes[0].to_string().contains(words), "{comparison:?}");
    }
}

#[test]
fn cause_names_the_setting_that_the_log_shows() {
    let a100 = machine("dgx-a100");
    let log = "n:1:2 [0] NCCL INFO NCCL_P2P_LEVEL set by environment to LOC\n\
               n:1:2 [0] NCCL INFO Channel 00 : 1[2a000] -> 0[27000] via SHM/direct/direct\n";
    let comparison = compare(&a100, log, 21_000.0).unwrap();
    assert_eq!(comparison.causes, [Cause::SharedMemory(Some("NCCL_P2P_LEVEL=LOC".into()))]);
    let comparison = compare(&a100, "NCCL_P2P_DISABLE=1 ./all_reduce_perf\n", 5_200.0).unwrap();
    assert_eq!(comparison.causes, [Cause::NvlinkUnused(Some("NCCL_P2P_DISABLE=1".into()))]);
    let h100 = machine("dgx-h100");
    let comparison = compare(&h100, "mpirun -x NCCL_NVLS_ENABLE=0\n", 365_000.0).unwrap();
    let setting = Some("NCCL_NVLS_ENABLE=0".to_owned());
    assert_eq!(comparison.causes, [Cause::NvlsUnused { ring: 370_800, setting }]);
    let comparison = compare(&machine("dgx1-v100"), "", 60_000.0).unwrap();
    assert_eq!(comparison.causes, [Cause::SlowRings { ring: 120_000, setting: None }]);
}

#[test]
fn unusual_runs_get_verdicts_of_their_own() {
    let mut pcie = machine("pcie-8x-pix-pairs");
    let capability = ComputeCapability { major: 8, minor: 6 };
    pcie.gpus.iter_mut().for_each(|gpu| gpu.compute_capability = Some(capability));
    let comparison = compare(&pcie, "", 3_000.0).unwrap();
    assert_eq!((comparison.verdict, &*comparison.causes), (Verdict::NotCalibrated, &[][..]));
    // A warning of the topology is still a cause.
    pcie.gpus[0].p2p_refused.insert(1, P2pRefusal::Chipset);
    assert!(matches!(&compare(&pcie, "", 3_000.0).unwrap().causes[..], [Cause::Warning(_)]));
    let h100 = machine("dgx-h100");
    assert_eq!(compare(&h100, "", 900_000.0).unwrap().verdict, Verdict::Above);
    let small = table(8, &[(1 << 28, vec![413_000.0])]);
    let small = Comparison::of(&NcclReport::read(&small).unwrap(), &h100, None).unwrap();
    assert_eq!((small.verdict, &*small.causes), (Verdict::TooSmall, &[][..]));
}

/// The list of ranks of a run, with the PCI addresses of a machine's GPUs on each host.
fn ranks(hosts: &[&str], machine: &NodeObservation, model: &str) -> String {
    let on_hosts = hosts.iter().flat_map(|host| machine.gpus.iter().map(move |gpu| (host, gpu)));
    let lines = on_hosts.enumerate().map(|(rank, (host, gpu))| {
        let (domain, bus, device) = (gpu.pci.domain(), gpu.pci.bus(), gpu.pci.device());
        format!(
            "#  Rank {rank} Group 0 Pid 7 on {host} device {} [{domain:04x}:{bus:02x}:{device:02x}] {model}\n",
            gpu.index
        )
    });
    lines.collect()
}

#[test]
fn run_over_several_hosts_names_gpus_far_from_nics() {
    let bridges = machine("nvlink-bridge-pairs");
    let list = ranks(&["a", "b"], &bridges, "NVIDIA RTX A6000");
    let (head, rows) = ("# nThread 1\n", table(16, &[(1 << 33, vec![20_000.0])]));
    let rows: String = rows.lines().filter(|line| !line.contains("nThread")).map(|line| format!("{line}\n")).collect();
    let report = NcclReport::read(&format!("{head}{list}{rows}")).unwrap();
    let comparison = Comparison::of(&report, &bridges, None).unwrap();
    assert_eq!((comparison.verdict, comparison.percent), (Verdict::SeveralHosts, None));
    // Only GPU 6 has a NIC at its host bridge.
    let far = bridges.gpus.iter().filter(|gpu| gpu.index != 6).map(|gpu| Cause::FarNic(gpu.pci));
    assert_eq!(comparison.causes, far.collect::<Vec<_>>());
}

#[test]
fn gpus_of_a_run_are_found_by_address_or_named() {
    let h100 = machine("dgx-h100");
    let mut four = h100.clone();
    four.gpus.drain(..4);
    let rows = table(4, &[(1 << 33, vec![365_000.0])]);
    let rows = rows.split_once("nGpus 8\n").unwrap().1.to_owned();
    let read = |list: String| NcclReport::read(&format!("# nThread 1 all_reduce_perf\n{list}{rows}")).unwrap();
    let found = Comparison::of(&read(ranks(&["n"], &four, "NVIDIA H100 80GB HBM3")), &h100, None).unwrap();
    assert_eq!((found.expectation.nvls, found.verdict), (Some(378_216), Verdict::AsExpected));
    let unknown = Comparison::of(&read(String::new()), &h100, None);
    assert_eq!(unknown, Err(MatchError::Unplaced { ranks: 0, gpus: 8 }));
    assert!(Comparison::of(&read(String::new()), &h100, Some(&[0, 1, 2, 3])).is_ok());
    let other = Comparison::of(&read(ranks(&["n"], &four, "NVIDIA A100-SXM4-80GB")), &h100, None);
    assert!(matches!(other, Err(MatchError::OtherModel { .. })), "{other:?}");
    let three = Comparison::of(&read(ranks(&["n"], &four, "NVIDIA H100")), &h100, Some(&[0, 1, 2]));
    assert_eq!(three, Err(MatchError::OtherNumber { ranks: 4, gpus: 3 }));
    let eight = Comparison::of(&read(String::new()), &h100, Some(&[0, 1, 2, 3, 4, 5, 6, 7]));
    assert_eq!(eight, Err(MatchError::OtherFactor(8)));
}

#[test]
fn broken_text_is_refused_in_one_line() {
    let gather = "# Collective test starting: all_gather_perf\n1048576 65536 float none -1 100.0 10.49 7.87 0\n";
    for (text, why) in [
        ("", "no table of nccl-tests"),
        (gather, "no all-reduce"),
        ("1048576 262144 float sum -1 100.0 10.", "no readable row"),
    ] {
        let (printed, code) = verify(text, &["--node", "dgx-h100"]);
        assert!(code == 1 && printed.contains(why) && printed.lines().count() == 1, "{printed}");
    }
    // A long line is read only once, so that it costs no quadratic time.
    let long = format!("{}\n{}", "[".repeat(4 << 20), "[ ".repeat(1 << 20));
    assert!(NcclReport::read(&long).is_err());
    let (printed, code) = verify("", &["--node", "dgx-h100", "--gpus", "9"]);
    assert!(code == 1 && !printed.is_empty(), "{printed}");
}

#[test]
fn printed_answers_match_golden_files() {
    let (printed, code) = verify(&table(8, &[(1 << 33, vec![367_200.0])]), &["--node", "dgx-h100"]);
    assert_eq!(code, 1);
    insta::assert_snapshot!("verify-below", printed);
    let expect = |args: &[&str]| {
        let output =
            Command::new(env!("CARGO_BIN_EXE_linkwise")).env_clear().arg("expect").args(args).output().unwrap();
        String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
    };
    insta::assert_snapshot!("expect-dgx-h100", expect(&["--node", "dgx-h100", "--gpus", "0,1,2,3"]));
    insta::assert_snapshot!("expect-pcie", expect(&["--node", "pcie-8x-pix-pairs"]));
    insta::assert_snapshot!("expect-json", expect(&["--node", "workstation-a6000", "--format", "json"]));
    assert!(expect(&["--node", "dgx-h100", "--gpus", "1,1"]).contains("name two or more"));
}
