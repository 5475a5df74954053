//! The options of `linkwise config-manager`: linkwise's own, and those of NVIDIA's config-manager, read by its rules.
//!
//! The chart sets the variables of NVIDIA's options, some to an empty text, so these options accept one.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, ValueEnum};

use super::settings::go_boolean;
use super::{ApiServerArgs, LogArgs};
use linkwise_core::quote::quoted;

/// Signals by the names that people use; the numbers are Linux's.
const SIGNALS: [(&str, i32); 6] = [("HUP", 1), ("INT", 2), ("QUIT", 3), ("USR1", 10), ("USR2", 12), ("TERM", 15)];

/// `linkwise config-manager`.
#[derive(Clone, Debug, Args)]
pub struct ConfigManagerArgs {
    /// Select the configuration once and end, for an init container
    #[arg(
        long,
        value_name = "BOOL",
        env = "ONESHOT",
        num_args = 0..=1,
        require_equals = true,
        default_value = "false",
        default_missing_value = "true",
        value_parser = boolean
    )]
    pub oneshot: bool,
    /// The API server.
    #[command(flatten)]
    pub api: ApiServerArgs,
    /// The node whose label is followed
    #[arg(long, value_name = "NODE", env = "NODE_NAME", default_value = "", hide_default_value = true)]
    pub node_name: String,
    /// The node's label whose value names the configuration
    #[arg(long, value_name = "LABEL", env = "NODE_LABEL", default_value = "nvidia.com/device-plugin.config")]
    pub node_label: String,
    /// The folder of the configuration files, one for each name
    #[arg(long, value_name = "FOLDER", env = "CONFIG_FILE_SRCDIR", default_value = "", hide_default_value = true)]
    pub config_file_srcdir: String,
    /// Path of the link to the selected file
    #[arg(long, value_name = "PATH", env = "CONFIG_FILE_DST", default_value = "", hide_default_value = true)]
    pub config_file_dst: String,
    /// The configuration of a node without the label
    #[arg(long, value_name = "NAME", env = "DEFAULT_CONFIG", default_value = "", hide_default_value = true)]
    pub default_config: String,
    /// Configurations to try, in the given order, on a node without the label if there is no default: named (the
    /// configuration 'default'), single (the only configuration), empty (an empty one)
    #[arg(long, value_name = "LIST", env = "FALLBACK_STRATEGIES", value_delimiter = ',')]
    pub fallback_strategies: Vec<String>,
    /// Signal the process after a change
    #[arg(
        long,
        value_name = "BOOL",
        env = "SEND_SIGNAL",
        num_args = 0..=1,
        require_equals = true,
        default_value = "true",
        default_missing_value = "true",
        value_parser = boolean
    )]
    pub send_signal: bool,
    /// The signal: a number, or a name such as SIGHUP
    #[arg(long, value_name = "SIGNAL", env = "SIGNAL", default_value = "1")]
    pub signal: String,
    /// The process to signal, by the first word of its command line, in the PID namespace that the pod's containers
    /// share
    #[arg(long, value_name = "NAME", env = "PROCESS_TO_SIGNAL", default_value = "nvidia-device-plugin")]
    pub process_to_signal: String,
    /// Serve /metrics, /livez and /readyz at this address; by default nowhere
    #[arg(long, value_name = "ADDRESS", env = "LINKWISE_CONFIG_MANAGER_METRICS_ADDRESS")]
    pub metrics_address: Option<SocketAddr>,
    /// The longest time that --oneshot waits for the API server if a configuration is in place already
    #[arg(long, value_name = "N", default_value_t = 30_000, hide = true)]
    pub keep_after_ms: u64,
    /// The first pause after a request that failed
    #[arg(long, value_name = "N", default_value_t = 1_000, hide = true)]
    pub api_pause_ms: u64,
    /// The log.
    #[command(flatten)]
    pub log: LogArgs,
}

/// The options of config-manager, checked by [`ConfigManagerArgs::settings`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigManagerSettings {
    /// Set if config-manager ends after the first selection.
    pub oneshot: bool,
    /// The node.
    pub node: String,
    /// The label.
    pub label: String,
    /// The folder of the configurations.
    pub source: PathBuf,
    /// The link to the selected configuration.
    pub destination: PathBuf,
    /// The configuration of a node without the label.
    pub default: Option<String>,
    /// The ways to a configuration if there is neither a label nor a default; the first that succeeds counts.
    pub fallbacks: Vec<Fallback>,
    /// The process to signal and the signal's number; `None` if no signal is sent.
    pub signal: Option<(String, i32)>,
    /// The longest time that --oneshot waits for the API server if a configuration is in place.
    pub keep_after: Duration,
}

/// A way to a configuration for a node without the label and without a default.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Fallback {
    /// The configuration named `default`.
    Named,
    /// The only configuration.
    Single,
    /// An empty configuration.
    Empty,
}

