//! Names that earlier versions had: commands, flags, values of flags, variables and keys of the file. A removed name
//! that is still used is refused, with what to do instead.

use clap::Error;
use clap::error::{ContextKind, ContextValue};

use linkwise_core::quote::excerpt;

/// The removed names, and what to do instead.
const REMOVED: &[(&[&str], &str)] = &[
    (&["gang"], "ready examples for kube-scheduler, Kueue, KAI and Volcano are in manifests/examples/claims"),
    (&["--requests"], "linkwise allocate answers one request; run it for each"),
    (
        &["linkwise.policies"],
        "flags.plugin.sharedDevicesAllocationPolicy holds for slots and MIG devices of all resources; leave policies \
         out",
    ),
    (
        &["--allowed-uids", "LINKWISE_ALLOWED_UIDS", "linkwise.allowedUids"],
        "root and linkwise's own user may call its sockets; leave it out",
    ),
    (
        &[
            "--expose-nccl-topology",
            "LINKWISE_EXPOSE_NCCL_TOPOLOGY",
            "linkwise.expose.ncclTopology",
            "--nccl-topology-dir",
            "LINKWISE_NCCL_TOPOLOGY_DIR",
            "linkwise.ncclTopologyDir",
        ],
        "linkwise writes no topology file, NCCL reads the node itself; leave it out",
    ),
    (
        &["--traces-endpoint", "LINKWISE_TRACES_ENDPOINT", "linkwise.traces"],
        "there is no exporter of spans; leave it out, the log has the same facts",
    ),
    (
        &["--dra-driver-name", "LINKWISE_DRA_DRIVER_NAME", "linkwise.dra.driverName"],
        "the DRA driver is gpu.nvidia.com; leave it out, and use that name in classes and claims",
    ),
    (
        &["--dra-groups", "LINKWISE_DRA_GROUPS", "linkwise.dra.groups"],
        "groups of 2, 4 and 8 GPUs are published; leave it out, and use linkwise claim --gpus N for another number",
    ),
    (
        &["--dra-sets", "LINKWISE_DRA_SETS", "linkwise.dra.sets"],
        "sets of GPUs are not devices; leave it out, pods ask for nvidia.com/gpu or have claims (linkwise claim \
         --gpus 4)",
    ),
    (&["linkwise.filter.keepDisplay"], "use linkwise.filter.excludeDisplays: true instead of keepDisplay: false"),
    (&["demo", "simulate"], "use the program linkwise-lab"),
    (
        &["--standby", "LINKWISE_STANDBY"],
        "linkwise has no standby for crashes; leave it out, and remove the container that sets it from the pod",
    ),
    (&["LINKWISE_AGENT_PROGRAM"], "the NVML agent is part of linkwise itself; leave it out"),
    (&["--format dot"], "there is no output for Graphviz; use --format svg, a picture"),
    (&["--format json"], "linkwise top prints text; use linkwise admin state, which prints JSON"),
    (&["--no-color"], "linkwise top has no colours; leave it out"),
    (&["--allocated"], "a picture shows no holders; leave it out, linkwise top and the node's page show them"),
    (&["--host"], "a file is a whole machine; use --node, and edit the file that linkwise snapshot writes"),
    (
        &["--spare-nvswitch"],
        "a claim lists the best groups first; leave it out, and taint the machines with NVSwitches to spare them",
    ),
];

/// The message about a removed name, with what to do instead; `None` for any other name.
pub fn refusal(name: &str) -> Option<String> {
    let (_, instead) = REMOVED.iter().find(|(names, _)| names.contains(&name))?;
    Some(format!("removed: {instead}"))
}

/// The names that are variables.
pub fn variables() -> impl Iterator<Item = &'static str> {
    let names = REMOVED.iter().flat_map(|(names, _)| names.iter().copied());
    names.filter(|name| name.bytes().all(|byte| byte == b'_' || byte.is_ascii_uppercase()))
}

/// Replaces clap's error about a removed name by one line with what to do instead. Returns other errors unchanged.
pub fn explained(error: Error) -> Error {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    // For an invalid value clap names the flag with its placeholder: `--format <FORMAT>`.
    let flag = text(ContextKind::InvalidArg).and_then(|flag| flag.split(' ').next());
    let value = flag.zip(text(ContextKind::InvalidValue)).map(|(flag, value)| format!("{flag} {value}"));
    let names = [text(ContextKind::InvalidSubcommand), value.as_deref(), flag].into_iter().flatten();
    let line = names.filter_map(|name| Some(format!("{}: {}", excerpt(name), refusal(name)?))).next();
    match line {
        Some(line) => Error::raw(error.kind(), format!("{line}\n")),
        None => error,
    }
}
