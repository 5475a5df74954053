//! Paths on the host.

use crate::prelude::*;

/// Joins a root on the host and an absolute `path` in a container or driver root: the path of the same file on the
/// host.
pub fn below(root: &str, path: &str) -> String {
    format!("{}/{}", root.trim_end_matches('/'), path.trim_start_matches('/'))
}
