//! The choice among units on GPUs (slots, MIG devices), compared with a naive reading of its definition: the oracle
//! lists the spreads of a request that the rules allow, and has the brute force of whole GPUs decide between them.

#![allow(clippy::cast_possible_truncation, reason = "a few GPUs are counted")]

use crate::allocation_oracle::{built_in, tables};
use crate::oracle;
use crate::random_node;

use std::collections::{BTreeMap, BTreeSet};

use linkwise_core::allocation::{
    AllocationPolicy, AllocationReport, AllocationRequest, AllocationTables, DeviceId, FallbackReason,
    PreferredAllocation, Units, Values, preferred_allocation, preferred_units,
};
use oracle::{Oracle, Set};
use proptest::collection::vec;
use proptest::prelude::*;

const POLICIES: [AllocationPolicy; 3] =
    [AllocationPolicy::BestEffort, AllocationPolicy::Distributed, AllocationPolicy::Packed];

/// The units of one GPU: `busy` are held, `must` have to be included, `free` are available, `others` are held units of
/// other resources.
#[derive(Clone, Copy, Debug)]
struct Shelf {
    busy: usize,
    must: usize,
    free: usize,
    others: usize,
}

/// The number of units that each GPU gives, including `must`.
type Counts = Vec<usize>;

fn all_spreads(shelves: &[Shelf], size: usize) -> Vec<Counts> {
    let mut all = vec![Vec::new()];
    for shelf in shelves {
        let longer = |counts: &Counts| {
            let counts = counts.clone();
            (shelf.must..=shelf.must + shelf.free).map(move |count| [counts.clone(), vec![count]].concat())
        };
        all = all.iter().flat_map(longer).collect();
    }
    all.retain(|counts| counts.iter().sum::<usize>() == size);
    all
}

fn gpus_with(counts: &Counts, least: usize) -> Set {
    counts.iter().enumerate().filter(|(_, count)| **count >= least).fold(0, |set, (gpu, _)| set | 1 << gpu)
}

/// Keeps the spreads whose set of GPUs with at least `least` units is the one that the choice of whole GPUs takes.
fn keep_best(oracle: &Oracle<'_>, spreads: &mut Vec<Counts>, least: usize) {
    let sets: BTreeSet<Set> = spreads.iter().map(|counts| gpus_with(counts, least)).collect();
    if sets.len() > 1 {
        let (any, every) = sets.iter().fold((0, Set::MAX), |(any, every), set| (any | set, every & set));
        let size = sets.first().unwrap().count_ones();
        let best = oracle.choose(any, every, size).unwrap().chosen;
        spreads.retain(|counts| gpus_with(counts, least) == best);
    }
}

fn distributed(oracle: &Oracle<'_>, shelves: &[Shelf], size: usize, by_use: bool) -> Option<Counts> {
    let mut spreads = all_spreads(shelves, size);
    // If a GPU gives more than `must`, it gives at most one unit more than any GPU that still has a free unit.
    spreads.retain(|counts| {
        let pairs = (0..counts.len()).flat_map(|a| (0..counts.len()).map(move |b| (a, b)));
        pairs.into_iter().all(|(a, b)| {
            let (gives, takes) = (counts[a] > shelves[a].must, counts[b] < shelves[b].must + shelves[b].free);
            !(gives && takes && counts[a] > counts[b] + 1)
        })
    });
    if by_use {
        let uses = |counts: &Counts| {
            let used = |gpu: usize| shelves[gpu].busy + shelves[gpu].others;
            let mut uses: Vec<usize> =
                (0..counts.len()).flat_map(|gpu| std::iter::repeat_n(used(gpu), counts[gpu])).collect();
            uses.sort_unstable();
            uses
        };
        let least = spreads.iter().map(uses).min()?;
        spreads.retain(|counts| uses(counts) == least);
    }
    for round in 1..=size {
        keep_best(oracle, &mut spreads, round);
    }
    assert!(spreads.len() < 2, "{spreads:?}");
    spreads.pop()
}

