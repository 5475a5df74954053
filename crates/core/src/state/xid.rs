//! XIDs: the driver's error reports, whose fault each is and what it asks for, and what an operator says of them.
//!
//! The table is docs/health.md's, and a test holds the two together.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::reason::UnhealthyReason;

/// Whose fault an XID is, and what it asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum XidClass {
    /// The program's that ran on the GPU: the GPU is fine.
    Application,
    /// The GPU's: it has to be reset.
    ResetGpu,
    /// The GPU's: the node has to be rebooted.
    RebootNode,
    /// No fault: it informs.
    Ignore,
}

/// Number, class, name in the driver's nverror.h, source.
type Row = (u64, XidClass, &'static str, &'static str);

/// The XIDs that are known, ascending.
///
/// *catalog*: the immediate action of NVIDIA's XID catalog (docs.nvidia.com/deploy/xid-errors), as its own
/// NVSentinel maps it. *plugin*: the list of k8s-device-plugin 0.17's health check, which goes before the catalog: what
/// pods survive there they survive here. A workflow that needs the text of the message, which NVML does not give, asks for
/// its gravest end. Numbers whose action is to report them, and those the catalog does not know, are not here.
const TABLE: [Row; 95] = [
    (8, XidClass::Application, "ROBUST_CHANNEL_FIFO_ERROR_IDLE_TIMEOUT", "catalog: RESTART_APP"),
    (11, XidClass::Application, "ROBUST_CHANNEL_GR_ERROR_MISSING_HW", "catalog: RESTART_APP"),
    (13, XidClass::Application, "ROBUST_CHANNEL_GR_EXCEPTION", "plugin skips; catalog: RESTART_APP"),
    (14, XidClass::Ignore, "ROBUST_CHANNEL_FAKE_ERROR", "catalog: IGNORE"),
    (25, XidClass::Application, "ROBUST_CHANNEL_GR_ILLEGAL_NOTIFY", "catalog: RESTART_APP"),
    (31, XidClass::Application, "ROBUST_CHANNEL_FIFO_ERROR_MMU_ERR_FLT", "plugin skips; catalog: RESTART_APP"),
    (32, XidClass::Application, "ROBUST_CHANNEL_PBDMA_ERROR", "catalog: RESTART_APP"),
    (37, XidClass::Ignore, "ROBUST_CHANNEL_FECS_ERR_UNIMP_FIRMWARE_METHOD", "catalog: IGNORE"),
    (38, XidClass::Ignore, "ROBUST_CHANNEL_FECS_ERR_WATCHDOG_TIMEOUT", "catalog: IGNORE"),
    (39, XidClass::Application, "ROBUST_CHANNEL_CE0_ERROR", "catalog: RESTART_APP"),
    (40, XidClass::Application, "ROBUST_CHANNEL_CE1_ERROR", "catalog: RESTART_APP"),
    (41, XidClass::Application, "ROBUST_CHANNEL_CE2_ERROR", "catalog: RESTART_APP"),
    (43, XidClass::Application, "ROBUST_CHANNEL_RESETCHANNEL_VERIF_ERROR", "plugin skips; catalog: IGNORE"),
    (44, XidClass::Ignore, "ROBUST_CHANNEL_GR_FAULT_DURING_CTXSW", "catalog: IGNORE"),
    (45, XidClass::Application, "ROBUST_CHANNEL_PREEMPTIVE_REMOVAL", "plugin skips; catalog: WORKFLOW_XID_45"),
    (46, XidClass::ResetGpu, "ROBUST_CHANNEL_GPU_TIMEOUT_ERROR", "catalog: RESET_GPU"),
    (48, XidClass::ResetGpu, "ROBUST_CHANNEL_GPU_ECC_DBE", "catalog: WORKFLOW_XID_48"),
    (54, XidClass::ResetGpu, "SILENT_RUNNING_PWR_REDUCED_CLOCKING", "catalog: CHECK_MECHANICALS"),
    (60, XidClass::Application, "ROBUST_CHANNEL_SEC2_ERROR", "catalog: RESTART_APP"),
    (62, XidClass::ResetGpu, "PMU_HALT_ERROR", "catalog: RESET_GPU"),
    (63, XidClass::Ignore, "INFOROM_DRAM_RETIREMENT_EVENT", "catalog: IGNORE"),
    (64, XidClass::ResetGpu, "INFOROM_DRAM_RETIREMENT_FAILURE", "catalog: RESET_GPU"),
    (66, XidClass::Ignore, "ROBUST_CHANNEL_FECS_ERR_REG_ACCESS_VIOLATION", "catalog: IGNORE"),
    (67, XidClass::Ignore, "ROBUST_CHANNEL_FECS_ERR_VERIF_VIOLATION", "catalog: IGNORE"),
    (68, XidClass::Application, "ROBUST_CHANNEL_NVDEC0_ERROR", "plugin skips; catalog: RESTART_APP"),
    (69, XidClass::Application, "ROBUST_CHANNEL_GR_CLASS_ERROR", "catalog: RESTART_APP"),
    (70, XidClass::Application, "ROBUST_CHANNEL_CE3_ERROR", "catalog: RESTART_APP"),
    (71, XidClass::Application, "ROBUST_CHANNEL_CE4_ERROR", "catalog: RESTART_APP"),
    (72, XidClass::Application, "ROBUST_CHANNEL_CE5_ERROR", "catalog: RESTART_APP"),
    (74, XidClass::ResetGpu, "NVLINK_ERROR", "catalog: WORKFLOW_NVLINK_ERR"),
    (75, XidClass::Application, "ROBUST_CHANNEL_CE6_ERROR", "catalog: RESTART_APP"),
    (76, XidClass::Application, "ROBUST_CHANNEL_CE7_ERROR", "catalog: RESTART_APP"),
    (77, XidClass::Application, "ROBUST_CHANNEL_CE8_ERROR", "catalog: RESTART_APP"),
    (78, XidClass::ResetGpu, "VGPU_START_ERROR", "catalog: UPDATE_SWFW"),
    (79, XidClass::RebootNode, "ROBUST_CHANNEL_GPU_HAS_FALLEN_OFF_THE_BUS", "catalog: RESTART_BM"),
    (80, XidClass::Application, "PBDMA_PUSHBUFFER_CRC_MISMATCH", "catalog: RESTART_APP"),
    (82, XidClass::Application, "ROBUST_CHANNEL_NVJPG0_ERROR", "catalog: RESTART_APP"),
    (83, XidClass::Application, "ROBUST_CHANNEL_NVDEC1_ERROR", "catalog: RESTART_APP"),
    (84, XidClass::Application, "ROBUST_CHANNEL_NVDEC2_ERROR", "catalog: RESTART_APP"),
    (85, XidClass::Application, "ROBUST_CHANNEL_CE9_ERROR", "catalog: RESTART_APP"),
    (86, XidClass::Application, "ROBUST_CHANNEL_OFA0_ERROR", "catalog: RESTART_APP"),
    (88, XidClass::Application, "ROBUST_CHANNEL_NVDEC3_ERROR", "catalog: RESTART_APP"),
    (89, XidClass::Application, "ROBUST_CHANNEL_NVDEC4_ERROR", "catalog: RESTART_APP"),
    (92, XidClass::Ignore, "EXCESSIVE_SBE_INTERRUPTS", "catalog: IGNORE"),
    (93, XidClass::Ignore, "INFOROM_ERASE_LIMIT_EXCEEDED", "catalog: IGNORE"),
    (94, XidClass::Application, "ROBUST_CHANNEL_CONTAINED_ERROR", "catalog: RESTART_APP"),
    (95, XidClass::ResetGpu, "ROBUST_CHANNEL_UNCONTAINED_ERROR", "catalog: RESET_GPU"),
    (96, XidClass::Application, "ROBUST_CHANNEL_NVDEC5_ERROR", "catalog: RESTART_APP"),
    (97, XidClass::Application, "ROBUST_CHANNEL_NVDEC6_ERROR", "catalog: RESTART_APP"),
    (98, XidClass::Application, "ROBUST_CHANNEL_NVDEC7_ERROR", "catalog: RESTART_APP"),
    (99, XidClass::Application, "ROBUST_CHANNEL_NVJPG1_ERROR", "catalog: RESTART_APP"),
    (100, XidClass::Application, "ROBUST_CHANNEL_NVJPG2_ERROR", "catalog: RESTART_APP"),
    (101, XidClass::Application, "ROBUST_CHANNEL_NVJPG3_ERROR", "catalog: RESTART_APP"),
    (102, XidClass::Application, "ROBUST_CHANNEL_NVJPG4_ERROR", "catalog: RESTART_APP"),
    (103, XidClass::Application, "ROBUST_CHANNEL_NVJPG5_ERROR", "catalog: RESTART_APP"),
    (104, XidClass::Application, "ROBUST_CHANNEL_NVJPG6_ERROR", "catalog: RESTART_APP"),
    (105, XidClass::Application, "ROBUST_CHANNEL_NVJPG7_ERROR", "catalog: RESTART_APP"),
    (106, XidClass::Ignore, "SMBPBI_TEST_MESSAGE", "catalog: IGNORE"),
    (107, XidClass::Ignore, "SMBPBI_TEST_MESSAGE_SILENT", "catalog: IGNORE"),
    (109, XidClass::Application, "ROBUST_CHANNEL_CTXSW_TIMEOUT_ERROR", "plugin skips; catalog: RESET_GPU"),
    (110, XidClass::ResetGpu, "SEC_FAULT_ERROR", "catalog: RESET_GPU"),
    (119, XidClass::ResetGpu, "GSP_RPC_TIMEOUT", "catalog: RESET_GPU"),
    (120, XidClass::ResetGpu, "GSP_ERROR", "catalog: RESET_GPU"),
    (121, XidClass::Ignore, "C2C_ERROR", "catalog: IGNORE"),
    (126, XidClass::Application, "ROBUST_CHANNEL_CE10_ERROR", "catalog: RESTART_APP"),
    (127, XidClass::Application, "ROBUST_CHANNEL_CE11_ERROR", "catalog: RESTART_APP"),
    (128, XidClass::Application, "ROBUST_CHANNEL_CE12_ERROR", "catalog: RESTART_APP"),
    (129, XidClass::Application, "ROBUST_CHANNEL_CE13_ERROR", "catalog: RESTART_APP"),
    (130, XidClass::Application, "ROBUST_CHANNEL_CE14_ERROR", "catalog: RESTART_APP"),
    (131, XidClass::Application, "ROBUST_CHANNEL_CE15_ERROR", "catalog: RESTART_APP"),
    (132, XidClass::Application, "ROBUST_CHANNEL_CE16_ERROR", "catalog: RESTART_APP"),
    (133, XidClass::Application, "ROBUST_CHANNEL_CE17_ERROR", "catalog: RESTART_APP"),
    (134, XidClass::Application, "ROBUST_CHANNEL_CE18_ERROR", "catalog: RESTART_APP"),
    (135, XidClass::Application, "ROBUST_CHANNEL_CE19_ERROR", "catalog: RESTART_APP"),
    (136, XidClass::ResetGpu, "ALI_TRAINING_FAIL", "catalog: RESET_GPU"),
    (137, XidClass::Ignore, "NVLINK_FLA_PRIV_ERR", "catalog: IGNORE"),
    (139, XidClass::Application, "ROBUST_CHANNEL_OFA1_ERROR", "catalog: RESTART_APP"),
    (140, XidClass::ResetGpu, "UNRECOVERABLE_ECC_ERROR_ESCAPE", "catalog: RESET_GPU"),
    (141, XidClass::Ignore, "ROBUST_CHANNEL_FAST_PATH_ERROR", "catalog: IGNORE"),
    (143, XidClass::ResetGpu, "GPU_INIT_ERROR", "catalog: RESET_GPU"),
    (144, XidClass::ResetGpu, "NVLINK_SAW_ERROR", "catalog: WORKFLOW_NVLINK5_ERR"),
    (145, XidClass::ResetGpu, "NVLINK_RLW_ERROR", "catalog: WORKFLOW_NVLINK5_ERR"),
    (146, XidClass::ResetGpu, "NVLINK_TLW_ERROR", "catalog: WORKFLOW_NVLINK5_ERR"),
    (147, XidClass::ResetGpu, "NVLINK_TREX_ERROR", "catalog: WORKFLOW_NVLINK5_ERR"),
    (148, XidClass::ResetGpu, "NVLINK_NVLPW_CTRL_ERROR", "catalog: WORKFLOW_NVLINK5_ERR"),
    (149, XidClass::ResetGpu, "NVLINK_NETIR_ERROR", "catalog: WORKFLOW_NVLINK5_ERR"),
    (150, XidClass::ResetGpu, "NVLINK_MSE_ERROR", "catalog: WORKFLOW_NVLINK5_ERR"),
    (151, XidClass::RebootNode, "ROBUST_CHANNEL_KEY_ROTATION_ERROR", "catalog: RESTART_VM"),
    (152, XidClass::Ignore, "ROBUST_CHANNEL_DLA_SMMU_ERROR", "catalog: IGNORE"),
    (153, XidClass::Ignore, "ROBUST_CHANNEL_DLA_TIMEOUT", "catalog: IGNORE"),
    (154, XidClass::Ignore, "GPU_RECOVERY_ACTION_CHANGED", "catalog: XID_154"),
    (155, XidClass::ResetGpu, "NVLINK_SW_DEFINED_ERROR", "catalog: RESET_GPU"),
    (156, XidClass::ResetGpu, "RESOURCE_RETIREMENT_EVENT", "catalog: RESET_GPU"),
    (157, XidClass::Ignore, "RESOURCE_RETIREMENT_FAILURE", "catalog: IGNORE"),
    (158, XidClass::ResetGpu, "GPU_FATAL_TIMEOUT", "catalog: RESET_GPU"),
];

