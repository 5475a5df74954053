//! One poll of a GPU: cheap calls whose answers show its health.
//!
//! Called by `watch`. It judges nothing. A call that a GPU does not offer gives `None`, and this agent does not make it
//! again for a while.

use std::collections::BTreeSet;

use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper_sys::bindings as sys;

use super::call::{Answer, CallError, Fault, answer, offered};
use super::full_scan::{FABRIC, Gpu};
use super::links;
use super::mig;
use super::raw::{self, Fabric};
use linkwise_core::state::{FabricHealth, HealthPoll, Reach, RecoveryAction};
use linkwise_core::topology::MigUuid;

/// The call that has to reach the GPU: memory and names come from a cache, a temperature is read from the GPU.
const REACH: &str = "nvmlDeviceGetTemperature";
/// The call that reaches a vGPU, which has no temperature: its driver asks the host's driver for the utilisation.
const UTILIZATION: &str = "nvmlDeviceGetUtilizationRates";

/// The number of polls after which calls that a GPU did not offer are tried again: its NVLinks may have become ready,
/// or ECC may be on.
const RETRY_POLLS: u32 = 12;

/// The calls and links that one GPU does not offer.
#[derive(Debug, Default)]
pub struct Unoffered {
    /// The number of polls since all calls were tried.
    polls: u32,
    calls: BTreeSet<&'static str>,
    links: BTreeSet<u32>,
    /// True if the GPU last reported that MIG is on.
    mig: Option<bool>,
}

impl Unoffered {
    /// Begins a poll.
    fn begin_poll(&mut self) {
        self.polls += 1;
        if self.polls >= RETRY_POLLS {
            *self = Self { mig: self.mig, ..Self::default() };
        }
    }

    /// Records the MIG mode. A GPU offers other calls in MIG mode: after a change, all calls are tried again.
    fn set_mig_mode(&mut self, mig: bool) {
        if self.mig.is_some_and(|before| before != mig) {
            *self = Self::default();
        }
        self.mig = Some(mig);
    }

    /// Makes a call, if the GPU offers it. A failed call gives no fact here: [`reading`] shows if the GPU answers.
    fn fact<T>(&mut self, call: &'static str, ask: impl FnOnce(&'static str) -> Answer<T>) -> Option<T> {
        if self.calls.contains(call) {
            return None;
        }
        let answer = ask(call);
        if let Ok(None) = answer {
            self.calls.insert(call);
        }
        answer.ok().flatten()
    }
}

/// The result of a poll of one GPU.
pub struct Polled {
    /// The facts for the parent.
    pub health: HealthPoll,
    /// Each NVLink that answered, with true if it is up; `None` if every call failed, or in MIG mode.
    pub links: Option<Vec<(u32, bool)>>,
    /// The MIG devices in NVML's order, if all answered; `Some(None)` if MIG is off.
    pub mig: Option<Option<Vec<MigUuid>>>,
}

/// Polls a GPU.
pub fn poll(gpu: &Gpu<'_>, unoffered: &mut Unoffered) -> Polled {
    unoffered.begin_poll();
    let (device, calls) = (&gpu.device, &gpu.calls);
    let reach = match reading(gpu) {
        Ok(Some(())) => Reach::Answers,
        Ok(None) => Reach::Unknown,
        Err(error) => reach_after(&error),
    };
    let ecc = || device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile);
    let mig = unoffered.fact("nvmlDeviceGetMigMode", |call| calls.ask(call, || device.mig_mode()));
    let mig = mig.map(|mode| mode.current != sys::NVML_DEVICE_MIG_DISABLE);
    if let Some(mig) = mig {
        unoffered.set_mig_mode(mig);
    }
    let recovery_action =
        unoffered.fact("nvmlDeviceGetFieldValues", |call| offered(calls.ask(call, || recovery_action(gpu))));
    let row_remapping =
        unoffered.fact("nvmlDeviceGetRemappedRows", |call| calls.raw(call, || raw::remapped_rows(device)));
    let uncorrectable_ecc = unoffered.fact("nvmlDeviceGetTotalEccErrors", |call| calls.ask(call, ecc));
    // In MIG mode the driver shuts down the GPU's NVLinks, and the GPU does not join a fabric (kernel_mig_manager.c of
    // open-gpu-kernel-modules 590, before it creates instances). So no link counts as down.
    let is_mig = mig.or(unoffered.mig) == Some(true);
    let fabric = if is_mig {
        Some(FabricHealth::Unused)
    } else {
        unoffered.fact(FABRIC, |call| calls.raw(call, || raw::fabric(device))).and_then(fabric_health)
    };
    let links = if is_mig { None } else { links(gpu, unoffered) };
    let down = |links: &Vec<(u32, bool)>| links.iter().filter(|(_, up)| !up).map(|(link, _)| *link).collect();
    let health = HealthPoll {
        reach,
        recovery_action: recovery_action.map(RecoveryAction::from),
        row_remapping,
        uncorrectable_ecc,
        nvlinks_down: if is_mig { Some(Vec::new()) } else { links.as_ref().map(down) },
        fabric,
        on_bus: None,
    };
    Polled {
        health,
        links,
        mig: mig.and_then(|on| if on { mig::uuids(device, calls).ok().map(Some) } else { Some(None) }),
    }
}

/// Reads a value from the GPU itself, by the first of three calls that the GPU offers. NVML 13 replaces the first call
/// by the second.
fn reading(gpu: &Gpu<'_>) -> Answer<()> {
    let (device, calls) = (&gpu.device, &gpu.calls);
    let mut answer = calls.ask(REACH, || device.temperature(TemperatureSensor::Gpu).map(drop));
    if answer == Ok(None) {
        answer = calls.raw(raw::TEMPERATURE, || raw::temperature(device));
    }
    if answer == Ok(None) {
        answer = calls.ask(UTILIZATION, || device.utilization_rates().map(drop));
    }
    answer
}