fn packed(oracle: &Oracle<'_>, shelves: &[Shelf], size: usize) -> Option<Counts> {
    let start: Counts = shelves.iter().map(|shelf| shelf.must).collect();
    let missing = size.checked_sub(start.iter().sum())?;
    let mut spreads = BTreeSet::from([start]);
    for _ in 0..missing {
        let mut next = BTreeSet::new();
        for counts in &spreads {
            let left = |gpu: usize| shelves[gpu].must + shelves[gpu].free - counts[gpu];
            // Of equally used GPUs one that already gives a unit comes first, then the one with more free units.
            let key = |gpu: usize| {
                let used = shelves[gpu].busy + shelves[gpu].others + counts[gpu];
                (used, counts[gpu] > 0, left(gpu))
            };
            let open: Vec<usize> = (0..shelves.len()).filter(|gpu| left(*gpu) > 0).collect();
            let top = open.iter().map(|gpu| key(*gpu)).max();
            for gpu in open.into_iter().filter(|gpu| Some(key(*gpu)) == top) {
                let mut counts = counts.clone();
                counts[gpu] += 1;
                next.insert(counts);
            }
        }
        spreads = next;
    }
    let mut spreads: Vec<Counts> = spreads.into_iter().collect();
    keep_best(oracle, &mut spreads, 1);
    spreads.into_iter().max()
}

/// The units of all GPUs, and for each GPU the ids that are available and those that must be included; `shift` rotates
/// these parts among the ids.
fn stock(tables: &AllocationTables, shelves: &[Shelf], shift: usize) -> (Units, [Vec<Vec<DeviceId>>; 2]) {
    let mut units = Vec::new();
    let mut lists = [vec![Vec::new(); shelves.len()], vec![Vec::new(); shelves.len()]];
    for (place, shelf) in shelves.iter().enumerate() {
        let count = shelf.busy + shelf.must + shelf.free;
        for slot in 0..count {
            let id = Units::slot(&tables.topology().gpus()[place].uuid, slot);
            let at = (slot + shift) % count;
            if at < shelf.free {
                lists[0][place].push(id.clone());
            } else if at < shelf.free + shelf.must {
                lists[1][place].push(id.clone());
            }
            units.push((id, place));
        }
    }
    let others = shelves.iter().enumerate().map(|(place, shelf)| (place, shelf.others)).collect();
    (Units::new(units, others), lists)
}

fn ask(
    tables: &AllocationTables,
    units: &Units,
    [available, must]: [Vec<DeviceId>; 2],
    size: usize,
    policy: AllocationPolicy,
) -> (PreferredAllocation, AllocationReport) {
    preferred_units(tables, units, &AllocationRequest { available, must_include: must, size }, policy)
}

fn compare(tables: &AllocationTables, shelves: &[Shelf], shift: usize, size: usize) {
    let oracle = Oracle::new(tables.topology());
    let (units, lists) = stock(tables, shelves, shift);
    let flat = || [0, 1].map(|list: usize| lists[list].concat());
    let backwards = || flat().map(|ids: Vec<DeviceId>| ids.into_iter().rev().collect());
    for policy in POLICIES {
        let question = format!("{policy:?} {size} of {shelves:?} shifted by {shift}");
        let (answer, report) = ask(tables, &units, flat(), size, policy);
        let (again, again_report) = ask(tables, &units, backwards(), size, policy);
        assert_eq!((&answer, &report), (&again, &again_report), "{question}");
        let expected = match policy {
            AllocationPolicy::Packed => packed(&oracle, shelves, size),
            AllocationPolicy::Distributed => distributed(&oracle, shelves, size, true),
            AllocationPolicy::BestEffort => distributed(&oracle, shelves, size, false),
        };
        let most: usize = shelves.iter().map(|shelf| shelf.must + shelf.free).sum();
        let Some(counts) = expected.filter(|_| size > 0 && size <= most) else {
            assert_eq!(report.fallback, Some(FallbackReason::Size), "{question}");
            continue;
        };
        // Each GPU gives the ids that must be included, then the first of its list, those with the lowest numbers.
        let mut chosen: BTreeSet<DeviceId> = lists[1].concat().into_iter().collect();
        for (place, count) in counts.iter().enumerate() {
            chosen.extend(lists[0][place].iter().take(count - shelves[place].must).cloned());
        }
        assert_eq!(answer.devices.len(), size, "{question}");
        assert_eq!(answer.devices.iter().cloned().collect::<BTreeSet<_>>(), chosen, "{question}: {counts:?}");
        let behind = gpus_with(&counts, 1);
        let reported = report.devices.iter().map(|gpu| tables.topology().position(&gpu.uuid).unwrap());
        assert_eq!(reported.fold(0, |set: Set, gpu| set | 1 << gpu), behind, "{question}");
        assert!(report.exact && report.fallback.is_none() && report.policy == policy, "{question}");
        let values = oracle.values(0, behind);
        let ours = report.values.unwrap();
        let of_set = |values: Values| (values.collective, values.pairs, values.closeness, values.nics);
        assert_eq!(of_set(ours), of_set(values), "{question}");
    }
}

