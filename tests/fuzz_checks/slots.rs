//! Any request for slots on any small machine. Called by the check of requests, with the bytes it left.

use std::collections::{BTreeMap, BTreeSet};

use linkwise_core::allocation::{
    AllocationPolicy, AllocationRequest, AllocationTables, DeviceId, Units, preferred_units,
};

use super::bytes::Bytes;

/// Slots on each GPU, units of others on some, a policy, and a request that may name slots that are not there.
pub fn slots(bytes: &mut Bytes<'_>, tables: &AllocationTables, numbers: [&[usize]; 2], size: usize) {
    let gpus = tables.topology().gpus();
    let replicas = bytes.below(5);
    let policies = [AllocationPolicy::Distributed, AllocationPolicy::Packed, AllocationPolicy::BestEffort];
    let policy = policies[bytes.below(3)];
    let others: BTreeMap<usize, usize> = (0..gpus.len()).map(|place| (place, bytes.below(4))).collect();
    let slot = |place: usize, slot| Units::slot(&gpus[place].uuid, slot);
    let all = (0..gpus.len()).flat_map(|place| (0..replicas).map(move |number| (slot(place, number), place)));
    let places: BTreeMap<DeviceId, usize> = all.collect();
    let units = Units::new(places.clone(), others);
    let id = |&number: &usize| match gpus.len() {
        // High numbers name a slot beyond the last one, or nobody's.
        0 => DeviceId::from("GPU-gone::0".to_owned()),
        gpus if number < 0xf8 => slot(number % gpus, number / gpus % replicas.max(1)),
        gpus => slot(number % gpus, replicas),
    };
    let [available, must_include] = numbers.map(|list| list.iter().map(id).collect::<Vec<_>>());
    let request = AllocationRequest { available, must_include, size };
    let (answer, report) = preferred_units(tables, &units, &request, policy);

    let mut turned = request.clone();
    turned.available.reverse();
    turned.must_include.extend(request.must_include.iter().cloned());
    let again = preferred_units(tables, &units, &turned, policy);
    assert_eq!(again, (answer.clone(), report.clone()), "the order of the lists of slots changes the answer");

    let must: BTreeSet<&DeviceId> = request.must_include.iter().collect();
    let offered: BTreeSet<&DeviceId> = request.available.iter().chain(&request.must_include).collect();
    let chosen: BTreeSet<&DeviceId> = answer.devices.iter().collect();
    assert!(chosen.len() == answer.devices.len() && chosen.is_subset(&offered), "a slot twice, or not offered");
    let known = offered.iter().all(|id| places.contains_key(*id));
    let possible = known && size >= must.len().max(1) && size <= offered.len();
    if report.fallback.is_some() {
        assert!(!possible, "a fallback ({:?}) where there is an answer", report.fallback);
        let expected: Vec<&DeviceId> = must.iter().chain(offered.difference(&must)).take(size).copied().collect();
        assert_eq!(answer.devices.iter().collect::<Vec<_>>(), expected, "not the documented fallback of slots");
        return;
    }
    assert!(possible && chosen.len() == size && must.is_subset(&chosen), "another size, or without what must be in it");
    let on = |ids: &BTreeSet<&DeviceId>, place: usize| ids.iter().filter(|id| places.get(**id) == Some(&place)).count();
    let behind: BTreeSet<usize> = chosen.iter().filter_map(|id| places.get(*id).copied()).collect();
    let told: BTreeSet<usize> = report.devices.iter().filter_map(|gpu| tables.topology().position(&gpu.uuid)).collect();
    assert_eq!(told, behind, "the report is of other GPUs");
    let beyond_must = |place| on(&chosen, place) > on(&must, place);
    for (a, b) in (0..gpus.len()).flat_map(|a| (0..gpus.len()).map(move |b| (a, b))) {
        let spare = on(&offered, b) > on(&chosen, b);
        match policy {
            // Never one more of a GPU that carries more already than another could give.
            AllocationPolicy::Distributed | AllocationPolicy::BestEffort => {
                assert!(!(beyond_must(a) && spare && on(&chosen, a) > on(&chosen, b) + 1), "not distributed");
            }
            // Never two GPUs begun and neither filled.
            AllocationPolicy::Packed => {
                let half = |place| beyond_must(place) && on(&offered, place) > on(&chosen, place);
                assert!(a == b || !(half(a) && half(b)), "not packed");
            }
        }
    }
}
