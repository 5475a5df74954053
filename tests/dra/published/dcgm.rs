//! The attributes by which DCGM exporter maps slices to the GPUs and MIG devices that it measures: `type`, `uuid`,
//! `parentUUID`, `profile`, and a MIG device's name if it lacks `uuid` (internal/pkg/transformation/dra.go of 4.8.2 and
//! 4.8.4).

use std::collections::BTreeSet;

use linkwise_core::publish::dra::{Attribute, SliceDevice};
use linkwise_core::state::GpuShares;
use linkwise_host::machines;

use super::limits::{self, with_all_facts};
use super::mig::{self, DEVICE};
use super::shares;

/// A device as DCGM exporter identifies it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Known<'a> {
    Gpu { uuid: &'a str },
    Mig { parent: &'a str, profile: &'a str, uuid: &'a str },
    OnDemand { parent: &'a str, profile: &'a str, minor: u32, profile_id: u32, start: u32 },
}

/// The numbers of a name `gpu-<minor>-mig-<anything>-<profile's id>-<first slice>`.
fn numbers(name: &str) -> Option<(u32, u32, u32)> {
    let (minor, rest) = name.strip_prefix("gpu-")?.split_once("-mig-")?;
    let mut parts = rest.rsplitn(3, '-');
    let (start, profile_id) = (parts.next()?, parts.next()?);
    parts.next().filter(|profile| !profile.is_empty())?;
    Some((minor.parse().ok()?, profile_id.parse().ok()?, start.parse().ok()?))
}

fn known(device: &SliceDevice) -> Option<Known<'_>> {
    let text = |name: &str| match device.attributes.get(name) {
        Some(Attribute::String(text)) => Some(text.as_str()),
        _ => None,
    };
    match (text("type")?, text("uuid")) {
        ("gpu", uuid) => Some(Known::Gpu { uuid: uuid? }),
        ("mig", Some(uuid)) => Some(Known::Mig { parent: text("parentUUID")?, profile: text("profile")?, uuid }),
        ("mig", None) => {
            let (minor, profile_id, start) = numbers(&device.name)?;
            let (parent, profile) = (text("parentUUID")?, text("profile")?);
            Some(Known::OnDemand { parent, profile, minor, profile_id, start })
        }
        _ => None,
    }
}

#[test]
fn every_gpu_is_known_by_its_uuid() {
    for machine in machines::built_in() {
        let observed = with_all_facts(machines::load(machine.name).unwrap().observed);
        let devices = limits::published(&observed, &[]);
        let uuids: BTreeSet<Known<'_>> =
            observed.gpus.iter().map(|gpu| Known::Gpu { uuid: gpu.uuid.as_str() }).collect();
        assert_eq!(devices.iter().filter_map(known).collect::<BTreeSet<_>>(), uuids, "{}", machine.name);
    }
}

#[test]
fn mig_device_is_known_by_its_uuid_or_its_name() {
    let observed = mig::with_device();
    let gpu = &observed.gpus[0];
    let made = &gpu.mig.as_ref().unwrap().devices[0];
    let (parent, profile) = (gpu.uuid.as_str(), "2g.20gb");
    let (devices, _) = mig::published(&observed, |_| {});
    assert_eq!(known(&devices[DEVICE]), Some(Known::Mig { parent, profile, uuid: made.uuid.as_str() }));

    let place = (made.profile_id.unwrap(), made.placement.unwrap().start, gpu.minor.unwrap());
    let on_demand = Known::OnDemand { parent, profile, profile_id: place.0, start: place.1, minor: place.2 };
    let (before, _) = mig::published(&mig::observed(), |_| {});
    let (after, _) = mig::published(&observed, |facts| facts.made = BTreeSet::from([DEVICE.to_owned()]));
    for devices in [before, after] {
        assert_eq!(known(&devices[DEVICE]), Some(on_demand));
        let all: BTreeSet<Known<'_>> = devices.values().filter_map(known).collect();
        assert_eq!(all.len(), devices.len());
    }
}

/// DCGM exporter does not know the type of shared GPUs, as docs/monitoring.md says.
#[test]
fn shared_gpu_is_unknown() {
    let observed = machines::load("dgx1-v100").unwrap().observed;
    let devices = shares::published(&observed, &[0], GpuShares { shares: 2, one_each: false });
    assert_eq!((devices.len(), devices.iter().filter_map(known).count()), (8, 7));
}
