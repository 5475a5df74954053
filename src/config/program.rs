//! The program's name, which is the file name in argv[0]. If it is the name of one of NVIDIA's programs, linkwise runs
//! the subcommand that replaces the program.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use clap::{Arg, Args, Subcommand};

use super::{Command, LabelsArgs};

/// The name of the program of NVIDIA's DRA driver that serves GPUs.
const DRA_DRIVER: &str = "gpu-kubelet-plugin";

/// The programs of NVIDIA's images, each with the subcommand that replaces it.
const PROGRAMS: [(&str, &str); 5] = [
    ("nvidia-device-plugin", "run"),
    (DRA_DRIVER, "run"),
    ("gpu-feature-discovery", "labels"),
    ("mps-control-daemon", "mps-control-daemon"),
    ("config-manager", "config-manager"),
];

/// The kubelet's folder if no variable names another one.
const KUBELET_ROOT: &str = "/var/lib/kubelet";
/// The admin socket to which the commands connect by default.
const ADMIN_SOCKET: &str = "/run/linkwise/admin.sock";

/// Gives flags two dashes, and inserts the missing subcommand: the one that the program's name implies, or else `run`
/// if the first argument is a flag other than help and version. `linkwise` alone and `--version` get none. If the
/// name is [`DRA_DRIVER`], the subcommand comes with the flags that the variables of NVIDIA's DRA driver imply.
pub(super) fn words(
    words: impl IntoIterator<Item = OsString>,
    variable: impl Fn(&str) -> Option<String>,
) -> Vec<OsString> {
    let mut words: Vec<OsString> = words.into_iter().collect();
    double_dashes(words.get_mut(1..).unwrap_or_default());
    let name = words.first().and_then(|name| Path::new(name).file_name());
    let program = PROGRAMS.iter().find(|(program, _)| name.is_some_and(|name| name == *program));
    let program = program.map(|(_, subcommand)| *subcommand);
    let first = words.get(1).map(|word| word.to_string_lossy().into_owned());
    let subcommand = match first.as_deref() {
        Some("-V" | "--version") => None,
        Some("-h" | "--help") | None => program,
        Some(word) if word.starts_with('-') => Some(program.unwrap_or("run")),
        // Any other word is a subcommand, or one of the program's own words, such as `mount-shm`.
        Some(word) => program.filter(|_| !Command::has_subcommand(word)),
    };
    if let Some(subcommand) = subcommand.filter(|_| !words.is_empty()) {
        if name.is_some_and(|name| name == DRA_DRIVER) {
            let rest = without_verbosity(words.split_off(1));
            words.extend(dra_driver_flags(&rest, variable).into_iter().map(OsString::from).chain(rest));
        }
        words.insert(1, subcommand.into());
    }
    words
}