fn shelf() -> impl Strategy<Value = Shelf> {
    (
        0..3_usize,
        prop_oneof![4 => Just(0_usize), 1 => 1..3_usize],
        0..4_usize,
        prop_oneof![3 => Just(0), 1 => 0..3_usize],
    )
        .prop_map(|(busy, must, free, others)| Shelf { busy, must, free, others })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_units_match_brute_force(
        observed in random_node::node(6),
        shelves in vec(shelf(), 6),
        shift in 0..7_usize,
        sizes in vec(0..14_usize, 1..6),
    ) {
        let tables = tables(&observed);
        let shelves = &shelves[..tables.topology().gpus().len().min(6)];
        for size in sizes {
            compare(&tables, shelves, shift, size);
        }
    }

    /// Nearly all spreads over equally used GPUs tie, so the choice of whole GPUs decides.
    #[test]
    fn equally_used_gpus_are_chosen_as_whole_ones(
        observed in random_node::node(6),
        free in 1..4_usize,
        busy in 0..3_usize,
        sizes in vec(1..10_usize, 1..4),
    ) {
        let tables = tables(&observed);
        let shelves = vec![Shelf { busy, must: 0, free, others: 0 }; tables.topology().gpus().len()];
        for size in sizes {
            compare(&tables, &shelves, 0, size);
        }
    }
}

/// The answer as places of GPUs with slot numbers, on a machine whose GPUs all have `replicas` slots.
fn slots_of(
    tables: &AllocationTables,
    replicas: usize,
    held: &[(usize, usize)],
    must: &[(usize, usize)],
    size: usize,
    policy: AllocationPolicy,
) -> Vec<(usize, usize)> {
    let gpus = tables.topology().gpus();
    let units = Units::slots(tables.topology(), replicas);
    let id = |(gpu, slot): (usize, usize)| Units::slot(&gpus[gpu].uuid, slot);
    let all = (0..gpus.len()).flat_map(|gpu| (0..replicas).map(move |slot| (gpu, slot)));
    let names: BTreeMap<DeviceId, (usize, usize)> = all.map(|slot| (id(slot), slot)).collect();
    let available = names.iter().filter(|(_, slot)| !held.contains(slot)).map(|(id, _)| id.clone()).collect();
    let must = must.iter().map(|slot| id(*slot)).collect();
    let (answer, _) = ask(tables, &units, [available, must], size, policy);
    answer.devices.iter().map(|id| names[id]).collect()
}

