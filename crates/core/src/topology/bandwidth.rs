//! The bandwidth table: the MB/s of a link, a hop and a crossing between CPU packages.
//!
//! NCCL v2.30.7-1 builds its rings with the same constants (src/graph/topo.h, src/graph/topo.cc), so linkwise and the
//! software that will run agree on what is close. docs/bandwidth.md explains them row by row.

use super::observation::{ComputeCapability, CpuObservation, PcieLink};

/// The bandwidth of a PCIe hop of which nothing is known: Gen3 x16, NCCL's `PCI_BW`, MB/s.
pub const UNKNOWN_HOP: u32 = 12_000;

/// The bandwidth of a crossing between packages of an unknown processor, MB/s: that of Skylake to Ice Lake.
pub const UNKNOWN_CROSSING: u32 = 10_000;

/// The rate of one NVLink of a GPU of unknown capability, MB/s: NCCL's default, that of Ampere.
pub const UNKNOWN_NVLINK: u32 = 20_000;

/// The rate assumed for a NIC of unknown rate, Mbit/s: NCCL's (`ncclTopoAddNet`).
pub const UNKNOWN_NIC: u32 = 10_000;

/// The bandwidth of one NVLink in one direction, MB/s (NCCL's `ncclTopoNVLinkBw`; 8.9 counts as 8.6).
pub fn nvlink(capability: Option<ComputeCapability>) -> u32 {
    let Some(ComputeCapability { major, minor }) = capability else { return UNKNOWN_NVLINK };
    match (major, minor) {
        (10.., _) => 40_100,
        (9, _) => 20_600,
        (8, 6 | 9) => 12_000,
        (7 | 8, _) => 20_000,
        (6, _) => 18_000,
        _ => UNKNOWN_NVLINK,
    }
}

/// The most GPUs that pull from the switches in an all-reduce with NVLink SHARP: NCCL's `NCCL_MAX_NVLS_ARITY`.
const MAX_NVLS_HEADS: u64 = 32;

/// The bus bandwidth of an all-reduce with NVLink SHARP over `gpus` GPUs behind one NVSwitch plane, MB/s, by NCCL's
/// model (docs/bandwidth.md). `port` is the bandwidth of their narrowest port, MB/s, `capability` their lowest
/// capability. `None` before Hopper, for fewer than two GPUs and for a port of 0.
///
/// The formula is 2 × e × `port` × (h - 1) / (h + 1), where h is `gpus`, at most 32. Each of h GPUs pulls a part of
/// the sum from the switches. A port carries all these parts, that of its own GPU twice: h + 1 parts
/// (`ncclTopoSearchTryNvls`). The tuner counts h - 1 of the parts, twice, and multiplies by an efficiency e
/// (`nvlsEfficiency`, `ncclTopoTuneModel`).
pub fn nvls(capability: ComputeCapability, port: u32, gpus: usize) -> Option<u64> {
    let percent: u64 = match capability.major {
        10.. => 74,
        9 => 85,
        _ => return None,
    };
    let heads = u64::try_from(gpus).unwrap_or(MAX_NVLS_HEADS).min(MAX_NVLS_HEADS);
    let others = heads.checked_sub(1).filter(|others| *others > 0 && port > 0)?;
    Some(2 * percent * others * u64::from(port) / (100 * (heads + 1)))
}

/// The bandwidth of a PCIe link, MB/s; `None` for the 2.5 GT/s x1 (or nothing at all) that a virtual switch claims.
///
/// NCCL's table gives 15, 30, 60, 120, 240 and 480 for Gen1 to Gen6, in 100 Mbit/s a lane, and divides by 80 for
/// GB/s: 6 for each 1000 MT/s where 8b/10b coding is used, 7.5 above.
pub fn pcie(link: PcieLink) -> Option<u32> {
    let (mts, width) = (u64::from(link.mts), u64::from(link.width));
    if mts == 0 || width == 0 || (mts <= 2_500 && width == 1) {
        return None;
    }
    let hundred_mbps = if mts <= 5_000 { mts.saturating_mul(6) / 1_000 } else { mts.saturating_mul(75) / 10_000 };
    let mb_per_s = hundred_mbps.saturating_mul(width).saturating_mul(25) / 2;
    Some(u32::try_from(mb_per_s).unwrap_or(u32::MAX))
}