/// The flags with the effect of the variables of NVIDIA's DRA driver (`cmd/gpu-kubelet-plugin/main.go`), which the GPU
/// Operator sets for a GPUCluster (`manifests/state-dra-driver/0500_daemonset.yaml`). linkwise's own flags and
/// variables win over them. All GPUs go through DRA. The pod does not mount the kubelet's folder of device plugins,
/// where linkwise otherwise keeps its files beside the kubelet's socket. So `kubelet-socket` names a path in the
/// folder of the DRA drivers, where no socket is.
fn dra_driver_flags(words: &[OsString], variable: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let given = |name: &str| variable(name).filter(|value| !value.is_empty());
    let plugins = given("KUBELET_PLUGINS_DIRECTORY_PATH").unwrap_or_else(|| format!("{KUBELET_ROOT}/plugins"));
    let kubelet = Path::new(&plugins).parent().and_then(Path::to_str).unwrap_or(KUBELET_ROOT);
    let pod_resources = given("HOST_ROOT").map(|host| {
        let host = host.trim_end_matches('/');
        format!("{host}{kubelet}/pod-resources/kubelet.sock")
    });
    // Go's form of an address may have the name localhost, or no host, which means all of the pod's addresses.
    let metrics = given("HTTP_ENDPOINT").map(|at| match at.split_once(':') {
        Some(("", port)) => format!("[::]:{port}"),
        Some(("localhost", port)) => format!("127.0.0.1:{port}"),
        _ => at,
    });
    let gates = given("FEATURE_GATES").unwrap_or_default();
    let dynamic_mig = gates.split(',').filter_map(|gate| gate.trim().strip_prefix("DynamicMIG=")).next_back();
    // In NVIDIA's driver a negative port means that there is no such service.
    let health = given("HEALTHCHECK_PORT").filter(|port| !port.starts_with('-'));
    // NVIDIA's driver takes only numbers as XIDs; linkwise would turn every check off at `all` or 0.
    let is_xid = |item: &&str| item.parse::<u64>().is_ok_and(|xid| xid > 0);
    let ignored = given("ADDITIONAL_XIDS_TO_IGNORE")
        .map(|list| list.split(',').map(str::trim).filter(is_xid).collect::<Vec<_>>().join(","));
    let ignored = ignored.filter(|list| !list.is_empty());
    let flags = [
        ("dra-gpus", "LINKWISE_DRA_GPUS", Some("all".to_owned())),
        ("dra-registry-dir", "LINKWISE_DRA_REGISTRY_DIR", given("KUBELET_REGISTRAR_DIRECTORY_PATH")),
        ("kubelet-socket", "KUBELET_SOCKET", Some(format!("{plugins}/kubelet.sock"))),
        ("dra-plugins-dir", "LINKWISE_DRA_PLUGINS_DIR", Some(plugins)),
        ("cdi-dir", "LINKWISE_CDI_DIR", given("CDI_ROOT")),
        ("pod-resources-socket", "LINKWISE_POD_RESOURCES_SOCKET", pod_resources),
        ("metrics-address", "LINKWISE_METRICS_ADDRESS", metrics),
        ("admin-socket", "LINKWISE_ADMIN_SOCKET", Some(ADMIN_SOCKET.to_owned())),
        ("dra-dynamic-mig", "LINKWISE_DRA_DYNAMIC_MIG", dynamic_mig.map(str::to_lowercase)),
        ("disable-healthchecks", "DP_DISABLE_HEALTHCHECKS", ignored),
        ("healthcheck-port", "LINKWISE_HEALTHCHECK_PORT", health),
    ];
    let has_flag = |flag: &str| {
        let is_flag = |word: &OsString| Some(word.to_str()?.strip_prefix("--")?.split('=').next()? == flag);
        words.iter().any(|word| is_flag(word) == Some(true))
    };
    let wanted = flags.into_iter().filter(|(flag, ours, _)| given(ours).is_none() && !has_flag(flag));
    wanted.filter_map(|(flag, _, value)| Some(format!("--{flag}={}", value?))).collect()
}

/// The variables of NVIDIA's DRA driver that linkwise does not follow if the program's name is [`DRA_DRIVER`]: a number
/// of shares, and feature gates. The gate DynamicMIG is read; the gate for health changes nothing, because linkwise
/// always watches health.
pub(super) fn unread(program: &OsStr, variable: impl Fn(&str) -> Option<String>) -> Vec<String> {
    if Path::new(program).file_name().is_none_or(|name| name != DRA_DRIVER) {
        return Vec::new();
    }
    let shares = variable("CONSUMABLE_SHARES").filter(|shares| !["", "disabled"].contains(&shares.as_str()));
    let gates = variable("FEATURE_GATES").unwrap_or_default();
    let on = gates.split(',').filter_map(|gate| gate.trim().strip_suffix("=true"));
    let on = on.filter(|gate| !["DynamicMIG", "NVMLDeviceHealthCheck"].contains(gate));
    let gates = on.map(|gate| format!("FEATURE_GATES={gate}"));
    shares.map(|_| "CONSUMABLE_SHARES".to_owned()).into_iter().chain(gates).collect()
}

/// The words without klog's `-v LEVEL` (`-v=LEVEL`, `--v LEVEL`): linkwise's level is in --log.
fn without_verbosity(words: Vec<OsString>) -> Vec<OsString> {
    let mut left = Vec::new();
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        match word.to_str() {
            Some("-v" | "--v") => drop(words.next()),
            Some(level) if level.starts_with("-v=") || level.starts_with("--v=") => {}
            _ => left.push(word),
        }
    }
    left
}

