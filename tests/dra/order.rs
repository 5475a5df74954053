//! First fit over the published order, and the groups, over all that may be free.

use std::collections::BTreeMap;
use std::sync::Arc;

use linkwise_core::allocation::{
    AllocationPolicy, AllocationRequest, AllocationTables, DeviceId, GpuSet, preferred_allocation,
};
use linkwise_core::publish::dra::{GpuLayout, GroupSize};
use linkwise_core::topology::NodeTopology;
use linkwise_host::machines;

/// What each set of a size carries, by the report of a choice that has nothing else to choose.
fn collectives(tables: &AllocationTables, size: usize) -> BTreeMap<u64, u64> {
    let gpus = tables.topology().gpus();
    let sets = (0..1_u64 << gpus.len()).filter(|set| set.count_ones() as usize == size);
    let carries = |set: u64| {
        let available: Vec<DeviceId> = GpuSet(set).places().map(|at| DeviceId::from(&gpus[at].uuid)).collect();
        let request = AllocationRequest { available, must_include: Vec::new(), size };
        preferred_allocation(tables, &request, AllocationPolicy::BestEffort).1.values.unwrap().collective
    };
    sets.map(|set| (set, carries(set))).collect()
}

fn tables(name: &str) -> AllocationTables {
    AllocationTables::new(Arc::new(NodeTopology::assemble(&machines::load(name).unwrap().observed).0))
}

/// All that may be free: every set up to 8 GPUs, of more some thousands.
fn availabilities(gpus: usize) -> impl Iterator<Item = u64> {
    let step = if gpus > 8 { 13 } else { 1 };
    (0..1_u64 << gpus).step_by(step)
}

fn first_fit(order: &[usize], free: u64, size: usize) -> u64 {
    order.iter().filter(|gpu| free >> **gpu & 1 == 1).take(size).map(|gpu| 1 << gpu).sum()
}

#[test]
fn order_is_never_worse_than_bus_order() {
    for machine in machines::built_in() {
        let tables = tables(machine.name);
        let gpus = tables.topology().gpus().len();
        let layout = GpuLayout::of(&tables, (0..gpus).collect());
        let by_address: Vec<usize> = (0..gpus).collect();
        let mut sorted = layout.order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, by_address, "{}", machine.name);
        for size in [2, 4, 8].into_iter().filter(|size| *size <= gpus) {
            let carries = collectives(&tables, size);
            let enough = |free: &u64| free.count_ones() as usize >= size;
            let mean = |order: &[usize]| -> u64 {
                availabilities(gpus).filter(enough).map(|free| carries[&first_fit(order, free, size)]).sum()
            };
            let (ours, theirs) = (mean(&layout.order), mean(&by_address));
            eprintln!("{} {size}: {:.4}", machine.name, ours as f64 / theirs.max(1) as f64);
            assert!(ours >= theirs, "{}: {size} GPUs: {ours} < {theirs} by {:?}", machine.name, layout.order);
        }
        eprintln!("{} {:?}", machine.name, layout.order);
    }
}

#[test]
fn groups_find_what_is_best_of_what_is_free() {
    // Of pairs always the best; of fours the best in so many of a hundred states, and so much of its collective.
    for (machine, best_of_100, thousandths) in [
        ("dgx1-v100", 91, 940),
        ("azure-ndv2-v100", 91, 950),
        ("nvlink-bridge-pairs", 100, 1000),
        ("pcie-8x-pix-pairs", 100, 1000),
        ("dgx-h100", 100, 1000),
    ] {
        let tables = tables(machine);
        let gpus = tables.topology().gpus().len();
        let layout = GpuLayout::of(&tables, (0..gpus).collect());
        for size in [2, 4] {
            let carries = collectives(&tables, size);
            let group = GroupSize::holding(size).unwrap();
            let mut families = Vec::new();
            for name in group.names() {
                families.extend(layout.families.iter().find(|family| family.name == name));
            }
            let (mut states, mut best, mut share) = (0_u64, 0_u64, 0_u64);
            for free in availabilities(gpus).filter(|free| free.count_ones() as usize >= size) {
                let enough = |free: u64| free.count_ones() as usize >= size;
                let found = families.iter().find_map(|family| {
                    // The allocator goes through the published order, and meets the first group with enough.
                    let groups = family.groups.iter().map(|group| group.gpus.0 & free).filter(|free| enough(*free));
                    groups
                        .map(|free| first_fit(&layout.order, free, size))
                        .min_by_key(|set| layout.order.iter().position(|gpu| set >> gpu & 1 == 1))
                });
                let taken = found.unwrap_or_else(|| first_fit(&layout.order, free, size));
                let top =
                    carries.iter().filter(|(set, _)| *set & !free == 0).map(|(_, carries)| *carries).max().unwrap();
                states += 1;
                best += u64::from(carries[&taken] == top);
                share += carries[&taken] * 1000 / top;
            }
            let (wanted, share_wanted) = if size == 2 { (100, 1000) } else { (best_of_100, thousandths) };
            eprintln!("{machine} {size}: best in {}%, {} thousandths", best * 100 / states, share / states);
            assert!(best * 100 >= wanted * states, "{machine}: {size} GPUs: the best in {best} of {states}");
            assert!(share >= share_wanted * states, "{machine}: {size} GPUs: {share} in {states}");
        }
    }
}