/// The reach of a GPU, from the failure of a call that has to reach it.
pub fn reach_after(error: &CallError) -> Reach {
    let call = error.call.to_string();
    match error.fault() {
        Fault::GpuLost => Reach::Lost { call },
        Fault::ResetRequired => Reach::ResetRequired { call },
        _ => Reach::Failed { call, error: error.reason.to_string() },
    }
}

/// NVML's number of the recovery action.
fn recovery_action(gpu: &Gpu<'_>) -> Result<u32, NvmlError> {
    let field = FieldId(sys::field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION);
    let values = gpu.device.field_values_for(&[field])?;
    match values.into_iter().next().ok_or(NvmlError::NotSupported)??.value? {
        SampleValue::U32(number) => Ok(number),
        SampleValue::U64(number) => u32::try_from(number).map_err(|_| NvmlError::Unknown),
        _ => Err(NvmlError::Unknown),
    }
}

/// The health of the GPU's fabric registration; `None` if NVML reports a state that is newer than this version.
fn fabric_health(fabric: Fabric) -> Option<FabricHealth> {
    match (fabric.state, fabric.status) {
        (sys::NVML_GPU_FABRIC_STATE_COMPLETED, sys::nvmlReturn_enum_NVML_SUCCESS) if !fabric.bad_route => {
            Some(FabricHealth::Joined)
        }
        (sys::NVML_GPU_FABRIC_STATE_COMPLETED, status) => Some(FabricHealth::Failed { status }),
        (sys::NVML_GPU_FABRIC_STATE_NOT_STARTED | sys::NVML_GPU_FABRIC_STATE_IN_PROGRESS, _) => {
            Some(FabricHealth::Joining)
        }
        (sys::NVML_GPU_FABRIC_STATE_NOT_SUPPORTED, _) => Some(FabricHealth::Unused),
        _ => None,
    }
}

/// Each NVLink that answered, with true if it is up; `None` if every call failed.
fn links(gpu: &Gpu<'_>, unoffered: &mut Unoffered) -> Option<Vec<(u32, bool)>> {
    let all = unoffered.fact(links::STATE_FIELD, |_| links::states(&gpu.device, &gpu.calls));
    if let Some(all) = all {
        let known = |(link, up): (u32, Answer<bool>)| Some((link, up.ok().flatten()?));
        return Some((0..).zip(all).filter_map(known).collect());
    }
    let wanted: Vec<u32> = (0..links::MAX_LINKS).filter(|link| !unoffered.links.contains(link)).collect();
    if wanted.is_empty() {
        return Some(Vec::new());
    }
    // There is one report for all links: it does not matter which of them hangs.
    gpu.calls.report(links::STATE_CALL);
    let mut links = Vec::new();
    let mut answered = false;
    for link in wanted {
        let ask = || answer(links::STATE_CALL, gpu.device.link_wrapper_for(link).is_active());
        let answer = offered(gpu.calls.unreported(links::STATE_CALL, ask));
        answered |= answer.is_ok();
        if let Ok(None) = answer {
            unoffered.links.insert(link);
        }
        links.extend(answer.ok().flatten().map(|up| (link, up)));
    }
    answered.then_some(links)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_of_a_fabric_gives_its_health() {
        let fabric =
            |state, status| fabric_health(Fabric { cluster: [0; 16], clique: 0, state, status, bad_route: false });
        let states = [(0, 0), (1, 0), (2, 0), (3, 0), (3, 999), (77, 0)].map(|(state, status)| fabric(state, status));
        use FabricHealth::{Failed, Joined, Joining, Unused};
        assert_eq!(
            states,
            [Some(Unused), Some(Joining), Some(Joining), Some(Joined), Some(Failed { status: 999 }), None]
        );
    }

    #[test]
    fn change_of_mig_mode_repeats_all_calls() {
        let mut unoffered = Unoffered::default();
        unoffered.set_mig_mode(false);
        (unoffered.calls, unoffered.links) = (["f"].into(), [1].into());
        unoffered.set_mig_mode(false);
        assert!(unoffered.calls.contains("f") && unoffered.links.contains(&1));
        unoffered.set_mig_mode(true);
        assert!(unoffered.calls.is_empty() && unoffered.links.is_empty());
    }

    #[test]
    fn unoffered_call_is_repeated_after_some_polls() {
        let mut unoffered = Unoffered { mig: Some(true), links: [1].into(), ..Unoffered::default() };
        let asked = (0..2 * RETRY_POLLS).filter(|_| {
            unoffered.begin_poll();
            let mut asks = false;
            unoffered.fact("f", |_| {
                asks = true;
                Ok::<Option<u32>, _>(None)
            });
            asks
        });
        assert_eq!(asked.collect::<Vec<_>>(), [0, RETRY_POLLS - 1, 2 * RETRY_POLLS - 1]);
        assert_eq!((unoffered.links.len(), unoffered.mig), (0, Some(true)));
    }

    #[test]
    fn unoffered_call_is_made_once_failed_call_again() {
        let mut unoffered = Unoffered::default();
        let mut asked = 0;
        for _ in 0..3 {
            let none = unoffered.fact("f", |_| {
                asked += 1;
                Ok::<Option<u32>, _>(None)
            });
            assert_eq!(none, None);
        }
        assert_eq!(asked, 1);
        let failed = super::super::call::returned::<u32>("g", 999, || None);
        assert_eq!(unoffered.fact("g", |_| failed.clone()), None);
        assert_eq!(unoffered.fact("g", |_| Ok(Some(1))), Some(1));
    }
}
