//! Who beats whom, and what the file of an operator comes to.

use clap::{Args, Command, FromArgMatches};

use super::*;
use crate::config::file::{Problem, Weight};
use crate::state::DeviceSelector;

fn given(args: &[&str]) -> Flags {
    let command = Flags::augment_args(Command::new("run").no_binary_name(true));
    Flags::from_arg_matches(&command.try_get_matches_from(args).unwrap()).unwrap()
}

fn build(args: &[&str], environment: &Environment, text: &str) -> (Settings, Vec<Finding>) {
    let (file, mut findings) = File::parse(text);
    let sources = Sources { flags: &given(args), environment, file: &file };
    let settings = Settings::build(&sources, &mut findings);
    (settings, findings)
}

/// A file that says nothing wrong.
fn file(text: &str) -> Settings {
    let (settings, findings) = build(&[], &Environment::default(), text);
    assert_eq!(findings, [], "{text}");
    settings
}

/// The errors of a file, a line each.
fn errors(text: &str) -> Vec<String> {
    let (_, findings) = build(&[], &Environment::default(), text);
    let errors = findings.iter().filter(|finding| finding.problem.weight() == Weight::Error);
    errors.map(ToString::to_string).collect()
}

#[test]
fn a_flag_beats_a_variable_beats_the_file_beats_the_default() {
    let text = "flags:\n  migStrategy: single\n  plugin:\n    passDeviceSpecs: true\n";
    let variable = Environment::of([("MIG_STRATEGY", "mixed"), ("PASS_DEVICE_SPECS", "")]);
    let none = Environment::default();
    let args = ["--mig-strategy=none", "--pass-device-specs"];
    for (args, environment, text, strategy, from, specs) in [
        (&args[..], &variable, text, MigStrategy::None, Origin::Flag { flag: "mig-strategy" }, true),
        (&[], &variable, text, MigStrategy::Mixed, Origin::Environment { variable: "MIG_STRATEGY" }, false),
        (&[], &none, text, MigStrategy::Single, Origin::File { line: 2 }, true),
        (&[], &none, "", MigStrategy::None, Origin::Default, false),
    ] {
        let (settings, findings) = build(args, environment, text);
        assert_eq!(findings, []);
        assert_eq!(settings.mig_strategy, Setting { value: strategy, origin: from });
        assert_eq!(settings.pass_device_specs.value, specs);
    }
}

#[test]
fn the_defaults_are_the_nvidia_plugins() {
    let settings = Settings::defaults();
    let shown = settings.shown();
    let value = |key: &str| shown.iter().find(|shown| shown.key == key).unwrap().value.clone();
    for (key, expected) in [
        ("flags.migStrategy", "none"),
        ("flags.nvidiaDriverRoot", "/"),
        ("flags.nvidiaDevRoot", "/"),
        ("flags.deviceDiscoveryStrategy", "auto"),
        ("flags.plugin.deviceIDStrategy", "uuid"),
        ("flags.plugin.cdiAnnotationPrefix", "cdi.k8s.io/"),
        ("flags.plugin.containerDriverRoot", "/driver-root"),
        ("flags.plugin.kubeletSocket", "/var/lib/kubelet/device-plugins/kubelet.sock"),
        ("flags.plugin.sharedDevicesAllocationPolicy", "distributed"),
    ] {
        assert_eq!(value(key), expected, "{key}");
    }
    assert_eq!(value("flags.plugin.deviceListStrategy"), serde_json::json!(["envvar"]));
    assert!(shown.iter().all(|shown| shown.origin == Origin::Default));
}

#[test]
fn other_names_of_a_flag_and_a_variable_count() {
    let environment =
        Environment::of([("CONTAINER_DRIVER_ROOT", "/d"), ("CDI_DISABLE_HOOKS", "create-symlinks, update-ldcache")]);
    let (settings, findings) = build(&["--nvidia-driver-root=/r", "--cdi-disabled-hooks=all"], &environment, "");
    assert_eq!(findings, []);
    assert_eq!(settings.driver_root.value, PathBuf::from("/r"));
    assert_eq!(settings.dev_root.value, PathBuf::from("/r"), "the device nodes are where the driver is");
    assert_eq!(settings.driver_root_ctr_path.value, PathBuf::from("/d"));
    assert_eq!(settings.cdi_disable_hooks.value, ["all"]);
}

#[test]
fn a_list_may_be_given_several_times_and_anything_else_counts_as_it_was_given_last() {
    let args =
        ["--device-list-strategy=envvar", "--device-list-strategy=cdi-cri,cdi-annotations", "--mig-strategy", "single"];
    let (settings, _) = build(&[&args[..], &["--mig-strategy=mixed"]].concat(), &Environment::default(), "");
    use DeviceListStrategy::{CdiAnnotations, CdiCri, Envvar};
    assert_eq!(settings.device_list_strategy.value, [Envvar, CdiCri, CdiAnnotations]);
    assert_eq!(settings.mig_strategy.value, MigStrategy::Mixed);
}

#[test]
fn what_is_wrong_in_the_environment_is_named() {
    let environment = Environment::of([("MIG_STRATEGY", "some"), ("CONFIG_FILE", "")]);
    let (settings, findings) = build(&[], &environment, "");
    assert_eq!(
        findings.iter().map(ToString::to_string).collect::<Vec<_>>(),
        ["MIG_STRATEGY: expected none, single or mixed, found 'some'"]
    );
    assert_eq!(settings.config_file.value, None, "an empty variable names no file");
}