/// The bandwidth of a crossing between packages, MB/s.
pub fn crossing(cpu: Option<&CpuObservation>) -> u32 {
    let Some(cpu) = cpu else { return UNKNOWN_CROSSING };
    if cpu.arch.starts_with("ppc") {
        return 32_000;
    }
    if cpu.arch == "aarch64" || cpu.arch.starts_with("arm") {
        return 6_000;
    }
    match (cpu.vendor.as_deref(), cpu.family, cpu.model) {
        (Some("GenuineIntel"), Some(6), Some(model)) => match model {
            0xCF.. => 40_000,
            0x8F.. => 22_000,
            0x55.. => 10_000,
            _ => 6_000,
        },
        (Some("GenuineIntel"), Some(family), _) if family != 6 => 6_000,
        (Some("AuthenticAMD"), ..) => 16_000,
        _ => UNKNOWN_CROSSING,
    }
}

/// The bandwidth left of a PCIe path that goes through the processor: an Intel host bridge splits peer-to-peer traffic
/// into 64-byte packets, which costs a sixth (NCCL's `INTEL_P2P_OVERHEAD`).
pub fn through_host_bridge(mb_per_s: u32, cpu: Option<&CpuObservation>) -> u32 {
    let is_intel = cpu.is_some_and(|cpu| cpu.vendor.as_deref() == Some("GenuineIntel"));
    // Five sixths of a u32 fit a u32.
    if is_intel { u32::try_from(u64::from(mb_per_s) * 5 / 6).unwrap_or(u32::MAX) } else { mb_per_s }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu(arch: &str, vendor: &str, family: u32, model: u32) -> CpuObservation {
        CpuObservation { arch: arch.into(), vendor: Some(vendor.into()), family: Some(family), model: Some(model) }
    }

    #[test]
    fn pcie_rates_follow_table() {
        let x16 = |mts| pcie(PcieLink { mts, width: 16 });
        assert_eq!(
            [2_500, 5_000, 8_000, 16_000, 32_000, 64_000].map(x16).map(Option::unwrap),
            [3_000, 6_000, 12_000, 24_000, 48_000, 96_000]
        );
        assert_eq!(pcie(PcieLink { mts: 8_000, width: 8 }), Some(6_000));
        assert_eq!(pcie(PcieLink { mts: 2_500, width: 1 }), None, "a virtual switch");
        assert_eq!(pcie(PcieLink { mts: 0, width: 16 }), None);
        assert_eq!(pcie(PcieLink { mts: u32::MAX, width: u32::MAX }), Some(u32::MAX));
    }

    #[test]
    fn nvls_follows_the_formula_of_nccl() {
        let of = |major, port, gpus| nvls(ComputeCapability { major, minor: 0 }, port, gpus);
        let hopper = [2, 4, 5, 6, 7, 8].map(|gpus| of(9, 18 * 20_600, gpus).unwrap());
        // 8 x H100 were measured at 480 GB/s, and 5, 6 and 7 at 420, 440 and 460.
        assert_eq!(hopper, [210_120, 378_216, 420_240, 450_257, 472_770, 490_280]);
        // 8 x B200 were measured at 830 GB/s and more, 8 x H800 (8 links each) at 215.
        assert_eq!((of(10, 18 * 40_100, 8), of(9, 8 * 20_600, 8)), (Some(830_872), Some(217_902)));
        assert_eq!(of(10, 18 * 40_100, 64), of(10, 18 * 40_100, 32));
        assert_eq!((of(8, 240_000, 8), of(9, 370_800, 1), of(9, 370_800, 0), of(9, 0, 8)), (None, None, None, None));
    }

    #[test]
    fn package_crossings_follow_table() {
        let of = |cpu: CpuObservation| crossing(Some(&cpu));
        assert_eq!(of(cpu("x86_64", "GenuineIntel", 6, 79)), 6_000, "Broadwell");
        assert_eq!(of(cpu("x86_64", "GenuineIntel", 6, 85)), 10_000, "Skylake");
        assert_eq!(of(cpu("x86_64", "GenuineIntel", 6, 106)), 10_000, "Ice Lake");
        assert_eq!(of(cpu("x86_64", "GenuineIntel", 6, 143)), 22_000, "Sapphire Rapids");
        assert_eq!(of(cpu("x86_64", "GenuineIntel", 6, 207)), 40_000, "Emerald Rapids");
        assert_eq!(of(cpu("x86_64", "AuthenticAMD", 23, 49)), 16_000);
        assert_eq!(of(cpu("ppc64le", "IBM", 0, 0)), 32_000);
        assert_eq!(of(cpu("aarch64", "ARM", 0, 0)), 6_000);
        assert_eq!(of(cpu("x86_64", "Somebody", 6, 1)), 10_000);
        assert_eq!(crossing(None), 10_000);
    }
}
