//! Compares our libnvidia-ml with NVIDIA's: on the machine of a recording it returns the same codes and the same facts.
//!
//! `real/` has the unchanged files that run.sh of `make gpu-kit` wrote on machines with GPUs: machine.yaml (by
//! `linkwise snapshot --redact`) and nvml-calls-snapshot.tsv, named after the model and the driver's version.
//!
//! - h200-580.159.04: one H200 handed to a virtual machine, open kernel modules, no NVLinks, MIG off, run as root.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use fake_nvml::Control;
use linkwise_host::machines::Machine;

/// The returned codes, by function and GPU.
fn codes(text: &str) -> BTreeMap<(String, String), BTreeSet<String>> {
    let mut codes = BTreeMap::<_, BTreeSet<_>>::new();
    for line in text.lines() {
        let columns: Vec<&str> = line.split('\t').collect();
        let [function, gpu, code, _] = columns[..] else { panic!("{line}") };
        codes.entry((function.to_owned(), gpu.to_owned())).or_default().insert(code.to_owned());
    }
    codes
}

/// Commands that give our library the recorded drivers' counters, which it lacks by default.
const AT_REST: [&str; 3] = ["recovery * 0", "rows * false false", "uncorrectable * 0"];

fn recordings() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nvml/real");
    let files = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "yaml")).collect()
}

#[test]
fn our_library_answers_as_recorded_drivers_do() {
    let recordings = recordings();
    assert!(!recordings.is_empty());
    for recorded in recordings {
        let folder = tempfile::tempdir().unwrap();
        let (calls, control) = (folder.path().join("calls.tsv"), Control::new(folder.path().join("control")));
        for command in AT_REST {
            control.send(command).unwrap();
        }
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_linkwise"));
        command.args(["snapshot", "--redact", "--nvml-calls"]).arg(&calls);
        command.env("LINKWISE_NVML_LIBRARY", fake_nvml::library_path()).env("FAKE_NVML_MACHINE", &recorded);
        command.env("FAKE_NVML_CONTROL", control.socket());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{recorded:?}: {output:?}");
        let real = codes(&fs::read_to_string(recorded.with_extension("tsv")).unwrap());
        let ours = codes(&fs::read_to_string(calls).unwrap());
        // linkwise may have changed its calls since the recording; most must be the same.
        let common: Vec<_> = ours.iter().filter_map(|(call, codes)| Some((call, codes, real.get(call)?))).collect();
        assert!(common.len() * 10 > real.len() * 9, "{recorded:?}: {} of {} calls", common.len(), real.len());
        let unlike: Vec<_> = common.iter().filter(|(_, ours, real)| ours != real).collect();
        assert!(unlike.is_empty(), "{recorded:?}: call, our codes, the driver's: {unlike:#?}");
        let gpus = |text: &str| Machine::parse(text).unwrap().observed.gpus;
        let printed = gpus(&String::from_utf8(output.stdout).unwrap());
        assert_eq!(printed, gpus(&fs::read_to_string(&recorded).unwrap()), "{recorded:?}");
    }
}