#[test]
fn without_naming_what_the_nvidia_plugin_ignores_is_ignored_and_told_of() {
    let text = "resources: {gpus: [{pattern: '*A100*', name: a100}]}\n\
                sharing:\n  timeSlicing:\n    renameByDefault: true\n    resources:\n\
                \x20   - {name: gpu, rename: nvidia.com/mine, devices: [0], replicas: 4}\n\
                \x20   - {name: gpu, devices: [1], replicas: 8}\n";
    let (settings, findings) = build(&[], &Environment::default(), text);
    let ignored: Vec<_> = findings.iter().map(|finding| (finding.line, finding.key.as_str())).collect();
    assert!(findings.iter().all(|finding| finding.problem.weight() == Weight::Note), "{findings:?}");
    assert_eq!(ignored.len(), 5, "{ignored:?}");
    assert_eq!(settings.resources.value, Resources::default());
    let slicing = settings.sharing.value.time_slicing.unwrap();
    let [shared] = slicing.resources.as_slice() else { panic!("{slicing:?}") };
    assert_eq!(shared.offered_as().as_str(), "nvidia.com/gpu.shared");
    assert_eq!((&shared.devices, shared.replicas), (&ReplicatedDevices::All, 8));

    let (settings, findings) = build(&[], &Environment::default(), &format!("linkwise: {{naming: true}}\n{text}"));
    assert_eq!(findings, []);
    assert_eq!(settings.resources.value.gpus[0].name.as_str(), "nvidia.com/a100");
    let slicing = settings.sharing.value.time_slicing.unwrap();
    let names: Vec<_> = slicing.resources.iter().map(|resource| resource.offered_as().as_str()).collect();
    assert_eq!(names, ["nvidia.com/mine", "nvidia.com/gpu.shared"]);
    assert_eq!(slicing.resources[0].devices, ReplicatedDevices::List(vec![DeviceSelector::Index(0)]));
}

#[test]
fn mps_refuses_more_than_one_unless_told_otherwise_and_time_slicing_does_not() {
    let mps = |more: &str| {
        let text = format!("sharing:\n  mps:\n{more}    resources: [{{name: gpu, replicas: 2}}]\n");
        file(&text).sharing.value.mps.unwrap().fail_requests_greater_than_one
    };
    assert!(mps(""));
    assert!(!mps("    failRequestsGreaterThanOne: false\n"));
    let slicing = file("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}}").sharing.value.time_slicing;
    assert!(!slicing.unwrap().fail_requests_greater_than_one);
}

#[test]
fn keys_are_read_in_any_case_where_go_reads_them_so() {
    let (settings, findings) = build(&[], &Environment::default(), "flags:\n  MIGStrategy: mixed\n");
    assert_eq!(settings.mig_strategy.value, MigStrategy::Mixed);
    assert_eq!(findings[0].problem, Problem::OtherCase("migStrategy".to_owned()));
    let strict = "sharing: {timeSlicing: {renamebydefault: true, resources: [{name: gpu, replicas: 2}]}}";
    let (settings, findings) = build(&[], &Environment::default(), strict);
    assert!(!settings.sharing.value.time_slicing.unwrap().rename_by_default);
    assert_eq!(findings[0].problem, Problem::UnknownKey(Some("renameByDefault".to_owned())));
}

#[test]
fn every_error_of_a_file_is_told_with_its_line() {
    let text = "version: v1\nflags:\n  migStrategy: sometimes\n  failOnInitError: \"true\"\n  plugin: 3\n\
                imex:\n  channelIDs: [1]\n";
    assert_eq!(
        errors(text),
        [
            "line 3: flags.migStrategy: expected none, single or mixed, found 'sometimes'",
            "line 4: flags.failOnInitError: expected true or false, found 'true'",
            "line 5: flags.plugin: expected a mapping, found 3",
            "line 7: imex.channelIDs: expected [] or [0], found [1]",
        ]
    );
}

#[test]
fn only_values_make_a_change() {
    let (one, other) = (file("flags: {migStrategy: none}"), file("\n\nflags: {migStrategy: none, gdsEnabled: true}"));
    assert_eq!(one.changed(&other), ["flags.gdsEnabled"]);
    assert_eq!(one.changed(&Settings::defaults()), [] as [&str; 0]);
}

#[test]
fn every_key_of_the_table_can_be_written_and_is_read() {
    for key in keys() {
        let parts: Vec<&str> = key.split('.').collect();
        let mut text = String::new();
        for (depth, part) in parts.iter().enumerate() {
            text.push_str(&format!("{}{part}:", "  ".repeat(depth)));
            text.push_str(if depth + 1 == parts.len() { " {nonsense: 1}\n" } else { "\n" });
        }
        let errors = errors(&text);
        assert_eq!(errors.len(), 1, "{key}: {errors:?}");
        assert!(errors[0].starts_with(&format!("line {}: {key}: expected ", parts.len())), "{errors:?}");
    }
}

#[test]
fn every_setting_is_documented() {
    let documents =
        concat!(include_str!("../../../docs/compatibility.md"), include_str!("../../../docs/configuration.md"),);
    let written = |name: &str| documents.contains(&format!("`{name}`"));
    for flag in flags() {
        assert!(written(&format!("--{flag}")), "--{flag}");
    }
    for variable in variables() {
        assert!(written(variable), "{variable}");
    }
    for key in keys() {
        // Those of gpu-feature-discovery are listed behind their first.
        let last = key.rsplit('.').next().unwrap_or(key);
        assert!(written(key) || key.starts_with("flags.gfd.") && written(last), "{key}");
    }
}
