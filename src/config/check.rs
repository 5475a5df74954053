//! The options of `linkwise config`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{Flags, Format};

/// `linkwise config`.
#[derive(Clone, Debug, Args)]
pub struct ConfigArgs {
    /// The subcommand.
    #[command(subcommand)]
    pub command: ConfigCommand,
}

/// The subcommands of `linkwise config`.
#[derive(Clone, Debug, Subcommand)]
pub enum ConfigCommand {
    /// Report all errors of a configuration file, unknown keys included; exits with 1 if there is one
    Check(ConfigCheckArgs),
    /// Show the effective configuration of these flags, the environment and the file, and where each value comes from
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
    /// The settings' flags.
    #[command(flatten)]
    pub flags: Flags,
    /// Text for people or JSON for scripts
    #[arg(long, default_value = "text")]
    pub format: Format,
}