/// Gives known flags two dashes if they have one, which Go's programs accept: `-mig-strategy=mixed`.
fn double_dashes(words: &mut [OsString]) {
    fn flag(word: &OsString) -> Option<&str> {
        word.to_str()?.strip_prefix('-').filter(|flag| flag.len() > 1 && !flag.starts_with('-'))
    }
    // The flags are built only if a word needs them, because that takes time. `labels` has the flags of all settings.
    if !words.iter().any(|word| flag(word).is_some()) {
        return;
    }
    let command = LabelsArgs::augment_args(clap::Command::new("labels"));
    let known = command.get_arguments().filter_map(Arg::get_long_and_visible_aliases).flatten();
    let known: Vec<&str> = known.chain(["help", "version"]).collect();
    // Words after `--` are not flags.
    for word in words.iter_mut().take_while(|word| *word != "--") {
        let flag = flag(word).filter(|flag| flag.split('=').next().is_some_and(|name| known.contains(&name)));
        if let Some(double) = flag.map(|flag| format!("--{flag}")) {
            *word = double.into();
        }
    }
}

#[cfg(test)]
mod tests {
    fn words(line: &str) -> String {
        let words = super::words(line.split_whitespace().map(Into::into), |_| None);
        let words: Vec<_> = words.iter().map(|word| word.to_str().unwrap()).collect();
        words.join(" ")
    }

    #[test]
    fn missing_subcommand_is_inserted() {
        for (line, read) in [
            ("linkwise", "linkwise"),
            ("linkwise --help", "linkwise --help"),
            ("linkwise --version", "linkwise --version"),
            ("linkwise --mig-strategy=mixed", "linkwise run --mig-strategy=mixed"),
            ("linkwise run --help", "linkwise run --help"),
            ("linkwise topology", "linkwise topology"),
            ("nvidia-device-plugin", "nvidia-device-plugin run"),
            ("/usr/bin/nvidia-device-plugin --config-file x", "/usr/bin/nvidia-device-plugin run --config-file x"),
            ("nvidia-device-plugin --help", "nvidia-device-plugin run --help"),
            ("nvidia-device-plugin --version", "nvidia-device-plugin --version"),
            ("nvidia-device-plugin run", "nvidia-device-plugin run"),
            ("nvidia-device-plugin topology", "nvidia-device-plugin topology"),
            ("gpu-feature-discovery", "gpu-feature-discovery labels"),
            ("/usr/bin/gpu-feature-discovery -o x", "/usr/bin/gpu-feature-discovery labels -o x"),
            ("gpu-feature-discovery labels", "gpu-feature-discovery labels"),
            ("mps-control-daemon", "mps-control-daemon mps-control-daemon"),
            ("/usr/bin/mps-control-daemon mount-shm", "/usr/bin/mps-control-daemon mps-control-daemon mount-shm"),
            ("mps-control-daemon --config-file x", "mps-control-daemon mps-control-daemon --config-file x"),
            ("mps-control-daemon --help", "mps-control-daemon mps-control-daemon --help"),
            ("mps-control-daemon --version", "mps-control-daemon --version"),
            ("mps-control-daemon mps-control-daemon", "mps-control-daemon mps-control-daemon"),
            ("linkwise mps-control-daemon", "linkwise mps-control-daemon"),
            ("config-manager", "config-manager config-manager"),
            ("/usr/bin/config-manager --oneshot", "/usr/bin/config-manager config-manager --oneshot"),
            ("config-manager config-manager", "config-manager config-manager"),
            ("", ""),
            ("nvidia-device-plugin -mig-strategy=mixed", "nvidia-device-plugin run --mig-strategy=mixed"),
            ("nvidia-device-plugin -help", "nvidia-device-plugin run --help"),
            ("linkwise run -pass-device-specs -config-file x", "linkwise run --pass-device-specs --config-file x"),
            ("gpu-feature-discovery -oneshot -o x", "gpu-feature-discovery labels --oneshot -o x"),
            ("gpu-feature-discovery -node-name n", "gpu-feature-discovery labels --node-name n"),
            ("mps-control-daemon -mps-root=/m", "mps-control-daemon mps-control-daemon --mps-root=/m"),
            ("linkwise run -oh -- -oneshot", "linkwise run -oh -- -oneshot"),
        ] {
            assert_eq!(words(line), read, "{line}");
        }
    }

