//! Which XIDs count, in the NVIDIA plugin's variables.

use clap::Args;

use crate::state::{XidPolicy, XidSet};

/// Which XIDs count; what the lists mean is `snapshot`'s.
#[derive(Clone, Debug, Default, Args)]
pub struct XidArgs {
    /// XIDs that shall not make a GPU unhealthy: numbers with commas, or all (see docs/health.md)
    #[arg(long, value_name = "LIST", env = "DP_DISABLE_HEALTHCHECKS", default_value = "", hide_default_value = true)]
    pub disable_healthchecks: String,
    /// XIDs that shall make a GPU unhealthy, whatever else is said of them: numbers with commas, or all
    #[arg(long, value_name = "LIST", env = "DP_ENABLE_HEALTHCHECKS", default_value = "", hide_default_value = true)]
    pub enable_healthchecks: String,
}

impl XidArgs {
    /// What they say.
    pub fn policy(&self) -> XidPolicy {
        XidPolicy {
            disabled: XidSet::parse(&self.disable_healthchecks).0,
            enabled: XidSet::parse(&self.enable_healthchecks).0,
            ..XidPolicy::default()
        }
    }

    /// What in them is no XID, by variable.
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
