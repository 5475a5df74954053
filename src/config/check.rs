//! The options of `linkwise config`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{Flags, Format};

/// `linkwise config`.
#[derive(Clone, Debug, Args)]
pub struct ConfigArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: ConfigCommand,
}

/// What to do with a configuration.
#[derive(Clone, Debug, Subcommand)]
pub enum ConfigCommand {
    /// Say everything that is wrong with a configuration file, unknown keys included; the exit code is 1 if anything is
    Check(ConfigCheckArgs),
    /// Show the configuration that counts, of the flags given here, the environment and the file, and who says each value
    Show(ConfigShowArgs),
}

/// `linkwise config check`.
#[derive(Clone, Debug, Args)]
pub struct ConfigCheckArgs {
    /// The configuration file
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
}

/// `linkwise config show`.
#[derive(Clone, Debug, Args)]
pub struct ConfigShowArgs {
    /// What the configuration says, as far as flags say it.
    #[command(flatten)]
    pub flags: Flags,
    /// For people or for scripts
    #[arg(long, default_value = "text")]
    pub format: Format,
}
