//! The command line, the environment and the configuration file: only this module reads them.
//!
//! Owns the options, their names, defaults and help texts. Called by `main`, `src/run` and `src/commands`, which build
//! live objects from its plain data.

mod benchmark;
mod config_manager;
mod documents;
mod dra;
mod labels;
mod machine;
mod operator;
mod program;
mod rails;
mod removed;
mod run;
pub mod settings;
mod subcommands;
mod watch;

use std::collections::BTreeSet;
use std::ffi::OsString;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, CommandFactory, Parser, ValueEnum};
use linkwise_system::log::LogFormat;

use linkwise_core::words::Words;

pub use benchmark::{ExpectArgs, PodArgs, VerifyArgs};
pub use config_manager::{ConfigManagerArgs, ConfigManagerSettings, Fallback};
pub use documents::{CompletionsArgs, ManArgs, PLACEHOLDER, completable, documented};
pub use dra::{ClaimArgs, ClaimKind, DraArgs, FleetArgs, ManifestFormat, Near};
pub use labels::LabelsArgs;
pub use machine::{AllocateArgs, HostArgs, NodeArgs, SnapshotArgs, TopologyArgs, TopologyFormat, UnitName};
pub use operator::{
    AdminArgs, AdminOrder, ClearConditionArgs, ConfigArgs, ConfigCommand, DoctorArgs, TopArgs, WaitArgs,
};
pub use rails::Rails;
pub use run::{ApiServerArgs, INIT_FLAG, MpsCommand, MpsControlDaemonArgs, MpsRootArgs, NvmlArgs, RunArgs};
pub use settings::{Environment, Flags, Interval, Settings};
pub use subcommands::Command;
pub use watch::FileWatch;

/// A topology-aware Kubernetes device plugin for NVIDIA GPUs.
///
/// A pod requests nvidia.com/gpu: N, the kubelet asks linkwise which N, and linkwise answers with the set of GPUs that
/// are closest by NVLink, PCIe switch, NUMA node and NIC, and explains why.
#[derive(Debug, Parser)]
#[command(name = "linkwise", version, max_term_width = 100, arg_required_else_help = true)]
pub struct Cli {
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// The log's levels and form.
#[derive(Clone, Debug, Args)]
pub struct LogArgs {
    /// Log level: error, warn, info, debug, or levels by module, such as warn,linkwise=debug
    #[arg(long, value_name = "FILTER", env = "LINKWISE_LOG", default_value = "info")]
    pub log: String,
    /// Form of the log lines
    #[arg(long, value_name = "FORMAT", env = "LINKWISE_LOG_FORMAT", default_value = "text")]
    #[arg(value_parser = word::<LogFormat>())]
    pub log_format: LogFormat,
}

/// The form of a command's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Text for people.
    Text,
    /// JSON for scripts.
    Json,
}

/// `linkwise nvml-agent`.
#[derive(Clone, Debug, Args)]
pub struct AgentArgs {
    /// The order of the parent process, as JSON
    pub command: String,
}

/// A parser for the words of an enum.
fn word<T: Words + Send + Sync>() -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(T::WORDS.iter().map(|(word, _)| *word))
        .try_map(|text| T::from_word(&text).ok_or("unknown word"))
}

impl Cli {
    /// Reads argv and the environment. Prints help, version or errors, and exits, if that is requested or needed.
    pub fn read() -> Self {
        Self::try_parse_from(command_line()).unwrap_or_else(|error| removed::explained(error).exit())
    }
}

/// The variables with linkwise's prefix that are set and that nothing reads. If the program's name is
/// `gpu-kubelet-plugin`, also the variables of NVIDIA's DRA driver that linkwise does not follow.
pub fn unknown_variables() -> Vec<String> {
    fn variables(command: &clap::Command, known: &mut BTreeSet<String>) {
        let names = command.get_arguments().filter_map(|arg| arg.get_env());
        known.extend(names.map(|name| name.to_string_lossy().into_owned()));
        command.get_subcommands().for_each(|below| variables(below, known));
    }
    let (mut known, mut root) = (BTreeSet::new(), Cli::command());
    // Without this call, the arguments of a subcommand are missing: clap builds them when the subcommand is called.
    root.build();
    variables(&root, &mut known);
    #[expect(clippy::disallowed_methods, reason = "config may read argv and the environment")]
    let (program, variable) = (std::env::args_os().next(), |name: &str| std::env::var(name).ok());
    let unread = program::unread(&program.unwrap_or_default(), variable);
    Environment::unknown(&known).into_iter().chain(unread).collect()
}

/// Returns argv, with the subcommand and the flags that `program` inserts.
pub fn command_line() -> impl Iterator<Item = OsString> {
    #[expect(clippy::disallowed_methods, reason = "config may read argv and the environment")]
    let (words, variable) = (std::env::args_os(), |name: &str| std::env::var(name).ok());
    program::words(words, variable).into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;
    use linkwise_core::state::GpuSelector;

    #[test]
    fn options_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn booleans_are_read_as_by_the_nvidia_plugin() {
        let run = |args: &[&str]| {
            let args = ["linkwise", "run"].iter().chain(args);
            let flags = match Cli::try_parse_from(args).map(|cli| cli.command) {
                Ok(Command::Run(run)) => run.flags,
                other => panic!("{other:?}"),
            };
            let (settings, _) = Settings::build(&flags, &Environment::default(), "");
            (settings.pass_device_specs.value, settings.fail_on_init_error.value)
        };
        assert_eq!(run(&[]), (false, None));
        assert_eq!(run(&["--pass-device-specs", "--fail-on-init-error"]), (true, Some(true)));
        assert_eq!(run(&["--pass-device-specs=true", "--fail-on-init-error=false"]), (true, Some(false)));
        assert_eq!(run(&["--pass-device-specs=1", "--fail-on-init-error=False"]), (true, Some(false)));
    }

    #[test]
    fn lists_name_gpus_by_index_or_uuid() {
        let cli = Cli::try_parse_from(["linkwise", "allocate", "--size", "2", "--available", "0,GPU-a,3::10,GPU-a::0"])
            .unwrap();
        let Command::Allocate(allocate) = cli.command else { panic!("{cli:?}") };
        let unit = |gpu, slot| UnitName { gpu, slot };
        let uuid = || GpuSelector::Uuid("GPU-a".parse().unwrap());
        let expected = [
            unit(GpuSelector::Index(0), None),
            unit(uuid(), None),
            unit(GpuSelector::Index(3), Some(10)),
            unit(uuid(), Some(0)),
        ];
        assert_eq!(allocate.available, Some(expected.to_vec()));
        let error = Cli::try_parse_from(["linkwise", "allocate", "--size", "2", "--available", "0,?"]).unwrap_err();
        assert!(error.to_string().contains("'?' is neither index, UUID nor PCI address of a GPU"), "{error}");
    }
}
