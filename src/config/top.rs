//! The options of `linkwise top`.

use std::path::PathBuf;

use clap::Args;

use super::{ColorArgs, Format};

/// `linkwise top`.
#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Keys: q or Ctrl-C ends it, Ctrl-Z stops it; arrows, j, k, Page Up, Page Down, Home and End scroll."
)]
pub struct TopArgs {
    /// The admin socket of the running linkwise (its --admin-socket)
    #[arg(long, value_name = "PATH", env = "LINKWISE_ADMIN_SOCKET", default_value = "/run/linkwise/admin.sock")]
    pub socket: PathBuf,
    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub interval: u32,
    /// Look once, print and end; text that goes to a pipe or a file is printed once in any case
    #[arg(long)]
    pub once: bool,
    /// Text for people, or JSON for scripts: one object a line for each look
    #[arg(long, default_value = "text")]
    pub format: Format,
    /// Colours.
    #[command(flatten)]
    pub color: ColorArgs,
    /// The kind of terminal; one that is dumb cannot be drawn on
    #[arg(long, env = "TERM", hide = true, hide_env = true)]
    pub term: Option<String>,
}
