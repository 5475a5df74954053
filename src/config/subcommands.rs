//! The subcommands: their names, their lines in `--help`, and the arguments that each reads.
//!
//! The enum is not derived: derived code builds the arguments of every subcommand at each start, and the plugin and the
//! NVML agent would each keep that memory for good. Here only the arguments of the called subcommand are built.

use clap::error::ErrorKind;
use clap::{ArgMatches, Args, Error, FromArgMatches, Subcommand};

use super::{
    AdminArgs, AgentArgs, AllocateArgs, ClaimArgs, ClearConditionArgs, CompletionsArgs, ConfigArgs, ConfigManagerArgs,
    DoctorArgs, DraArgs, ExpectArgs, LabelsArgs, ManArgs, MpsControlDaemonArgs, RunArgs, SnapshotArgs, TopArgs,
    TopologyArgs, VerifyArgs, WaitArgs,
};

/// The subcommand that other subcommands start; `--help` does not list it.
const AGENT: &str = "nvml-agent";

/// Adds a subcommand's arguments, and keeps its line in `--help`.
fn arguments<A: Args>(command: clap::Command) -> clap::Command {
    let about = command.get_about().cloned().unwrap_or_default();
    A::augment_args(command).about(about).long_about(None)
}

/// Makes [`Command`] from the rows below, which are in the order of `--help`.
macro_rules! subcommands {
    ($($name:literal => $command:ident($args:ty), $about:literal;)+) => {
        /// A subcommand with its arguments.
        #[derive(Debug)]
        pub enum Command {
            $(#[doc = $about] $command($args),)+
        }

        impl Subcommand for Command {
            fn augment_subcommands(command: clap::Command) -> clap::Command {
                let row = |name: &'static str| clap::Command::new(name).hide(name == AGENT);
                command.subcommands([$(row($name).about($about).defer(arguments::<$args>)),+])
            }

            fn augment_subcommands_for_update(command: clap::Command) -> clap::Command {
                Self::augment_subcommands(command)
            }

            fn has_subcommand(name: &str) -> bool {
                [$($name),+].contains(&name)
            }
        }

        impl FromArgMatches for Command {
            fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
                match matches.subcommand().ok_or_else(|| Error::new(ErrorKind::MissingSubcommand))? {
                    $(($name, matches) => <$args>::from_arg_matches(matches).map(Self::$command),)+
                    _ => Err(Error::new(ErrorKind::InvalidSubcommand)),
                }
            }

            fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
                *self = Self::from_arg_matches(matches)?;
                Ok(())
            }
        }
    };
}

subcommands! {
    "run" => Run(Box<RunArgs>), "Serve this node's GPUs to its kubelet (the DaemonSet's command)";
    "topology" => Topology(TopologyArgs), "Show a machine: its tree, and its matrix as `nvidia-smi topo -m` prints it";
    "allocate" => Allocate(AllocateArgs), "Show which GPUs would be chosen on a machine, and why";
    "expect" => Expect(ExpectArgs), "Show the bus bandwidth that an all-reduce over GPUs should reach";
    "verify" => Verify(VerifyArgs),
        "Compare a result of nccl-tests with the expected bandwidth, and name the likeliest cause if it is lower";
    "snapshot" => Snapshot(SnapshotArgs),
        "Write this machine, as NVML and hwloc see it, as a node file that every --node takes";
    "doctor" => Doctor(DoctorArgs), "Check this node, and print what is wrong and how to repair it";
    "labels" => Labels(Box<LabelsArgs>), "Write this node's labels for schedulers (as gpu-feature-discovery)";
    "dra" => Dra(Box<DraArgs>), "Print the resource slices that this node would publish through DRA";
    "claim" => Claim(Box<ClaimArgs>), "Print a manifest that asks for GPUs through DRA";
    "admin" => Admin(AdminArgs),
        "Print the state of the linkwise on this host, or give it an order, such as to release the driver";
    "top" => Top(TopArgs),
        "Show this node's state continuously: which pods hold which GPUs, and how good the choice is";
    "wait" => Wait(WaitArgs), "Wait until linkwise serves this node's kubelet, and print what it serves";
    "mps-control-daemon" => MpsControlDaemon(Box<MpsControlDaemonArgs>),
        "Run the control daemons of the GPUs that are shared by MPS (see docs/mps.md)";
    "config-manager" => ConfigManager(Box<ConfigManagerArgs>),
        "Link the configuration that the node's label names, and signal its reader (see docs/config-manager.md)";
    "clear-condition" => ClearCondition(ClearConditionArgs),
        "Remove linkwise's condition from all nodes of a cluster, after an uninstallation";
    "config" => Config(ConfigArgs), "Check a configuration file, or show the effective configuration and its origins";
    "completions" => Completions(CompletionsArgs), "Print the completions of a shell";
    "man" => Man(ManArgs), "Write a manual page for each command into a folder";
    "nvml-agent" => NvmlAgent(AgentArgs), "The process that calls NVML, started by other subcommands";
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Cli;
    use clap::Parser;

    #[test]
    fn subcommand_reads_its_own_arguments() {
        let lines = "run --log warn; topology --list; allocate --size 2; expect --gpus 0,1; verify -; snapshot; \
                     doctor; labels --oneshot; dra --node-name gpu-1; claim --gpus 4; admin state; top --once; \
                     wait --timeout 5; mps-control-daemon; config-manager --oneshot; config show; completions bash; \
                     man folder; nvml-agent {}";
        for line in lines.split("; ") {
            let cli = Cli::try_parse_from(["linkwise"].into_iter().chain(line.split(' ')));
            let read = cli.map(|cli| format!("{:?}", cli.command)).unwrap_or_else(|error| panic!("{line}: {error}"));
            let variant = read.split('(').next().unwrap().to_lowercase();
            assert_eq!(variant, line.split(' ').next().unwrap().replace('-', ""), "{read}");
        }
        assert!(Command::has_subcommand("run") && !Command::has_subcommand("help"));
    }
}