    #[test]
    fn dra_driver_variables_become_flags_or_are_named() {
        let words = |line: &str, variables: &[(&str, &str)]| {
            let variable = |name: &str| variables.iter().find(|(known, _)| *known == name);
            let words = super::words(line.split_whitespace().map(Into::into), |name| {
                variable(name).map(|(_, value)| (*value).to_owned())
            });
            let words: Vec<_> = words.iter().map(|word| word.to_str().unwrap().to_owned()).collect();
            words.join(" ")
        };
        let operator: Vec<(&str, &str)> =
            "HTTP_ENDPOINT=:8080 CDI_ROOT=/var/run/cdi HOST_ROOT=/host HEALTHCHECK_PORT=51516 \
             KUBELET_REGISTRAR_DIRECTORY_PATH=/k/plugins_registry KUBELET_PLUGINS_DIRECTORY_PATH=/k/plugins \
             FEATURE_GATES=MPSSupport=false,DynamicMIG=true ADDITIONAL_XIDS_TO_IGNORE=94,95"
                .split_whitespace()
                .map(|variable| variable.split_once('=').unwrap())
                .collect();
        assert_eq!(
            words("gpu-kubelet-plugin -v 4", &operator),
            "gpu-kubelet-plugin run --dra-gpus=all --dra-registry-dir=/k/plugins_registry \
             --kubelet-socket=/k/plugins/kubelet.sock --dra-plugins-dir=/k/plugins --cdi-dir=/var/run/cdi \
             --pod-resources-socket=/host/k/pod-resources/kubelet.sock --metrics-address=[::]:8080 \
             --admin-socket=/run/linkwise/admin.sock --dra-dynamic-mig=true \
             --disable-healthchecks=94,95 --healthcheck-port=51516"
        );
        let alone = "gpu-kubelet-plugin run --dra-gpus=all \
                     --kubelet-socket=/var/lib/kubelet/plugins/kubelet.sock \
                     --dra-plugins-dir=/var/lib/kubelet/plugins --admin-socket=/run/linkwise/admin.sock";
        assert_eq!(words("gpu-kubelet-plugin", &[]), alone);
        for (line, variables) in [
            ("gpu-kubelet-plugin -v=4", [("HEALTHCHECK_PORT", "-1")]),
            ("gpu-kubelet-plugin --v 4", [("HTTP_ENDPOINT", "")]),
            ("gpu-kubelet-plugin", [("FEATURE_GATES", "DynamicMIGs=true")]),
            ("gpu-kubelet-plugin", [("LINKWISE_DRA_GPUS", "")]),
            ("gpu-kubelet-plugin", [("ADDITIONAL_XIDS_TO_IGNORE", "all, 0,xids")]),
        ] {
            assert_eq!(words(line, &variables), alone, "{line}");
        }
        for (variable, value, flag) in [
            ("HTTP_ENDPOINT", "localhost:8080", "--metrics-address=127.0.0.1:8080"),
            ("HTTP_ENDPOINT", "[::1]:8080", "--metrics-address=[::1]:8080"),
            ("HOST_ROOT", "/", "--pod-resources-socket=/var/lib/kubelet/pod-resources/kubelet.sock"),
            ("FEATURE_GATES", "DynamicMIG=true, DynamicMIG=False", "--dra-dynamic-mig=false"),
        ] {
            let words = words("gpu-kubelet-plugin", &[(variable, value)]);
            assert!(words.split(' ').any(|word| word == flag), "{words}");
        }
        let unread = |program: &str| {
            let gates = "DynamicMIG=true,MPSSupport=true,NVMLDeviceHealthCheck=true,PassthroughSupport=false";
            super::unread(program.as_ref(), |name| Some(if name == "FEATURE_GATES" { gates } else { "4" }.to_owned()))
        };
        assert_eq!(unread("/usr/bin/gpu-kubelet-plugin"), ["CONSUMABLE_SHARES", "FEATURE_GATES=MPSSupport"]);
        assert_eq!(unread("linkwise"), Vec::<String>::new());
        let off =
            super::unread("gpu-kubelet-plugin".as_ref(), |name| name.contains("SHARES").then(|| "disabled".to_owned()));
        assert_eq!(off, Vec::<String>::new());
        // linkwise's own variables and flags win; with a subcommand nothing is inserted.
        let ours =
            [("LINKWISE_DRA_GPUS", "0,1"), ("KUBELET_SOCKET", "/k/kubelet.sock"), ("LINKWISE_ADMIN_SOCKET", "/a")];
        assert_eq!(
            words("gpu-kubelet-plugin --log debug --dra-plugins-dir /p", &ours),
            "gpu-kubelet-plugin run --log debug --dra-plugins-dir /p"
        );
        assert_eq!(words("gpu-kubelet-plugin doctor", &operator), "gpu-kubelet-plugin doctor");
        assert_eq!(words("nvidia-device-plugin", &operator), "nvidia-device-plugin run");
    }
}
