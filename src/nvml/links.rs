//! A GPU's NVLinks: which are there, which are up, and what is at their other ends.
//!
//! Called by `probe`. It groups what NVML says and derives nothing from it.

use nvml_wrapper::Device;
use nvml_wrapper_sys::bindings as sys;

use super::call::{CallError, offered};
use super::calls::Calls;
use super::probe::Findings;
use super::raw;
use crate::topology::{NvLinkObservation, NvLinkRemote, PciAddress};

/// The call that says whether a link is up.
pub const STATE: &str = "nvmlDeviceGetNvLinkState";

/// Asks every link and groups them by remote end and state, in the order of their first links; `None` where all that came back were errors, empty where there is no link.
pub fn observe(
    device: &Device<'_>,
    calls: &Calls,
    is_gpu_here: impl Fn(PciAddress) -> bool,
    findings: &mut Findings<'_>,
) -> Option<Vec<NvLinkObservation>> {
    let mut groups: Vec<NvLinkObservation> = Vec::new();
    let (mut answered, mut failed) = (false, Errors::default());
    for link in 0..sys::NVML_NVLINK_MAX_LINKS {
        match offered(calls.ask(STATE, || device.link_wrapper_for(link).is_active())) {
            Ok(None) => answered = true,
            Ok(Some(active)) => {
                answered = true;
                let remote = remote(device, calls, link, &is_gpu_here, &mut failed);
                match groups.iter_mut().find(|group| (group.remote, group.active) == (remote, active)) {
                    Some(group) => group.links.push(link),
                    None => groups.push(NvLinkObservation { links: vec![link], remote, active }),
                }
            }
            Err(error) => failed.add(link, error),
        }
    }
    failed.report("NVLink", findings);
    answered.then_some(groups)
}

fn remote(
    device: &Device<'_>,
    calls: &Calls,
    link: u32,
    is_gpu_here: &impl Fn(PciAddress) -> bool,
    failed: &mut Errors,
) -> NvLinkRemote {
    let mut ask = |error| failed.add(link, error);
    let kind = offered(calls.raw("nvmlDeviceGetNvLinkRemoteDeviceType", || raw::remote_device_type(device, link)))
        .unwrap_or_else(|error| {
            ask(error);
            None
        });
    if kind == Some(sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_IBMNPU) {
        return NvLinkRemote::Cpu;
    }
    let info = calls.ask("nvmlDeviceGetNvLinkRemotePciInfo_v2", || device.link_wrapper_for(link).remote_pci_info());
    let info = offered(info).unwrap_or_else(|error| {
        ask(error);
        None
    });
    let pci = info.and_then(|info| address(&info.bus_id));
    match (kind, pci) {
        (Some(sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH), pci) => NvLinkRemote::Switch(pci),
        (Some(sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU), Some(pci)) => NvLinkRemote::Gpu(pci),
        (_, Some(pci)) if is_gpu_here(pci) => NvLinkRemote::Gpu(pci),
        _ => NvLinkRemote::Unknown,
    }
}

/// The address, where there is one: virtual machines and some boards give all ones.
fn address(bus_id: &str) -> Option<PciAddress> {
    bus_id.parse().ok().filter(|pci: &PciAddress| pci.domain() != u32::MAX)
}

/// Equal errors of several links, or towards several GPUs, gathered into one failure each.
#[derive(Default)]
pub struct Errors(Vec<(CallError, Vec<u32>)>);

impl Errors {
    /// One more number for which a call failed.
    pub fn add(&mut self, number: u32, error: CallError) {
        match self.0.iter_mut().find(|(known, _)| *known == error) {
            Some((_, numbers)) => numbers.push(number),
            None => self.0.push((error, vec![number])),
        }
    }

    /// Tells them; `what` is the word for the numbers.
    pub fn report(self, what: &str, findings: &mut Findings<'_>) {
        for (error, numbers) in self.0 {
            let numbers: Vec<String> = numbers.iter().map(u32::to_string).collect();
            findings.fail_with(&error, format!("{what} {}: {}", numbers.join(", "), error.reason));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_addresses_and_not_their_placeholder() {
        assert_eq!(address("00000000:3B:00.0"), "0000:3b:00.0".parse().ok());
        for nothing in ["FFFFFFFF:FF:FF.0", "FFFFFFFF:00:00.0", "", "switch"] {
            assert_eq!(address(nothing), None, "{nothing}");
        }
    }
}
