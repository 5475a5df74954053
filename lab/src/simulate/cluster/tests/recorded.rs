//! The choices of a real kube-scheduler (1.36.2 with its defaults, on an API server with Node objects but no kubelets).
//! The simulated scheduler makes the same choices, except among equal scores.
//!
//! Pods came one after the other, each with a claim of 1, 2 or 4 GPUs. They ended at random, the more likely the fuller
//! the cluster was. The JSON file has the machines of the nodes and the claims. The CSV file has a line for each pod
//! that was bound, that found no node, or that ended.

use linkwise_core::allocation::GpuSet;
use serde_json::Value;

use super::oracle::{Oracle, subsets};
use super::{bits, machines, shapes_of_one_pod};
use crate::simulate::CpuRequests;
use crate::simulate::cluster::scheduler::{Scheduler, total};
use crate::simulate::cluster::states::States;

const GPUS: [usize; 3] = [1, 2, 4];

/// The results of a record. All fields but `ties` are about the claims for several GPUs.
#[derive(Debug, Default)]
struct Got {
    claims: u64,
    /// The number of claims that got a best free set of the cluster.
    best: u64,
    /// The sum of the claims' collectives against the best free set's, in millionths.
    millionths: u64,
    /// The number of pods for which several nodes had the best score. The real scheduler examines 16 nodes at once, so
    /// that chance decides which of them comes first.
    ties: u64,
}

/// Follows a record, and compares each choice with the simulated scheduler's.
fn follow(record: &str, csv: &str, cpu: CpuRequests) -> Got {
    let record: Value = serde_json::from_str(record).unwrap();
    let names: Vec<&str> = record["machines"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    let machines = machines(&names);
    let oracles: Vec<Oracle<'_>> = machines.iter().map(|machine| Oracle::new(machine.tables.topology())).collect();
    let claims = GPUS.map(|gpus| {
        let spec = &record["claims"][gpus.to_string()];
        serde_json::json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"name": "c", "namespace": "default"}, "spec": spec,
        })
    });
    let shapes = shapes_of_one_pod(&GPUS);
    let states = States::with_claims(&machines, &shapes, claims.into()).unwrap();
    let kinds: Vec<usize> = (0..machines.len()).collect();
    let mut scheduler = Scheduler::of(states, &kinds, cpu);
    let mut free: Vec<GpuSet> = machines.iter().map(|machine| machine.whole).collect();
    let mut held = std::collections::BTreeMap::new();
    let mut got = Got::default();
    for line in csv.lines().skip(1) {
        let [event, job, gpus, node, devices] = line.split(',').collect::<Vec<_>>()[..] else { panic!("{line}") };
        if event == "end" {
            let (node, set) = held.remove(job).unwrap();
            scheduler.change(node, |free: GpuSet| free.union(set)).unwrap();
            free[node] = free[node].union(set);
            continue;
        }
        let gpus: usize = gpus.parse().unwrap();
        let shape = GPUS.iter().position(|size| *size == gpus).unwrap();
        let placed = scheduler.place(shape).unwrap();
        if event == "wait" {
            assert_eq!(placed, None, "{line}");
            continue;
        }
        let node: usize = node.trim_start_matches("node-").parse().unwrap();
        let set = devices.split(' ').map(|device| machines[node].gpus_of[device]);
        let set = set.fold(GpuSet::default(), |all, gpu| all.union(gpu));
        let answers: Vec<_> = (0..machines.len()).map(|node| scheduler.answer(shape, node).unwrap()).collect();
        assert_eq!(answers[node].set, Some(set), "{line}");
        let most = answers.iter().map(|answer| answer.score).max().unwrap();
        let total_of = |node: usize| {
            let (left, all) = (free[node].len() - gpus, machines[node].whole.len());
            let by_cpu = if cpu == CpuRequests::Share { i64::try_from(100 * left / all).unwrap() } else { 0 };
            total(answers[node].score, most, by_cpu)
        };
        let fitting = (0..machines.len()).filter(|node| answers[*node].set.is_some());
        let totals: Vec<i64> = fitting.map(total_of).collect();
        let best = *totals.iter().max().unwrap();
        assert_eq!(total_of(node), best, "{line}");
        if totals.iter().filter(|total| **total == best).count() > 1 {
            got.ties += 1;
        } else {
            assert_eq!(placed.map(|placed| (placed.node, placed.set)), Some((node, set)), "{line}");
        }
        if gpus > 1 {
            let offers = free.iter().zip(&oracles).flat_map(|(free, oracle)| {
                let sets = subsets(bits(*free)).filter(|set| set.count_ones() as usize == gpus);
                sets.map(|set| oracle.collective(set))
            });
            let (best, has) = (offers.max().unwrap(), oracles[node].collective(bits(set)));
            got.claims += 1;
            got.best += u64::from(best == has);
            got.millionths += has * 1_000_000 / best;
        }
        scheduler.change(node, |free| free.without(set)).unwrap();
        free[node] = free[node].without(set);
        held.insert(job, (node, set));
    }
    got
}

/// The nodes are a dgx1-v100, a pcie-8x-pix-pairs and a dgx-a100. The claims are those that `linkwise claim --cluster`
/// prints.
#[test]
fn mixed_fleet_is_scheduled_as_recorded() {
    let got =
        follow(include_str!("recorded/mixed-fleet.json"), include_str!("recorded/mixed-fleet.csv"), CpuRequests::None);
    assert!(got.claims >= 130 && got.millionths / got.claims >= 970_000, "{got:?}");
}

/// The nodes are three dgx1-v100. The claims are for any machine.
#[test]
fn equal_nodes_are_scheduled_as_recorded() {
    let got =
        follow(include_str!("recorded/three-dgx1.json"), include_str!("recorded/three-dgx1.csv"), CpuRequests::None);
    assert!(got.claims >= 130 && got.millionths / got.claims >= 990_000 && got.ties > 30, "{got:?}");
}

/// Claims are exact, and come after half of 16 single GPUs were given back. Each claim gets a set of the best tier, or
/// waits while no such set is free.
#[test]
fn exact_claims_are_scheduled_as_recorded() {
    let got =
        follow(include_str!("recorded/exact-dgx1.json"), include_str!("recorded/exact-dgx1.csv"), CpuRequests::None);
    assert!(got.claims == 52 && got.best == 52, "{got:?}");
}

/// The nodes are those of the mixed fleet, with 128 CPUs and 2 TiB each. Pods request 16 CPUs and 256 GiB for each GPU,
/// so that the scores of alternatives and of CPU, by their weights, decide on the node.
#[test]
fn pods_with_cpu_are_scheduled_as_recorded() {
    let (record, csv) = (include_str!("recorded/mixed-fleet-cpu.json"), include_str!("recorded/mixed-fleet-cpu.csv"));
    let got = follow(record, csv, CpuRequests::Share);
    assert!(got.claims >= 130 && got.ties < 60, "{got:?}");
}
