//! The taints that keep a sick device from being allocated. They follow from its standing reasons and end with them.

use crate::prelude::*;

use super::attributes::OURS;
use super::{Taint, TaintEffect};
use crate::state::UnhealthyReason;

/// NVIDIA's key for an XID, with its number as the value.
const XID: &str = "gpu.nvidia.com/xid";

/// NVIDIA's key for a GPU that cannot be reached.
const LOST: &str = "gpu.nvidia.com/gpu-lost";

/// The taints for these reasons, at most one for each key, which is the first reason's.
pub(super) fn taints<'a>(reasons: impl Iterator<Item = &'a UnhealthyReason> + Clone, evict: bool) -> Vec<Taint> {
    let xid = reasons.clone().find_map(|reason| match reason {
        UnhealthyReason::Xid { code, .. } => Some(code.to_string()),
        _ => None,
    });
    let other = reasons.clone().find(|reason| !reason.is_loss() && !matches!(reason, UnhealthyReason::Xid { .. }));
    let plain = |key: &str, value: String| Taint { key: key.to_owned(), value, effect: TaintEffect::NoSchedule };
    let mut taints = Vec::new();
    if reasons.clone().any(UnhealthyReason::is_loss) {
        taints.push(lost(evict));
    }
    taints.extend(xid.map(|code| plain(XID, code)));
    taints.extend(other.map(|reason| plain(&format!("{OURS}/unhealthy"), reason.label().to_owned())));
    taints
}

/// The taint of a GPU that cannot be reached.
pub(super) fn lost(evict: bool) -> Taint {
    let effect = if evict { TaintEffect::NoExecute } else { TaintEffect::NoSchedule };
    Taint { key: LOST.to_owned(), value: String::new(), effect }
}
