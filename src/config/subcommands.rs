//! The subcommands: their names, what `--help` says of each, and the arguments that each reads.
//!
//! Written out, not derived: what is derived builds the arguments of all of them at each start, and the plugin and the process
//! that speaks to NVML would each keep the memory of that for good. Here those of the one that is called are built.

use clap::error::ErrorKind;
use clap::{ArgMatches, Args, Error, FromArgMatches, Subcommand};

use super::{
    AdminArgs, AgentArgs, AllocateArgs, Command, ConfigArgs, DemoArgs, DoctorArgs, MpsControlDaemonArgs, RunArgs,
    SimulateArgs, SnapshotArgs, TopologyArgs,
};

/// Adds a subcommand's arguments to it.
type Arguments = fn(clap::Command) -> clap::Command;

/// The subcommands that people see, in the order of `--help`.
const ROWS: [(&str, &str, Arguments); 10] = [
    ("run", "Serve this node's GPUs to its kubelet (the DaemonSet's command)", arguments::<RunArgs>),
    (
        "demo",
        "Show a whole node in one process: a simulated machine, a kubelet, pods that come and go",
        arguments::<DemoArgs>,
    ),
    (
        "topology",
        "Show a machine: its tree, and its matrix as `nvidia-smi topo -m` prints it",
        arguments::<TopologyArgs>,
    ),
    ("allocate", "Show what would be chosen on a machine, and why", arguments::<AllocateArgs>),
    (
        "simulate",
        "Replay a trace of jobs on a machine, and show what each policy gives them",
        arguments::<SimulateArgs>,
    ),
    (
        "snapshot",
        "Write this machine, as NVML and hwloc see it, as a node file that every --node takes",
        arguments::<SnapshotArgs>,
    ),
    ("doctor", "Say what is wrong with this node, and what to do about it", arguments::<DoctorArgs>),
    (
        "admin",
        "Ask the linkwise that runs on this host, or order: its state, the driver, a GPU's health",
        arguments::<AdminArgs>,
    ),
    (
        "mps-control-daemon",
        "Run the control daemons of the GPUs that are shared by MPS (see docs/mps.md)",
        arguments::<MpsControlDaemonArgs>,
    ),
    (
        "config",
        "Look at a configuration: what is wrong with a file, or what counts and who says so",
        arguments::<ConfigArgs>,
    ),
];

/// The process that speaks to NVML, started by the others.
const AGENT: &str = "nvml-agent";

/// Adds the arguments, and leaves what is said of the subcommand as it is.
fn arguments<A: Args>(command: clap::Command) -> clap::Command {
    let about = command.get_about().cloned().unwrap_or_default();
    A::augment_args(command).about(about).long_about(None)
}

impl Subcommand for Command {
    fn augment_subcommands(command: clap::Command) -> clap::Command {
        let row = |(name, about, arguments): (&'static str, &'static str, Arguments)| {
            clap::Command::new(name).about(about).defer(arguments)
        };
        let agent =
            clap::Command::new(AGENT).about("The process that speaks to NVML, started by the others").hide(true);
        let agent = agent.defer(arguments::<AgentArgs>);
        command.subcommands(ROWS.map(row)).subcommand(agent)
    }

    fn augment_subcommands_for_update(command: clap::Command) -> clap::Command {
        Self::augment_subcommands(command)
    }

    fn has_subcommand(name: &str) -> bool {
        name == AGENT || ROWS.iter().any(|(row, ..)| *row == name)
    }
}

impl FromArgMatches for Command {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let (name, matches) = matches.subcommand().ok_or_else(|| Error::new(ErrorKind::MissingSubcommand))?;
        Ok(match name {
            "run" => Self::Run(read(matches)?),
            "demo" => Self::Demo(read(matches)?),
            "topology" => Self::Topology(read(matches)?),
            "allocate" => Self::Allocate(read(matches)?),
            "simulate" => Self::Simulate(read(matches)?),
            "snapshot" => Self::Snapshot(read(matches)?),
            "doctor" => Self::Doctor(read(matches)?),
            "admin" => Self::Admin(read(matches)?),
            "mps-control-daemon" => Self::MpsControlDaemon(read(matches)?),
            "config" => Self::Config(read(matches)?),
            AGENT => Self::NvmlAgent(read(matches)?),
            _ => return Err(Error::new(ErrorKind::InvalidSubcommand)),
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

fn read<A: FromArgMatches>(matches: &ArgMatches) -> Result<A, Error> {
    A::from_arg_matches(matches)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Cli;
    use clap::Parser;

    #[test]
    fn each_subcommand_reads_its_own_arguments() {
        for (line, command) in [
            ("run --log warn", "Run("),
            ("demo", "Demo("),
            ("topology --list", "Topology("),
            ("allocate --size 2", "Allocate("),
            ("simulate --node dgx-h100 --trace jobs.csv", "Simulate("),
            ("snapshot", "Snapshot("),
            ("doctor", "Doctor("),
            ("admin state", "Admin("),
            ("mps-control-daemon", "MpsControlDaemon("),
            ("config show", "Config("),
            ("nvml-agent --poll-ms 1000", "NvmlAgent("),
        ] {
            let cli = Cli::try_parse_from(["linkwise"].into_iter().chain(line.split(' ')));
            let read = cli.map(|cli| format!("{:?}", cli.command)).unwrap_or_else(|error| panic!("{line}: {error}"));
            assert!(read.starts_with(command), "{line}: {read}");
        }
        assert!(ROWS.iter().all(|(name, ..)| Command::has_subcommand(name)) && !Command::has_subcommand("help"));
    }
}