impl XidClass {
    /// The class of a number by the table. One that is not there fails the GPU, as it does in NVIDIA's plugin.
    pub fn of(code: u64) -> Self {
        match TABLE.binary_search_by_key(&code, |(code, ..)| *code).ok().and_then(|index| TABLE.get(index)) {
            Some((_, class, ..)) => *class,
            None => Self::ResetGpu,
        }
    }

    /// Its name, as configuration and documents have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Application => "application",
            Self::ResetGpu => "reset-gpu",
            Self::RebootNode => "reboot-node",
            Self::Ignore => "ignore",
        }
    }

    /// Whether it takes the GPU out of service.
    pub fn fails(self) -> bool {
        matches!(self, Self::ResetGpu | Self::RebootNode)
    }
}

/// The driver's double-bit ECC event is this XID by another way: the class of the one is the class of the other.
pub(super) const DOUBLE_BIT_ECC: u64 = 48;

/// What an operator says of XIDs: by number, and as the NVIDIA plugin's environment variables say it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct XidPolicy {
    /// By number; goes before everything else.
    pub overrides: BTreeMap<u64, XidClass>,
    /// `DP_DISABLE_HEALTHCHECKS`.
    pub disabled: XidSet,
    /// `DP_ENABLE_HEALTHCHECKS`.
    pub enabled: XidSet,
}

