//! The precedence of sources, and the settings and findings of files.

use clap::{Args, Command, FromArgMatches};
use proptest::prelude::*;

use super::*;
use linkwise_core::state::{DeviceSelector, ResourceName, SharedDevices};

fn given(args: &[&str]) -> Flags {
    let command = Flags::augment_args(Command::new("run").no_binary_name(true));
    Flags::from_arg_matches(&command.try_get_matches_from(args).unwrap()).unwrap()
}

fn build(args: &[&str], environment: &Environment, text: &str) -> (Settings, Vec<Finding>) {
    Settings::build(&given(args), environment, text)
}

/// The settings of a file without findings.
fn file(text: &str) -> Settings {
    let (settings, findings) = build(&[], &Environment::default(), text);
    assert_eq!(findings, [], "{text}");
    settings
}

/// The errors of a file, a line each.
fn errors(text: &str) -> Vec<String> {
    let (_, findings) = build(&[], &Environment::default(), text);
    let errors = findings.iter().filter(|finding| finding.severity == Severity::Error);
    errors.map(ToString::to_string).collect()
}

#[test]
fn flag_wins_over_variable_file_and_default() {
    let text = "flags:\n  migStrategy: single\n  plugin:\n    passDeviceSpecs: true\n";
    let variable = Environment::of([("MIG_STRATEGY", "mixed"), ("PASS_DEVICE_SPECS", "")]);
    let none = Environment::default();
    let args = ["--mig-strategy=none", "--pass-device-specs"];
    for (args, environment, text, strategy, from, specs) in [
        (&args[..], &variable, text, MigStrategy::None, Origin::Flag("mig-strategy"), true),
        (&[], &variable, text, MigStrategy::Mixed, Origin::Environment("MIG_STRATEGY"), false),
        (&[], &none, text, MigStrategy::Single, Origin::File(2), true),
        (&[], &none, "", MigStrategy::None, Origin::Default, false),
    ] {
        let (settings, findings) = build(args, environment, text);
        assert_eq!(findings, []);
        assert_eq!(settings.mig_strategy, Setting { value: strategy, origin: from });
        assert_eq!(settings.pass_device_specs.value, specs);
    }
}

#[test]
fn aliases_of_flags_and_variables_are_read() {
    let environment =
        Environment::of([("CONTAINER_DRIVER_ROOT", "/d"), ("CDI_DISABLE_HOOKS", "create-symlinks, update-ldcache")]);
    let (settings, findings) = build(&["--nvidia-driver-root=/r", "--cdi-disabled-hooks=all"], &environment, "");
    assert_eq!(findings, []);
    assert_eq!(settings.driver_root.value, PathBuf::from("/r"));
    assert_eq!(settings.dev_root.value, PathBuf::from("/r"), "the driver root has the device nodes");
    assert_eq!(settings.driver_root_ctr_path.value, PathBuf::from("/d"));
    assert_eq!(settings.cdi_disable_hooks.value, ["all"]);
}

#[test]
fn repeated_lists_add_up_last_of_other_flags_wins() {
    let args =
        ["--device-list-strategy=envvar", "--device-list-strategy=cdi-cri,cdi-annotations", "--mig-strategy", "single"];
    let (settings, _) = build(&[&args[..], &["--mig-strategy=mixed"]].concat(), &Environment::default(), "");
    use DeviceListStrategy::{CdiAnnotations, CdiCri, Envvar};
    assert_eq!(settings.device_list_strategy.value, [Envvar, CdiCri, CdiAnnotations]);
    assert_eq!(settings.mig_strategy.value, MigStrategy::Mixed);
}

#[test]
fn error_of_the_environment_names_the_variable() {
    let environment = Environment::of([("MIG_STRATEGY", "some"), ("CONFIG_FILE", "")]);
    let (settings, findings) = build(&[], &environment, "");
    assert_eq!(
        findings.iter().map(ToString::to_string).collect::<Vec<_>>(),
        ["MIG_STRATEGY: expected none, single or mixed, found 'some'"]
    );
    assert_eq!(settings.config_file.value, None, "an empty variable names no file");
}