#[test]
fn dgx1_slots_get_expected_choices() {
    use AllocationPolicy::{BestEffort, Distributed, Packed};
    let v100 = built_in("dgx1-v100");
    let case = |held: &[_], must: &[_], size, policy| slots_of(&v100, 4, held, must, size, policy);
    // Eight idle GPUs give the same pair as for best-effort: the best linked pair that leaves the best rest.
    let best: Vec<usize> = case(&[], &[], 2, Distributed).iter().map(|(gpu, _)| *gpu).collect();
    let whole = places_of_best(&v100, 2);
    assert_eq!(best, whole);
    // Six GPUs have a held slot each: the unused ones are 0 and 4, linked by two NVLinks.
    let held = [(1, 0), (2, 0), (3, 1), (5, 0), (6, 3), (7, 0)];
    assert_eq!(case(&held, &[], 2, Distributed), [(0, 0), (4, 0)]);
    // With best-effort, use does not count: the best pair stays the best.
    assert_eq!(case(&held, &[], 2, BestEffort).iter().map(|(gpu, _)| *gpu).collect::<Vec<_>>(), whole);
    // A request for ten slots of eight GPUs gets one of each GPU, and a second one of each GPU of the best pair.
    let ten = case(&[], &[], 10, Distributed);
    let firsts: Vec<usize> = ten.iter().filter(|(_, slot)| *slot == 0).map(|(gpu, _)| *gpu).collect();
    let seconds: Vec<usize> = ten.iter().filter(|(_, slot)| *slot == 1).map(|(gpu, _)| *gpu).collect();
    assert_eq!((firsts, seconds), ((0..8).collect(), whole));
    // Two slots of GPU 5 must be included: a third comes from another GPU, or from GPU 5 when packed.
    let must = [(5, 1), (5, 2)];
    let spread = case(&[], &must, 3, Distributed);
    assert_eq!(spread.iter().filter(|(gpu, _)| *gpu == 5).count(), 2, "{spread:?}");
    assert_eq!(case(&[], &must, 3, Packed), [(5, 0), (5, 1), (5, 2)]);
    // Packed takes the lowest free slots of the GPU with a held slot, then a slot of its best neighbour.
    let packed = case(&[(0, 0)], &[], 4, Packed);
    assert_eq!(packed[..3], [(0, 1), (0, 2), (0, 3)]);
    assert!(v100.topology().symbol(0, packed[3].0).starts_with("NV2"), "{packed:?}");
    // Slots are ordered by number: 2 before 10.
    assert_eq!(slots_of(&v100, 12, &[(3, 0)], &[], 4, Packed), [(3, 1), (3, 2), (3, 3), (3, 4)]);
}

fn places_of_best(tables: &AllocationTables, size: usize) -> Vec<usize> {
    let available = tables.topology().gpus().iter().map(|gpu| DeviceId::from(&gpu.uuid)).collect();
    let request = AllocationRequest { available, must_include: Vec::new(), size };
    let report = preferred_allocation(tables, &request, AllocationPolicy::BestEffort).1;
    report.devices.iter().map(|gpu| tables.topology().position(&gpu.uuid).unwrap()).collect()
}

/// The slots (device, number) that are taken of the MIG devices of one GPU, step by step as the definition says. The
/// kind of a slot is `u` (held), `f` (free) or `m` (must be included).
fn stepwise(policy: AllocationPolicy, slots: &BTreeMap<(usize, usize), char>, size: usize) -> BTreeSet<(usize, usize)> {
    let all = |kind: char| slots.iter().filter(move |(_, is)| **is == kind).map(|(slot, _)| *slot);
    let mut taken: BTreeSet<(usize, usize)> = all('m').collect();
    while taken.len() < size {
        let key = |slot: &(usize, usize)| {
            let (own, _) = *slot;
            let carried = taken.iter().filter(|(device, _)| *device == own).count();
            let used = all('u').filter(|(device, _)| *device == own).count();
            match policy {
                AllocationPolicy::Packed => {
                    let must = all('m').filter(|(device, _)| *device == own).count();
                    (usize::MAX - used - must, 0, *slot)
                }
                AllocationPolicy::Distributed => (carried, used, *slot),
                AllocationPolicy::BestEffort => (carried, 0, *slot),
            }
        };
        let next = all('f').filter(|slot| !taken.contains(slot)).min_by_key(key).unwrap();
        taken.insert(next);
    }
    taken
}