/// Some XIDs, or all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum XidSet {
    /// All.
    All,
    /// These.
    Some(BTreeSet<u64>),
}

impl Default for XidSet {
    fn default() -> Self {
        Self::Some(BTreeSet::new())
    }
}

impl XidSet {
    /// Reads a list as k8s-device-plugin 0.17 does (internal/rm/health.go), with what it does not understand, which is
    /// passed over: numbers with commas; `all` or `xids` anywhere, in any case, is all, and so is 0.
    pub fn parse(text: &str) -> (Self, Vec<String>) {
        let (mut codes, mut passed_over) = (BTreeSet::new(), Vec::new());
        for item in text.to_lowercase().split(',').map(str::trim).filter(|item| !item.is_empty()) {
            if item == "all" || item == "xids" {
                return (Self::All, Vec::new());
            }
            // Go's ParseUint takes no sign.
            match item.parse().ok().filter(|_| !item.starts_with('+')) {
                Some(code) => drop(codes.insert(code)),
                None => passed_over.push(item.to_owned()),
            }
        }
        (if codes.contains(&0) { Self::All } else { Self::Some(codes) }, passed_over)
    }

    fn contains(&self, code: u64) -> bool {
        match self {
            Self::All => true,
            Self::Some(codes) => codes.contains(&code),
        }
    }
}

