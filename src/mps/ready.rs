//! The plugin's side: whether a resource's limits hold right now.
//!
//! Called by the runtime, off the path of admissions: it reads small files, and asks no driver and no daemon. A resource
//! may be offered while its [`Readiness`] is `Ready`, and at no other time.

use std::fmt;

use super::layout::Layout;
use super::limits::Limits;
use super::marker::{self, Said};
use crate::state::ResourceName;

/// Whether a resource that is shared by MPS may be offered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Its daemon serves, and the limits that it is to have hold.
    Ready,
    /// Not yet, or not any more.
    Waiting {
        /// Why.
        why: String,
    },
}

impl fmt::Display for Readiness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ready => f.write_str("ready"),
            Self::Waiting { why } => f.write_str(why),
        }
    }
}

/// Looks. `wanted` are the limits that the plugin's own configuration and GPUs call for: the daemon may still hold
/// those of another configuration.
pub fn look(layout: &Layout, resource: &ResourceName, wanted: &Limits) -> Readiness {
    let path = layout.marker(resource);
    let why = match marker::read(&path) {
        Ok(Said::Holds(limits)) if limits.hold(wanted) => return Readiness::Ready,
        Ok(Said::Holds(_)) => "the MPS daemon holds other limits than the configuration asks for".to_owned(),
        Ok(Said::Nothing) => "the MPS daemon does not serve it".to_owned(),
        Ok(Said::Stale) => format!("the MPS daemon is gone and left {} behind", path.display()),
        Err(error) => format!("cannot read {}: {error}", path.display()),
    };
    Readiness::Waiting { why }
}