impl ConfigManagerArgs {
    /// The options, checked. Fails at the first option that is missing or wrong. The signal and the process are read
    /// only if a signal is to be sent.
    pub fn settings(&self) -> Result<ConfigManagerSettings> {
        let given = |text: &str, flag, variable| match text.trim() {
            "" => bail!("{flag} ({variable}) must not be empty"),
            text => Ok(text.to_owned()),
        };
        let fallbacks = self.fallback_strategies.iter().map(|word| word.trim()).filter(|word| !word.is_empty());
        let process = || given(&self.process_to_signal, "--process-to-signal", "PROCESS_TO_SIGNAL");
        let name = self.default_config.trim();
        Ok(ConfigManagerSettings {
            oneshot: self.oneshot,
            node: given(&self.node_name, "--node-name", "NODE_NAME")?,
            label: given(&self.node_label, "--node-label", "NODE_LABEL")?,
            source: given(&self.config_file_srcdir, "--config-file-srcdir", "CONFIG_FILE_SRCDIR")?.into(),
            destination: given(&self.config_file_dst, "--config-file-dst", "CONFIG_FILE_DST")?.into(),
            default: (!name.is_empty()).then(|| name.to_owned()),
            fallbacks: fallbacks.map(fallback).collect::<Result<_, _>>()?,
            signal: self.send_signal.then(|| anyhow::Ok((process()?, signal(self.signal.trim())?))).transpose()?,
            keep_after: Duration::from_millis(self.keep_after_ms),
        })
    }
}

fn fallback(word: &str) -> Result<Fallback> {
    let option = "--fallback-strategies (FALLBACK_STRATEGIES)";
    Fallback::from_str(word, false)
        .map_err(|_| anyhow!("{option}: {} is not one of named, single, empty", quoted(word)))
}

/// The number of a signal; an empty text stands for SIGHUP.
fn signal(text: &str) -> Result<i32> {
    let name = text.strip_prefix("SIG").unwrap_or(text);
    let named = SIGNALS.iter().find(|(known, _)| *known == name).map(|(_, number)| *number);
    match text {
        "" => Ok(1),
        text => named.or_else(|| text.parse().ok().filter(|number| (1..=31).contains(number))).with_context(|| {
            let what = "neither the number of a signal nor a name such as SIGHUP";
            format!("--signal (SIGNAL): {} is {what}", quoted(text))
        }),
    }
}

/// A boolean as NVIDIA's programs read it; an empty variable is false.
fn boolean(text: &str) -> std::result::Result<bool, String> {
    let read = if text.is_empty() { Some(false) } else { go_boolean(text) };
    read.ok_or_else(|| format!("{} is neither true nor false", quoted(text)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Cli, Command};
    use clap::Parser;

    const NEEDED: &str = "--node-name n --config-file-srcdir /s --config-file-dst /d/c";

    /// A `_` in the line stands for a space.
    fn settings(line: &str) -> Result<ConfigManagerSettings> {
        let words = ["linkwise", "config-manager"].into_iter().chain(line.split(' ').filter(|word| !word.is_empty()));
        match Cli::try_parse_from(words.map(|word| word.replace('_', " "))).unwrap().command {
            Command::ConfigManager(args) => args.settings(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn defaults_are_those_of_nvidias_program() {
        let read = settings(NEEDED).unwrap();
        assert_eq!(read.label, "nvidia.com/device-plugin.config");
        assert_eq!(read.signal, Some(("nvidia-device-plugin".to_owned(), 1)));
        assert_eq!((read.oneshot, read.default, read.fallbacks), (false, None, vec![]));
    }

    #[test]
    fn empty_options_are_unset_or_false() {
        let init = format!(
            "{NEEDED} --oneshot=true --send-signal=false --signal= --process-to-signal= --default-config= \
             --fallback-strategies= --kubeconfig="
        );
        let read = settings(&init).unwrap();
        assert_eq!((read.oneshot, read.signal, read.default, read.fallbacks), (true, None, None, vec![]));
        assert_eq!(settings(&format!("{NEEDED} --signal=")).unwrap().signal.unwrap().1, 1);
        assert_eq!(settings(&format!("{NEEDED} --send-signal=")).unwrap().signal, None);
    }

    #[test]
    fn missing_or_wrong_option_is_named() {
        for (line, problem) in [
            ("", "--node-name (NODE_NAME) must not be empty"),
            ("--node-name n", "--config-file-srcdir (CONFIG_FILE_SRCDIR) must not be empty"),
            ("--node-name n --config-file-srcdir /s", "--config-file-dst (CONFIG_FILE_DST) must not be empty"),
        ] {
            assert_eq!(settings(line).unwrap_err().to_string(), problem);
        }
        for (more, problem) in [
            ("--node-label=", "--node-label (NODE_LABEL) must not be empty"),
            ("--process-to-signal=", "--process-to-signal (PROCESS_TO_SIGNAL) must not be empty"),
            ("--signal 65", "--signal (SIGNAL): '65' is neither the number of a signal nor a name such as SIGHUP"),
            (
                "--fallback-strategies single,none",
                "--fallback-strategies (FALLBACK_STRATEGIES): 'none' is not one of named, single, empty",
            ),
        ] {
            assert_eq!(settings(&format!("{NEEDED} {more}")).unwrap_err().to_string(), problem);
        }
    }

    #[test]
    fn lists_and_names_are_read() {
        let read = settings(&format!("{NEEDED} --fallback-strategies named,_single,empty --signal SIGUSR1")).unwrap();
        assert_eq!(read.fallbacks, [Fallback::Named, Fallback::Single, Fallback::Empty]);
        assert_eq!(read.signal.unwrap().1, 10);
        let read = settings(&format!("{NEEDED} --default-config a --signal 31")).unwrap();
        assert_eq!((read.default, read.signal.unwrap().1), (Some("a".to_owned()), 31));
    }
}
