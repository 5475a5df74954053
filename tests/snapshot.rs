//! `linkwise snapshot` and the files that `--node` takes, through the real binary over a libnvidia-ml of our own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use linkwise_host::machines::Machine;
use tempfile::TempDir;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn linkwise(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_linkwise"))
        .args(args)
        .env("LINKWISE_NVML_LIBRARY", fake_nvml::library_path())
        .env("FAKE_NVML_MACHINE", root().join("lab/fake-nvml/machines/four-gpus.yaml"))
        .output()
        .unwrap()
}

/// Standard output of a command that succeeds.
fn output(args: &[&str]) -> String {
    let output = linkwise(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The one line with which a command is refused.
fn refused(args: &[&str]) -> String {
    let output = linkwise(args);
    assert_eq!(output.status.code(), Some(1), "{args:?}");
    assert_eq!(output.stdout, b"", "{args:?}");
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(message.lines().count(), 1, "{message}");
    message
}

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    fn put(&self, name: &str, text: &str) -> String {
        fs::write(self.path(name), text).unwrap();
        self.path(name)
    }

    fn names(&self) -> Vec<PathBuf> {
        let mut names: Vec<_> =
            fs::read_dir(self.0.path()).unwrap().map(|file| file.unwrap().file_name().into()).collect();
        names.sort();
        names
    }
}

fn topology(more: &[&str]) -> String {
    output(&[&["topology", "--format", "json"], more].concat())
}

#[test]
fn unwritable_record_of_nvml_calls_fails_no_snapshot() {
    let folder = Folder::new();
    let (record, nowhere) = (folder.path("calls.tsv"), folder.path("no/calls.tsv"));
    output(&["snapshot", "--nvml-calls", &record]);
    assert!(fs::read_to_string(record).unwrap().starts_with("nvmlInit_v2\t-\t0\t"));
    let without = linkwise(&["snapshot", "--nvml-calls", &nowhere]);
    assert!(without.status.success() && !without.stdout.is_empty(), "{without:?}");
    let errors = String::from_utf8(without.stderr).unwrap();
    assert!(errors.contains(&format!("--nvml-calls {nowhere}: No such file")), "{errors}");
}

#[test]
fn snapshot_reads_back_to_same_topology() {
    let folder = Folder::new();
    let file = folder.path("node.yaml");
    assert_eq!(output(&["snapshot", "--output", &file]), "");
    assert_eq!(topology(&["--node", &file]), topology(&[]));

    let text = fs::read_to_string(&file).unwrap();
    let machine = Machine::parse(&text).unwrap();
    assert_eq!(machine.title, "3x NVIDIA H100 80GB HBM3, 1x GPU of unknown model");
    assert_eq!(machine.name, fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim());
    assert_eq!(machine.observed.gpus.len(), 4);
    let named = output(&["snapshot", "--name", "rack 7"]);
    assert_eq!(Machine::parse(&named).unwrap(), Machine { name: "rack 7".to_owned(), ..machine });
}

#[test]
fn redacted_snapshot_has_no_identifiers() {
    let open = Machine::parse(&output(&["snapshot"])).unwrap();
    let text = output(&["snapshot", "--redact"]);
    for gpu in &open.observed.gpus {
        assert!(!text.contains(gpu.uuid.as_str()), "{}", gpu.uuid);
    }
    let clusters = open.observed.gpus.iter().filter_map(|gpu| Some(gpu.fabric.as_ref()?.cluster.clone()));
    // Zeros identify no cluster.
    let mut clusters = clusters.filter(|cluster| cluster.contains("abc")).peekable();
    assert!(clusters.peek().is_some() && clusters.all(|cluster| !text.contains(&cluster)));
    let redacted = Machine::parse(&text).unwrap();
    assert_eq!(redacted.name, "node");
    assert_eq!(redacted.observed.host, open.observed.host);
    assert_eq!(Machine::parse(&output(&["snapshot", "--redact", "--name", "x"])).unwrap().name, "x");
}

#[test]
fn existing_file_is_kept_without_force() {
    let folder = Folder::new();
    let file = folder.put("node.yaml", "precious");
    let message = refused(&["snapshot", "--output", &file]);
    assert!(message.contains("node.yaml") && message.contains("--force"), "{message}");
    assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
    output(&["snapshot", "--output", &file, "--force"]);
    assert!(Machine::parse(&fs::read_to_string(&file).unwrap()).is_ok());
    assert!(refused(&["snapshot", "--output", "/dev/null", "--force"]).contains("is not a file"));
    assert!(refused(&["snapshot", "--output", &folder.path("no/where")]).contains("no/where"));
    assert_eq!(folder.names(), [PathBuf::from("node.yaml")], "a half-written file stayed");
}

#[test]
fn nccl_dump_becomes_node_file() {
    let folder = Folder::new();
    let dump = root().join("crates/host/src/machines/nccl/testdata/dump.xml");
    let file = folder.path("node.yaml");
    output(&["snapshot", "--node", dump.to_str().unwrap(), "--output", &file]);
    assert_eq!(topology(&["--node", &file]), topology(&["--node", dump.to_str().unwrap()]));
    assert_eq!(Machine::parse(&fs::read_to_string(&file).unwrap()).unwrap().name, "dump");
}

#[test]
fn hwloc_xml_serves_as_machine() {
    // The format that hwloc 3 writes.
    let host = root().join("crates/host/src/machines/hwloc_xml/testdata/v3.xml");
    let host = host.to_str().unwrap();
    let text = output(&["topology", "--node", host]);
    assert!(text.contains("3 GPUs by a hwloc XML") && text.contains("PIX") && text.contains("mlx5_0"), "{text}");
    let chosen = output(&["allocate", "--node", host, "--size", "2"]);
    assert!(chosen.contains("GPU 0") && chosen.contains("GPU 1"), "{chosen}");
}

#[test]
fn example_in_docs_is_a_node_file() {
    let docs = fs::read_to_string(root().join("docs/machines.md")).unwrap();
    let lines = docs.lines().skip_while(|line| !line.starts_with("    version: 1"));
    let example: Vec<_> = lines.take_while(|line| line.starts_with("    ")).map(|line| line.split_at(4).1).collect();
    let machine = Machine::parse(&example.join("\n")).unwrap();
    assert_eq!((machine.observed.gpus.len(), machine.observed.host.host_bridges.len()), (1, 1));
}