#[test]
fn ignored_keys_are_notes_without_naming() {
    let text = "resources: {gpus: [{pattern: '*A100*', name: a100}]}\n\
                sharing:\n  timeSlicing:\n    renameByDefault: true\n    resources:\n\
                \x20   - {name: gpu, rename: nvidia.com/mine, devices: [0], replicas: 4}\n\
                \x20   - {name: gpu, devices: [1], replicas: 8}\n";
    let (settings, findings) = build(&[], &Environment::default(), text);
    let ignored: Vec<_> = findings.iter().map(|finding| (finding.line, finding.key.as_str())).collect();
    assert!(findings.iter().all(|finding| finding.severity == Severity::Note), "{findings:?}");
    assert_eq!(ignored.len(), 5, "{ignored:?}");
    assert_eq!(settings.resources.value, Resources::default());
    let slicing = settings.sharing.value.unwrap();
    let [shared] = slicing.resources.as_slice() else { panic!("{slicing:?}") };
    assert_eq!(shared.rename.as_ref().unwrap().as_str(), "nvidia.com/gpu.shared");
    assert_eq!((&shared.devices, shared.replicas), (&SharedDevices::All, 8));

    let (settings, findings) = build(&[], &Environment::default(), &format!("linkwise: {{naming: true}}\n{text}"));
    assert_eq!(findings, []);
    assert_eq!(settings.resources.value.gpus[0].name.as_str(), "nvidia.com/a100");
    let slicing = settings.sharing.value.unwrap();
    let names: Vec<_> = slicing.resources.iter().map(|resource| resource.rename.as_ref().unwrap().as_str()).collect();
    assert_eq!(names, ["nvidia.com/mine", "nvidia.com/gpu.shared"]);
    assert_eq!(slicing.resources[0].devices, SharedDevices::List(vec![DeviceSelector::Index(0)]));
}

#[test]
fn only_mps_fails_larger_requests_by_default() {
    let mps = |more: &str| {
        let text = format!("sharing:\n  mps:\n{more}    resources: [{{name: gpu, replicas: 2}}]\n");
        file(&text).sharing.value.unwrap().fail_requests_greater_than_one
    };
    assert!(mps(""));
    assert!(!mps("    failRequestsGreaterThanOne: false\n"));
    let slicing = file("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}}").sharing.value;
    assert!(!slicing.unwrap().fail_requests_greater_than_one);
}

#[test]
fn case_of_keys_is_ignored_where_go_ignores_it() {
    let (settings, findings) = build(&[], &Environment::default(), "flags:\n  MIGStrategy: mixed\n");
    assert_eq!(settings.mig_strategy.value, MigStrategy::Mixed);
    assert_eq!(findings[0].problem, "read as migStrategy");
    let strict = "sharing: {timeSlicing: {renamebydefault: true, resources: [{name: gpu, replicas: 2}]}}";
    let (settings, findings) = build(&[], &Environment::default(), strict);
    assert!(!settings.sharing.value.unwrap().rename_by_default);
    assert_eq!(findings[0].problem, "unknown key; did you mean 'renameByDefault'?");
}

#[test]
fn only_different_values_are_changes() {
    let (one, other) = (file("flags: {migStrategy: none}"), file("\n\nflags: {migStrategy: none, gdsEnabled: true}"));
    let changed: Vec<_> = one.changed(&other).iter().map(|changed| changed.key).collect();
    assert_eq!(changed, ["flags.gdsEnabled"]);
    assert_eq!(one.changed(&file("")), []);
}

#[test]
fn every_key_of_the_table_is_read() {
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
    for (flag, _) in FLAGS.iter().flatten() {
        assert!(written(&format!("--{flag}")), "--{flag}");
    }
    for variable in VARIABLES.concat() {
        assert!(written(variable), "{variable}");
    }
    for key in keys() {
        assert!(written(key), "{key}");
    }
}

