//! The options of `linkwise completions` and `linkwise man`, and the commands that these describe: flags and commands
//! that `--help` hides are left out.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, Resettable};
use clap::{Arg, Args, Command, CommandFactory};
use clap_complete::aot::Shell;

use super::Cli;

/// `linkwise completions`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "For bash, now and in this shell: source <(linkwise completions bash)")]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_name = "SHELL")]
    pub shell: Shell,
}

/// `linkwise man`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "To read one: linkwise man /tmp/man && man /tmp/man/linkwise.1")]
pub struct ManArgs {
    /// The folder; it is made if it is missing
    #[arg(value_name = "FOLDER")]
    pub folder: PathBuf,
}

/// The help texts' name for the value of a machine option: a built-in name, or a file.
const MACHINE: &str = "NAME|FILE";

/// The placeholder in the tree of [`completable`] for the names of the built-in machines, which this module does not
/// know.
pub const PLACEHOLDER: &str = "LINKWISE_MACHINE_NAMES";

/// The commands for the pages of a manual, `linkwise` itself first.
pub fn documented() -> Vec<Command> {
    fn with_subcommands(command: &Command) -> Vec<Command> {
        let below = command.get_subcommands().filter(|command| is_shown(command)).flat_map(with_subcommands);
        std::iter::once(command.clone()).chain(below).collect()
    }
    let mut root = Cli::command().disable_help_subcommand(true);
    root.build();
    with_subcommands(&root)
}

/// The commands with their flags, as shells complete them.
pub fn completable() -> Command {
    let mut root = Cli::command();
    root.build();
    without_hidden(&root)
}

fn is_shown(command: &Command) -> bool {
    !command.is_hide_set() && command.get_name() != "help"
}

/// A copy of a command with the parts that shells need.
fn without_hidden(command: &Command) -> Command {
    // clap takes only names that live for ever. The leak is small: this program makes them once and ends.
    let mut copy = Command::new(&*command.get_name().to_owned().leak());
    copy = copy.about(command.get_about().cloned().unwrap_or_default());
    // The flags for help and version are among the copied ones; the version flag needs a version to print.
    copy = copy.version(env!("CARGO_PKG_VERSION"));
    copy = copy.disable_help_flag(true).disable_version_flag(true).disable_help_subcommand(true);
    let is_machine = |arg: &Arg| arg.get_value_names().is_some_and(|names| names.iter().any(|name| *name == MACHINE));
    let args = command.get_arguments().filter(|arg| !arg.is_hide_set()).cloned().map(|arg| match is_machine(&arg) {
        // The default is removed because it is not one of the values.
        true => arg.value_parser(PossibleValuesParser::new([PLACEHOLDER])).default_value(Resettable::Reset),
        false => arg,
    });
    copy.args(args).subcommands(command.get_subcommands().filter(|command| is_shown(command)).map(without_hidden))
}