proptest! {
    #[test]
    fn slots_of_mig_devices_match_stepwise_choice(
        kinds in vec(prop_oneof![Just('u'), Just('f'), Just('f'), Just('m')], 16),
        (devices, replicas) in (1..=4_usize, 1..=4_usize),
        more in 0..16_usize,
    ) {
        let tables = built_in("dgx-h100");
        let id = |(device, slot): (usize, usize)| DeviceId::from(format!("MIG-{device}::{slot}"));
        let slots = (0..devices).flat_map(|device| (0..replicas).map(move |slot| (device, slot)));
        let slots: BTreeMap<(usize, usize), char> = slots.zip(kinds).collect();
        let units = Units::new(slots.keys().map(|slot| (id(*slot), 3)), BTreeMap::new());
        let of = |kind: char| slots.iter().filter(move |(_, is)| **is == kind).map(|(slot, _)| id(*slot));
        let (must, free) = (of('m').count(), of('f').count());
        let size = must + more.min(free);
        prop_assume!(size > 0);
        let request =
            AllocationRequest { available: of('f').collect(), must_include: of('m').collect(), size };
        for policy in POLICIES {
            let (answer, _) = preferred_units(&tables, &units, &request, policy);
            let expected: BTreeSet<DeviceId> = stepwise(policy, &slots, size).into_iter().map(id).collect();
            prop_assert_eq!(answer.devices.into_iter().collect::<BTreeSet<_>>(), expected, "{:?}", policy);
        }
    }
}

#[test]
fn other_profiles_on_the_parent_count_as_use() {
    let tables = built_in("dgx-h100");
    let id = |name: &str| DeviceId::from(name.to_owned());
    let parents = [("MIG-a", 0), ("MIG-b", 1), ("MIG-c", 2)];
    let units = Units::new(parents.map(|(name, gpu)| (id(name), gpu)), BTreeMap::from([(0, 2), (1, 1), (2, 1)]));
    let lists = || [parents.map(|(name, _)| id(name)).to_vec(), Vec::new()];
    let one = |policy| ask(&tables, &units, lists(), 1, policy).0.devices;
    assert_eq!(one(AllocationPolicy::Distributed), [id("MIG-b")]);
    assert_eq!(one(AllocationPolicy::Packed), [id("MIG-a")]);
}

#[test]
fn unmeetable_request_for_units_is_answered_sorted() {
    let tables = built_in("dgx1-v100");
    let units = Units::slots(tables.topology(), 2);
    let id = |name: &str| DeviceId::from(name.to_owned());
    let known: Vec<DeviceId> = units.ids().take(3).cloned().collect();
    for policy in POLICIES {
        let lists = [[vec![id("x::9")], known.clone()].concat(), vec![id("nobody")]];
        let (answer, report) = ask(&tables, &units, lists, 2, policy);
        assert_eq!(answer.devices, [id("nobody"), known[0].clone()]);
        assert_eq!((report.fallback, report.exact), (Some(FallbackReason::UnknownDevice), false));
        for size in [0, 4, usize::MAX] {
            let (answer, report) = ask(&tables, &units, [known.clone(), Vec::new()], size, policy);
            assert_eq!((answer.devices.len(), report.fallback), (size.min(3), Some(FallbackReason::Size)));
        }
        // A whole GPU's id is unknown among units, and so is a unit of a GPU that does not exist.
        let bare = vec![DeviceId::from(&tables.topology().gpus()[0].uuid)];
        assert!(ask(&tables, &units, [bare, Vec::new()], 1, policy).1.fallback.is_some());
        let odd = Units::new([(id("a"), 99), (id("a"), 0), (id("b"), 0)], BTreeMap::from([(0, usize::MAX), (70, 1)]));
        assert!(ask(&tables, &odd, [vec![id("a")], Vec::new()], 1, policy).1.fallback.is_some());
        assert_eq!(ask(&tables, &odd, [vec![id("b")], Vec::new()], 1, policy).1.fallback, None);
    }
}
