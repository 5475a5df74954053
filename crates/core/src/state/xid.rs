//! XIDs, which are the driver's error reports: their classes, and an operator's rules for them.
//!
//! The classes are those of docs/health.md; a test compares the two.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::reason::UnhealthyReason;

/// The class of an XID: whose fault it is, and the action that it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum XidClass {
    /// The program that ran on the GPU is at fault. The GPU is fine.
    Application,
    /// The GPU is at fault and has to be reset.
    ResetGpu,
    /// The GPU is at fault and the node has to be rebooted.
    RebootNode,
    /// The driver's recovery action, polled after each XID, decides whether the GPU is at fault. If the driver has no
    /// recovery actions, the GPU is at fault and has to be reset.
    RecoveryAction,
    /// Nothing is at fault; the XID informs.
    Ignore,
}

/// The XIDs that are an application's fault.
const APPLICATION: [u64; 51] = [
    8, 11, 13, 25, 31, 32, 39, 40, 41, 43, 45, 60, 68, 69, 70, 71, 72, 75, 76, 77, 80, 82, 83, 84, 85, 86, 88, 89, 94,
    96, 97, 98, 99, 100, 101, 102, 103, 104, 105, 109, 126, 127, 128, 129, 130, 131, 132, 133, 134, 135, 139,
];

/// The XIDs that only inform.
const IGNORED: [u64; 26] = [
    14, 37, 38, 44, 63, 66, 67, 92, 93, 106, 107, 121, 137, 141, 152, 153, 154, 157, 160, 161, 162, 163, 164, 165, 166,
    170,
];

/// The XIDs whose number alone does not determine the remedy. It depends on a subcode, which NVML's event does not
/// have, or on the application's use of unified memory, or the catalog names no remedy.
const BY_RECOVERY_ACTION: [u64; 12] = [144, 145, 146, 147, 148, 149, 150, 155, 159, 167, 168, 169];

impl XidClass {
    /// Looks a number up in the table of docs/health.md. Its source is NVIDIA's XID catalog, through 170. The list in
    /// the health check of k8s-device-plugin 0.17 takes precedence, so that pods survive here what they survive there.
    /// If the catalog's workflow needs the text of the message, which NVML does not give, the recovery action decides.
    /// A number that is not in the table fails the GPU, as in NVIDIA's plugin.
    pub fn of(code: u64) -> Self {
        match code {
            79 | 151 => Self::RebootNode,
            _ if APPLICATION.contains(&code) => Self::Application,
            _ if IGNORED.contains(&code) => Self::Ignore,
            _ if BY_RECOVERY_ACTION.contains(&code) => Self::RecoveryAction,
            _ => Self::ResetGpu,
        }
    }

    /// Returns true if it can take the GPU out of service; `RecoveryAction` does if the driver has no such actions.
    pub fn fails(self) -> bool {
        matches!(self, Self::ResetGpu | Self::RebootNode | Self::RecoveryAction)
    }
}

/// The XID for the error that the driver's double-bit ECC event reports too; both have the same class.
pub(super) const DOUBLE_BIT_ECC: u64 = 48;

/// The operator's rules for XIDs: by number, and by the NVIDIA plugin's environment variables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct XidPolicy {
    /// Classes by number, which override everything else.
    pub overrides: BTreeMap<u64, XidClass>,
    /// The XIDs of `DP_DISABLE_HEALTHCHECKS`.
    pub disabled: XidSet,
    /// The XIDs of `DP_ENABLE_HEALTHCHECKS`.
    pub enabled: XidSet,
}

/// A set of XIDs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum XidSet {
    /// All XIDs.
    All,
    /// These XIDs.
    Some(BTreeSet<u64>),
}

impl Default for XidSet {
    fn default() -> Self {
        Self::Some(BTreeSet::new())
    }
}

impl XidSet {
    /// Reads a list as k8s-device-plugin 0.17 does (internal/rm/health.go): numbers between commas; the item `all` or
    /// `xids`, in upper or lower case, means all XIDs, and so does 0. Returns the set and the skipped items.
    pub fn parse(text: &str) -> (Self, Vec<String>) {
        let (mut codes, mut skipped) = (BTreeSet::new(), Vec::new());
        for item in text.to_lowercase().split(',').map(str::trim).filter(|item| !item.is_empty()) {
            if item == "all" || item == "xids" {
                return (Self::All, Vec::new());
            }
            // Go's ParseUint takes no sign.
            match item.parse().ok().filter(|_| !item.starts_with('+')) {
                Some(code) => drop(codes.insert(code)),
                None => skipped.push(item.to_owned()),
            }
        }
        (if codes.contains(&0) { Self::All } else { Self::Some(codes) }, skipped)
    }

