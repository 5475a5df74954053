//! The settings between which a node may be switched: for each the chart's values, the overlay, and what its container
//! gets. `chart/` and `manifests.rs` compare this table with the rendered objects. Tests that switch a node start their
//! processes by this table.

#![allow(dead_code, reason = "each of the tests needs a part of the table")]

/// A setting of a node.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// The name in tests.
    pub name: &'static str,
    /// The chart's values, for `--set`.
    pub values: &'static [&'static str],
    /// The folder of the same setting below `manifests`, if there is one.
    pub overlay: Option<&'static str>,
    /// True if the container gets the folder of CDI specs, writable.
    pub cdi: bool,
    /// True if the container gets the ServiceAccount's token.
    pub token: bool,
    /// True if the container gets `NODE_NAME`.
    pub node_name: bool,
    /// True if the container gets the kubelet's folders of DRA plugins.
    pub sockets: bool,
    /// The container's variables among [`VARIABLES`].
    pub env: &'static [(&'static str, &'static str)],
    /// The configuration file.
    pub file: Option<&'static str>,
    /// True if GPUs go through DRA.
    pub dra: bool,
    /// The number of the device plugin's devices for each GPU.
    pub slots: usize,
}

/// The device plugin alone, without further rights.
pub const PLUGIN: Setting = Setting {
    name: "plugin",
    values: &[],
    overlay: Some("base"),
    cdi: false,
    token: false,
    node_name: false,
    sockets: false,
    env: &[],
    file: None,
    dra: false,
    slots: 1,
};

/// All GPUs through DRA.
pub const DRA: Setting = Setting {
    name: "dra",
    values: &["dra.enabled=true"],
    overlay: Some("overlays/dra"),
    cdi: true,
    token: true,
    node_name: true,
    sockets: true,
    env: &[("LINKWISE_DRA_GPUS", "all")],
    dra: true,
    ..PLUGIN
};

/// All settings. `dra-none` has DRA's rights but offers no GPU through DRA: the documented way back from DRA.
pub const SETTINGS: [Setting; 7] = [
    PLUGIN,
    DRA,
    Setting {
        name: "dra-none",
        values: &["dra.enabled=true", "dra.gpus=none"],
        overlay: None,
        env: &[("LINKWISE_DRA_GPUS", "none")],
        dra: false,
        ..DRA
    },
    Setting {
        name: "time-slicing",
        values: &["config.map.default=version: v1\nsharing:\n  timeSlicing:\n    resources:\n\
             \x20   - name: nvidia.com/gpu\n      replicas: 4\n"],
        overlay: Some("overlays/time-slicing"),
        file: Some(
            "version: v1\nsharing:\n  timeSlicing:\n    resources:\n    - name: nvidia.com/gpu\n      replicas: 4\n",
        ),
        slots: 4,
        ..PLUGIN
    },
    Setting {
        name: "cdi",
        values: &["deviceListStrategy=cdi-cri"],
        overlay: Some("overlays/cdi"),
        cdi: true,
        env: &[("DEVICE_LIST_STRATEGY", "cdi-cri")],
        ..PLUGIN
    },
    Setting {
        name: "events",
        values: &["events.enabled=true"],
        overlay: Some("overlays/events"),
        token: true,
        node_name: true,
        env: &[("LINKWISE_EVENTS", "true")],
        ..PLUGIN
    },
    Setting {
        name: "mig",
        values: &["migStrategy=mixed"],
        overlay: Some("overlays/mig"),
        env: &[("MIG_STRATEGY", "mixed")],
        ..PLUGIN
    },
];

/// The names of all variables in [`Setting::env`].
pub const VARIABLES: [&str; 4] = ["LINKWISE_DRA_GPUS", "DEVICE_LIST_STRATEGY", "LINKWISE_EVENTS", "MIG_STRATEGY"];

/// The four rights of a [`Setting`], in its order: `cdi`, `token`, `node_name`, `sockets`.
pub type Rights = [bool; 4];
impl Setting {
    /// The rights of the container by this table.
    pub fn rights(&self) -> Rights {
        [self.cdi, self.token, self.node_name, self.sockets]
    }
}

/// The rights of a rendered container. With `automounts` the pod gets its ServiceAccount's token without a volume.
pub fn rights(container: &serde_json::Value, volumes: &[&serde_json::Value], automounts: bool) -> Rights {
    let all = |key: &str| container[key].as_array().cloned().unwrap_or_default();
    let writes = |path: &str| {
        all("volumeMounts").iter().any(|mount| {
            let is_there = volumes.iter().any(|volume| volume["name"] == mount["name"]);
            mount["mountPath"] == path && mount["readOnly"] != true && is_there
        })
    };
    let has = |path: &str| all("volumeMounts").iter().any(|mount| mount["mountPath"] == path);
    let sockets = ["/var/lib/kubelet/plugins_registry", "/var/lib/kubelet/plugins/gpu.nvidia.com"].map(writes);
    assert!(sockets[0] == sockets[1], "only one of the two folders of DRA plugins is mounted writable");
    let token = automounts || has("/var/run/secrets/kubernetes.io/serviceaccount");
    let node_name = all("env").iter().any(|env| env["name"] == "NODE_NAME" && env["valueFrom"].is_object());
    assert!(writes("/var/lib/kubelet/device-plugins"), "the folder of the kubelet's socket is not mounted writable");
    assert!(has("/var/lib/kubelet/pod-resources"), "the folder of the PodResources socket is not mounted");
    [writes("/var/run/cdi"), token, node_name, sockets[0]]
}