impl XidPolicy {
    /// The class of a number: by its override, else enabled before disabled, else by the table. What is enabled fails the
    /// GPU, whatever the table says; what is disabled is ignored.
    pub fn class(&self, code: u64) -> XidClass {
        if let Some(class) = self.overrides.get(&code) {
            return *class;
        }
        let class = XidClass::of(code);
        if self.enabled.contains(code) {
            return if class.fails() { class } else { XidClass::ResetGpu };
        }
        if self.disabled.contains(code) && class != XidClass::Application { XidClass::Ignore } else { class }
    }

    /// Whether a reason makes a GPU unhealthy. Where every health check is disabled only these do: XIDs that are enabled or
    /// classed by number, a GPU that is not on the bus, an order for the time without NVML, and what is not about health.
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

    #[test]
    fn the_document_has_the_same_table() {
        let document = include_str!("../../../../docs/health.md");
        let rows: Vec<String> = TABLE
            .iter()
            .map(|(code, class, name, source)| format!("| {code} | {} | {name} | {source} |", class.name()))
            .collect();
        let written: Vec<&str> = document
            .lines()
            .filter(|line| line.starts_with("| ") && line.contains(" | catalog: ") || line.contains("| plugin skips; "))
            .collect();
        assert_eq!(written, rows);
        assert!(TABLE.is_sorted_by_key(|(code, ..)| *code), "looked up by halves");
    }

    #[test]
    fn unknown_numbers_fail_the_gpu() {
        assert_eq!([1, 42, 555, u64::MAX].map(XidClass::of), [XidClass::ResetGpu; 4]);
        assert_eq!(
            [13, 48, 63, 79].map(XidClass::of),
            [XidClass::Application, XidClass::ResetGpu, XidClass::Ignore, XidClass::RebootNode]
        );
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
        assert_eq!(policy("all", "79").class(79), XidClass::RebootNode, "the table still says what it asks for");
    }
}