    fn contains(&self, code: u64) -> bool {
        match self {
            Self::All => true,
            Self::Some(codes) => codes.contains(&code),
        }
    }
}

impl XidPolicy {
    /// The class of a number. An override goes first, then the enabled XIDs, then the disabled ones, then the table. An
    /// enabled XID fails the GPU, whatever the table says.
    pub fn class(&self, code: u64) -> XidClass {
        if let Some(class) = self.overrides.get(&code) {
            return *class;
        }
        let class = XidClass::of(code);
        if self.enabled.contains(code) {
            return if class == XidClass::RebootNode { class } else { XidClass::ResetGpu };
        }
        if self.disabled.contains(code) && class != XidClass::Application { XidClass::Ignore } else { class }
    }

    /// Returns true if a reason makes a GPU unhealthy. If every health check is disabled, only these do: XIDs that are
    /// enabled or fail by an override (48 also for double-bit ECC errors), a GPU that is gone or not on the bus,
    /// NVML unavailable where the operator wants that to count, and reasons that are not about health.
    pub(super) fn counts(&self, reason: &UnhealthyReason) -> bool {
        match reason {
            _ if self.disabled != XidSet::All => true,
            UnhealthyReason::Xid { code, .. } => self.class(*code).fails(),
            UnhealthyReason::DoubleBitEcc => self.class(DOUBLE_BIT_ECC).fails(),
            UnhealthyReason::OffBus | UnhealthyReason::Gone | UnhealthyReason::DriverAway { .. } => true,
            UnhealthyReason::HeldElsewhere { .. } | UnhealthyReason::Claimed { .. } => true,
            UnhealthyReason::Withdrawn | UnhealthyReason::MpsNotReady => true,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::words::Words;

    #[test]
    fn xid_classes_match_the_document() {
        let document = include_str!("../../../../docs/health.md");
        // Numbers of one class: `| ignore | IGNORE | 14, 37-38 |`.
        let cells = document.lines().filter_map(|line| match line.split('|').map(str::trim).collect::<Vec<_>>()[..] {
            ["", class, _catalog, numbers, ""] => Some((XidClass::from_word(class)?, numbers)),
            _ => None,
        });
        let rows = cells.flat_map(|(class, numbers)| {
            numbers.split(", ").flat_map(move |range| {
                let (first, last) = range.split_once('-').unwrap_or((range, range));
                let number = |text: &str| text.trim_end_matches('*').parse::<u64>().unwrap();
                (number(first)..=number(last)).map(move |code| (code, class))
            })
        });
        let rows: Vec<(u64, XidClass)> = rows.collect();
        let written: BTreeMap<u64, XidClass> = rows.iter().copied().collect();
        assert_eq!(written.len(), rows.len(), "a number twice: {rows:?}");
        assert!(written.len() > 90, "{written:?}");
        for code in (0..1_000).chain([u64::MAX]) {
            let class = written.get(&code).copied().unwrap_or(XidClass::ResetGpu);
            assert_eq!(XidClass::of(code), class, "XID {code}");
        }
    }

    #[test]
    fn lists_read_as_the_nvidia_plugin_reads_them() {
        let some = |codes: &[u64]| XidSet::Some(codes.iter().copied().collect());
        for (text, set) in [
            ("", some(&[])),
            (",", some(&[])),
            ("68", some(&[68])),
            ("68  ", some(&[68])),
            (" 68, 67 ,", some(&[67, 68])),
            ("ALL", XidSet::All),
            ("13, xids", XidSet::All),
            ("0", XidSet::All),
            ("xids13", some(&[])),
        ] {
            assert_eq!(XidSet::parse(text).0, set, "{text}");
        }
        assert_eq!(
            XidSet::parse("68,not-an-int,-1,+5"),
            (some(&[68]), vec!["not-an-int".into(), "-1".into(), "+5".into()])
        );
    }

    #[test]
    fn enabled_goes_before_disabled_and_overrides_before_both() {
        let policy = |disabled: &str, enabled: &str| XidPolicy {
            disabled: XidSet::parse(disabled).0,
            enabled: XidSet::parse(enabled).0,
            overrides: BTreeMap::from([(63, XidClass::RebootNode)]),
        };
        let fails = |disabled: &str, enabled: &str| {
            [11, 13, 63, 79, 555].map(|code| policy(disabled, enabled).class(code).fails())
        };
        assert_eq!(fails("", ""), [false, false, true, true, true]);
        assert_eq!(fails("all", ""), [false, false, true, false, false]);
        assert_eq!(fails("all", "79,13"), [false, true, true, true, false]);
        assert_eq!(fails("79", "79"), [false, false, true, true, true]);
        assert_eq!(fails("79,63", "all"), [true; 5]);
        assert_eq!(policy("all", "79").class(79), XidClass::RebootNode, "an enabled XID keeps its reboot");
    }
}
