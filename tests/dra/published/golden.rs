//! Golden files of the devices that the built-in machines publish, and the command that prints the slices.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::Command;

use linkwise_core::publish::dra::slice::Pool;
use linkwise_core::publish::dra::{Attribute, SliceDevice};
use linkwise_core::topology::{MigDeviceObservation, MigEngines, MigObservation, MigPlacement, NodeObservation};
use linkwise_host::machines;

use super::checker::check;
use super::limits::{mig_device, published};

/// Runs the binary. Returns its standard output and error; if it fails, asserts an empty output and returns the error.
pub fn run(args: &[&str]) -> Result<(String, String), String> {
    let output = Command::new(env!("CARGO_BIN_EXE_linkwise")).env_clear().args(args).output().unwrap();
    let [printed, stderr] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    if output.status.success() {
        return Ok((printed, stderr));
    }
    assert_eq!(printed, "", "{args:?}: {stderr}");
    Err(stderr)
}

/// Runs the binary, checks that it succeeds with nothing on standard error, and returns its output.
pub fn linkwise(args: &[&str]) -> String {
    let (printed, stderr) = run(args).unwrap();
    assert_eq!(stderr, "", "{args:?}");
    printed
}

/// Checks that the command with each of these arguments fails, and that its error contains the text.
pub fn assert_all_refused(command: &[&str], cases: &[(&[&str], &str)]) {
    for (args, text) in cases {
        let error = run(&[command, args].concat()).unwrap_err();
        assert!(error.contains(text), "{args:?}: {error}");
    }
}

/// A configuration file with this text.
pub fn config(text: &str) -> tempfile::TempPath {
    let file = tempfile::NamedTempFile::new().unwrap().into_temp_path();
    std::fs::write(&file, text).unwrap();
    file
}

/// Compares with tests/snapshots/NAME.snap.
pub fn assert_golden(name: &str, text: &str) {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path("../../snapshots");
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.bind(|| insta::assert_snapshot!(name, text));
}

/// The attributes and capacities of a device, by key.
fn values(device: &SliceDevice) -> BTreeMap<String, String> {
    let value = |attribute: &Attribute| match attribute {
        Attribute::Int(number) => number.to_string(),
        Attribute::String(text) => format!("\"{text}\""),
        Attribute::Version(version) => format!("v{version}"),
    };
    let attributes = device.attributes.iter().map(|(key, attribute)| (key.clone(), value(attribute)));
    let capacities = device.capacity.iter().map(|(key, capacity)| (format!("[{key}]"), capacity.value.clone()));
    attributes.chain(capacities).collect()
}

/// The text of a golden file: the values that all devices have, then a paragraph for each device.
fn text(devices: &[SliceDevice]) -> String {
    let all: Vec<_> = devices.iter().map(values).collect();
    let mut common = all.first().cloned().unwrap_or_default();
    common.retain(|key, value| all.iter().all(|values| values.get(key) == Some(value)));
    let mut text = format!("all {} devices\n", devices.len());
    for (key, value) in &common {
        writeln!(text, "  {key} = {value}").unwrap();
    }
    for (device, values) in devices.iter().zip(&all) {
        writeln!(text, "{}", device.name).unwrap();
        for (key, value) in values.iter().filter(|(key, _)| !common.contains_key(*key)) {
            writeln!(text, "  {key} = {value}").unwrap();
        }
    }
    text
}

/// A machine whose first GPU is cut into 1g, 1g and 3g, as an A100.
fn with_mig(mut observed: NodeObservation) -> NodeObservation {
    let device = |index: u32, slices: u32, profile_id, start, size| MigDeviceObservation {
        uuid: format!("MIG-{index:08}-0000-4000-8000-000000000000").parse().unwrap(),
        gpu_instance: 7 + index,
        memory_mib: 9_728 * u64::from(size),
        engines: Some(MigEngines { multiprocessors: 14 * slices, copy: slices, ..MigEngines::default() }),
        ..mig_device(index, slices, profile_id, MigPlacement { start, size })
    };
    let devices = vec![device(0, 3, 9, 4, 4), device(1, 1, 19, 0, 1), device(2, 1, 19, 1, 1)];
    observed.gpus[0].mig = Some(MigObservation { enabled: true, devices, profiles: Vec::new() });
    observed
}

#[test]
fn built_in_machines_keep_their_slices() {
    for machine in machines::built_in() {
        let observed = machines::load(machine.name).unwrap().observed;
        let mut golden = text(&published(&observed, &[]));
        if observed.gpus[0].mig.is_some() {
            let devices = published(&with_mig(observed), &[]);
            write!(golden, "\nwith MIG on the first GPU\n{}", text(&devices[devices.len() - 3..])).unwrap();
            let names: String = devices.iter().map(|device| device.name.clone() + "\n").collect();
            write!(golden, "\n{names}").unwrap();
        }
        assert_golden(&format!("dra-{}", machine.name), &golden);
    }
}

#[test]
fn command_prints_what_the_machine_publishes() {
    assert_golden(
        "dra-command-workstation-a6000",
        &linkwise(&["dra", "--node", "workstation-a6000", "--format", "yaml"]),
    );
    for machine in machines::built_in() {
        let args = ["dra", "--node", machine.name, "--node-name", "gpu-1.example.org"];
        let list: serde_json::Value = serde_json::from_str(&linkwise(&args)).unwrap();
        assert_eq!((&list["apiVersion"], &list["kind"]), (&"v1".into(), &"List".into()));
        let items = list["items"].as_array().unwrap();
        let specs: Vec<_> = items.iter().map(|item| item["spec"].clone()).collect();
        check(&specs);
        let devices = published(&machines::load(machine.name).unwrap().observed, &[]);
        let pool = Pool::new("gpu-1.example.org", devices);
        assert_eq!(serde_json::to_value(pool.slices(1)).unwrap(), serde_json::Value::Array(specs), "{}", machine.name);
        for (item, number) in items.iter().zip(0..) {
            assert_eq!(item["apiVersion"], "resource.k8s.io/v1");
            assert_eq!(item["kind"], "ResourceSlice");
            let name = format!("{number:05}-gpu.nvidia.com-gpu-1.example.org-slice");
            assert_eq!(item["metadata"], serde_json::json!({"name": name}));
        }
        let yaml = linkwise(&[args.as_slice(), &["--format", "yaml"]].concat());
        assert_eq!(serde_saphyr::from_str::<serde_json::Value>(&yaml).unwrap(), list, "{}", machine.name);
    }
}

#[test]
fn settings_choose_the_devices_of_the_command() {
    let names = |args: &[&str]| -> Vec<String> {
        let list = linkwise(&[&["dra", "--node", "dgx-h100"], args].concat());
        let list: serde_json::Value = serde_json::from_str(&list).unwrap();
        let devices = list["items"][0]["spec"]["devices"].as_array().unwrap();
        devices.iter().map(|device| device["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&[]).len(), 8, "the command must ignore the node's door");
    let config = config("version: v1\nlinkwise: {filter: {exclude: [0, 1, 3, 4, 5, 6, 7]}}\n");
    assert_eq!(names(&["--config-file", config.to_str().unwrap()]), ["gpu-2"]);
}
