//! The NVIDIA plugin's variables that enable and disable XIDs.

use clap::Args;

use linkwise_core::state::{XidPolicy, XidSet};

/// The lists of XIDs; [`XidSet`] parses them.
#[derive(Clone, Debug, Default, Args)]
pub struct XidArgs {
    /// XIDs that do not make a GPU unhealthy: numbers with commas, or all (see docs/health.md)
    #[arg(long, value_name = "LIST", env = "DP_DISABLE_HEALTHCHECKS", default_value = "", hide_default_value = true)]
    pub disable_healthchecks: String,
    /// XIDs that make a GPU unhealthy, before all other settings but linkwise.health.xids: numbers with commas, or all
    #[arg(long, value_name = "LIST", env = "DP_ENABLE_HEALTHCHECKS", default_value = "", hide_default_value = true)]
    pub enable_healthchecks: String,
}

impl XidArgs {
    /// The policy of these lists.
    pub fn policy(&self) -> XidPolicy {
        XidPolicy {
            disabled: XidSet::parse(&self.disable_healthchecks).0,
            enabled: XidSet::parse(&self.enable_healthchecks).0,
            ..XidPolicy::default()
        }
    }

    /// The items that are not XIDs, by variable.
    pub fn passed_over(&self) -> impl Iterator<Item = (&'static str, String)> {
        let lists = [
            ("DP_DISABLE_HEALTHCHECKS", &self.disable_healthchecks),
            ("DP_ENABLE_HEALTHCHECKS", &self.enable_healthchecks),
        ];
        lists.into_iter().flat_map(|(variable, text)| {
            XidSet::parse(text).1.into_iter().map(move |passed_over| (variable, passed_over))
        })
    }
}
