//! Paths on the host.

use crate::prelude::*;

/// The path on the host of what a container, or the driver root, has at `path`: `path` below `root`.
pub fn below(root: &str, path: &str) -> String {
    format!("{}/{}", root.trim_end_matches('/'), path.trim_start_matches('/'))
}