#[test]
fn text_of_the_file_is_escaped_in_findings() {
    let long = "k".repeat(1000);
    let text = format!(
        "\"a\\nb\\x1bc\": 1\n{long}: 1\nversion: \"v\\n2\"\nflags: {{\"MIGStr\\u2028ategy\": none}}\n\
         linkwise:\n  policies: {{\"n\\no\": packed}}\n  health: {{xids: {{\"\\t\": ignore}}}}\n  \
         filter: {{exclude: [\"T\\n4\", \"T\\n4\", \"T\\n40\"]}}\n"
    );
    let (_, findings) = build(&[], &Environment::default(), &text);
    let lines: Vec<String> = findings.iter().map(ToString::to_string).collect();
    assert_eq!(lines.len(), 8, "{lines:#?}");
    assert_eq!(lines[0], r"line 1: a\nb\u{1b}c: unknown key");
    assert_eq!(lines[1], format!("line 2: {} ...: unknown key", "k".repeat(80)));
    for line in lines {
        assert!(line.len() < 400 && !line.chars().any(|c| c.is_control() || c == '\u{2028}'), "{line:?}");
    }
}

#[test]
fn strategies_that_need_more_than_nvml_are_refused() {
    for (strategy, words) in [("tegra", "integrated GPUs of Tegra"), ("vfio", "bound to vfio-pci")] {
        let environment = Environment::of([("DEVICE_DISCOVERY_STRATEGY", strategy)]);
        let (_, findings) = build(&[], &environment, "");
        let [finding] = findings.as_slice() else { panic!("{findings:?}") };
        assert_eq!((finding.severity, finding.key.as_str()), (Severity::Error, "DEVICE_DISCOVERY_STRATEGY"));
        assert!(finding.problem.contains(words), "{finding}");
    }
    assert_eq!(errors("flags: {deviceDiscoveryStrategy: auto}"), [""; 0]);
}

#[test]
fn name_that_kubelets_refuse_is_an_error() {
    let error = errors("linkwise: {naming: true}\nresources: {gpus: [{pattern: '*', name: kubernetes.io/gpu}]}");
    let expected = "line 2: resources.gpus[0].name: expected a resource name such as nvidia.com/gpu, found \
                    'kubernetes.io/gpu': kubernetes.io is reserved for Kubernetes";
    assert_eq!(error, [expected]);
    let quota = format!("sharing: {{mps: {{resources: [{{name: {}.io/gpu, replicas: 2}}]}}}}", "a".repeat(245));
    assert!(errors(&quota)[0].ends_with("too long for a quota (244 characters at most)"), "{:?}", errors(&quota));
    let name = "a".repeat(57);
    let text = format!("sharing: {{mps: {{renameByDefault: true, resources: [{{name: {name}, replicas: 2}}]}}}}");
    let [error] = errors(&text).try_into().unwrap();
    assert!(error.contains("resources[0].name: with renameByDefault, 'nvidia.com/aaa"), "{error}");
}

fn nearly_a_name() -> impl Strategy<Value = String> {
    let domain = prop_oneof![
        4 => "[a-z0-9]{1,3}(\\.[a-z0-9-]{1,3}){0,2}",
        1 => "(requests\\.)?[a-z]{0,2}\\.?kubernetes\\.io",
        1 => "requests\\.[a-z]{1,3}",
        1 => "([a-z]{48}\\.){4}[a-z]{47,58}",
        1 => "[a-zA-Z0-9._-]{0,4}",
    ];
    let name = prop_oneof![4 => "[a-zA-Z0-9._-]{1,6}", 1 => "[a-z]{62,64}", 1 => "[a-z/ é]{0,3}"];
    (domain, prop_oneof![9 => Just("/"), 1 => Just("")], name).prop_map(|(domain, slash, name)| domain + slash + &name)
}

proptest! {
    /// The box's rule was written from the kubelet's source, independently of ours.
    #[test]
    fn resource_names_are_those_that_kubelets_accept(name in nearly_a_name()) {
        let ours = name.parse::<ResourceName>();
        prop_assert_eq!(ours.is_ok(), linkwise_kubelet_box::is_extended_resource(&name), "{:?}", ours);
    }
}
