//! The options of `linkwise labels`, which replaces gpu-feature-discovery.
//!
//! Flags that have keys in the file are rows of the settings' table; the others are here.

use clap::Args;

use super::{ApiServerArgs, Flags, LogArgs, NodeArgs, NvmlArgs};

/// `linkwise labels`.
#[derive(Clone, Debug, Args)]
pub struct LabelsArgs {
    /// The settings' flags, which have to be the same as the plugin's where both have them.
    #[command(flatten)]
    pub flags: Flags,
    /// The machine; with --node, its labels are printed and nothing else happens.
    #[command(flatten)]
    pub node: NodeArgs,
    /// The API server, and the names of this node and pod.
    #[command(flatten)]
    pub api: ApiArgs,
    /// Deadlines and intervals.
    #[command(flatten)]
    pub nvml: NvmlArgs,
    /// The log.
    #[command(flatten)]
    pub log: LogArgs,
}

/// The API server, and the names of this node and pod there: gpu-feature-discovery's flags and variables.
#[derive(Clone, Debug, Args)]
pub struct ApiArgs {
    /// The API server.
    #[command(flatten)]
    pub server: ApiServerArgs,
    /// Accepted for gpu-feature-discovery's sake, without effect: requests a second to the API server
    #[arg(long, value_name = "N", env = "KUBE_API_QPS", default_value_t = 5.0)]
    pub kube_api_qps: f32,
    /// Accepted for gpu-feature-discovery's sake, without effect: requests to the API server at once
    #[arg(long, value_name = "N", env = "KUBE_API_BURST", default_value_t = 10)]
    pub kube_api_burst: u32,
    /// The namespace of the NodeFeature object
    #[arg(long, value_name = "NAME", env = "NAMESPACE", default_value = "default")]
    pub namespace: String,
    /// The node's name; needed for the NodeFeature object
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    pub node_name: Option<String>,
    /// This pod's name
    #[arg(long, value_name = "NAME", env = "POD_NAME")]
    pub pod_name: Option<String>,
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Duration;

    use clap::Parser;

    use crate::config::{Cli, Command, Environment, Interval, Settings, settings};

    /// What the settings say about labels.
    #[derive(Clone, Debug, PartialEq, Eq)]
    struct Labels {
        oneshot: bool,
        no_timestamp: bool,
        interval: Interval,
        output_file: PathBuf,
        machine_type_file: PathBuf,
        node_feature_api: bool,
        file_from_run: bool,
        clique: bool,
    }

    impl Labels {
        fn of(settings: &Settings) -> Self {
            Self {
                oneshot: settings.gfd_oneshot.value,
                no_timestamp: settings.gfd_no_timestamp.value,
                interval: settings.gfd_sleep_interval.value,
                output_file: settings.gfd_output_file.value.clone(),
                machine_type_file: settings.gfd_machine_type_file.value.clone(),
                node_feature_api: settings.use_node_feature_api.value,
                file_from_run: settings.write_labels_file.value,
                clique: settings.gpu_clique_label.value,
            }
        }
    }

    /// The labels' settings from these words of the command line, this environment and this file.
    fn labels(args: &[&str], environment: &Environment, text: &str) -> Labels {
        let cli = Cli::try_parse_from(["linkwise", "labels"].iter().chain(args)).unwrap();
        let Command::Labels(args) = cli.command else { panic!("{cli:?}") };
        Labels::of(&settings::load_text(&args.flags, environment, text).unwrap().settings)
    }

    #[test]
    fn defaults_are_gpu_feature_discoverys() {
        let expected = Labels {
            oneshot: false,
            no_timestamp: false,
            interval: Interval::Every(Duration::from_secs(60)),
            output_file: "/etc/kubernetes/node-feature-discovery/features.d/gfd".into(),
            machine_type_file: "/sys/class/dmi/id/product_name".into(),
            node_feature_api: true,
            file_from_run: false,
            clique: true,
        };
        assert_eq!(labels(&[], &Environment::default(), ""), expected);
    }

    #[test]
    fn flag_wins_over_variable_and_file() {
        let text = "flags:\n  useNodeFeatureAPI: false\n  gfd: {oneshot: true, noTimestamp: true, outputFile: /file, \
                    sleepInterval: 1000000000, machineTypeFile: /type}\n";
        let from_file = labels(&[], &Environment::default(), text);
        let expected = Labels {
            oneshot: true,
            no_timestamp: true,
            interval: Interval::Every(Duration::from_secs(1)),
            output_file: "/file".into(),
            machine_type_file: "/type".into(),
            node_feature_api: false,
            file_from_run: false,
            clique: true,
        };
        assert_eq!(from_file, expected);
        let environment = Environment::of([
            ("GFD_USE_NODE_FEATURE_API", "true"),
            ("USE_NODE_FEATURE_API", "false"),
            ("GFD_ONESHOT", "false"),
            ("GFD_NO_TIMESTAMP", "0"),
            ("GFD_SLEEP_INTERVAL", "infinite"),
            ("GFD_OUTPUT_FILE", "/variable"),
            ("GFD_MACHINE_TYPE_FILE", "/variables"),
        ]);
        let from_variables = labels(&[], &environment, text);
        let expected = Labels {
            oneshot: false,
            no_timestamp: false,
            interval: Interval::Infinite,
            output_file: "/variable".into(),
            machine_type_file: "/variables".into(),
            node_feature_api: true,
            file_from_run: false,
            clique: true,
        };
        assert_eq!(from_variables, expected);
        let args = ["--oneshot", "--no-timestamp=true", "--sleep-interval=2m", "-o", "/flag"];
        let from_flags = labels(&args, &environment, text);
        let interval = Interval::Every(Duration::from_secs(120));
        let expected = Labels { oneshot: true, no_timestamp: true, interval, output_file: "/flag".into(), ..expected };
        assert_eq!(from_flags, expected);
    }

    #[test]
    fn empty_output_file_is_standard_output() {
        let empty = PathBuf::new();
        let variable = Environment::of([("GFD_OUTPUT_FILE", "")]);
        assert_eq!(labels(&["--output="], &Environment::default(), "").output_file, empty);
        assert_eq!(labels(&[], &variable, "").output_file, empty);
        assert_eq!(labels(&[], &Environment::default(), "flags: {gfd: {outputFile: ''}}").output_file, empty);
    }
}
