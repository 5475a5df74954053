//! The options of `linkwise labels`, which replaces gpu-feature-discovery.
//!
//! Flags that have keys in the file are rows of the settings' table; the others are here.

use clap::Args;

use super::{ApiServerArgs, Flags, LogArgs, NodeArgs, NvmlArgs};

/// `linkwise labels`.
#[derive(Clone, Debug, Args)]
pub struct LabelsArgs {
    /// The settings' flags. Those that `linkwise run` takes too need the same values as there.
    #[command(flatten)]
    pub flags: Flags,
    /// The machine; with --node, its labels are printed and nothing else happens.
    #[command(flatten)]
    pub node: NodeArgs,
    /// The API server.
    #[command(flatten)]
    pub api: ApiServerArgs,
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
    /// Deadlines and intervals.
    #[command(flatten)]
    pub nvml: NvmlArgs,
    /// The log.
    #[command(flatten)]
    pub log: LogArgs,
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::{Value, json};

    use crate::config::{Cli, Command, Environment, settings};

    /// The labels' settings from these words of the command line, this environment and this file, by the last part of
    /// their keys.
    fn labels(args: &[&str], environment: &Environment, text: &str) -> Value {
        let cli = Cli::try_parse_from(["linkwise", "labels"].iter().chain(args)).unwrap();
        let Command::Labels(args) = cli.command else { panic!("{cli:?}") };
        let shown = settings::load_text(&args.flags, environment, text).unwrap().settings.shown();
        let is_of_labels = |key: &str| {
            ["flags.gfd.", "flags.useNodeFeatureAPI", "linkwise.labels."].iter().any(|part| key.starts_with(part))
        };
        let of_labels = shown.into_iter().filter(|shown| is_of_labels(shown.key));
        of_labels.map(|shown| (shown.key.rsplit('.').next().unwrap().to_owned(), shown.value)).collect()
    }

    #[test]
    fn flag_wins_over_variable_and_file() {
        let text = "flags:\n  useNodeFeatureAPI: false\n  gfd: {oneshot: true, noTimestamp: true, outputFile: /file, \
                    sleepInterval: 1000000000, machineTypeFile: /type}\n";
        let from_file = labels(&[], &Environment::default(), text);
        let mut expected = json!({
            "oneshot": true, "noTimestamp": true, "sleepInterval": "1s", "useNodeFeatureAPI": false,
            "outputFile": "/file", "machineTypeFile": "/type", "writeFile": false, "gpuClique": true,
        });
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
        expected = json!({
            "oneshot": false, "noTimestamp": false, "sleepInterval": "infinite", "useNodeFeatureAPI": true,
            "outputFile": "/variable", "machineTypeFile": "/variables", "writeFile": false, "gpuClique": true,
        });
        assert_eq!(labels(&[], &environment, text), expected);
        let args = ["--oneshot", "--no-timestamp=true", "--sleep-interval=2m", "-o", "/flag"];
        expected["oneshot"] = json!(true);
        expected["noTimestamp"] = json!(true);
        expected["sleepInterval"] = json!("120s");
        expected["outputFile"] = json!("/flag");
        assert_eq!(labels(&args, &environment, text), expected);
    }

    #[test]
    fn empty_output_file_stays_empty() {
        let output =
            |args: &[&str], environment: &Environment, text| labels(args, environment, text)["outputFile"].clone();
        let (none, empty) = (Environment::default(), Environment::of([("GFD_OUTPUT_FILE", "")]));
        assert_eq!(output(&["--output="], &none, ""), "");
        assert_eq!(output(&[], &empty, ""), "");
        assert_eq!(output(&[], &none, "flags: {gfd: {outputFile: ''}}"), "");
    }
}
