//! [`PodEvent`]: an event of Kubernetes' API about a pod whose GPUs are linked far worse than possible.
//!
//! Decides which pods get an event, and its text. The writer (`crates/cluster`) decides when to write it.

use alloc::collections::BTreeMap;

use super::placement::{Allocation, Placements, Shortfall, compare};
use crate::prelude::*;
use crate::state::{ContainerHoldings, ContainerName, DRA_DRIVER};
use crate::words::gigabytes;

/// An event about a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodEvent {
    /// The pod's namespace, as the kubelet gave it.
    pub namespace: String,
    /// The pod's name, as the kubelet gave it.
    pub pod: String,
    /// The pod's UID, if the kubelet's checkpoint names it.
    pub uid: Option<String>,
    /// A claim of the pod, as `namespace/name`. The claim's status has the UIDs of the pods that may use it.
    pub claim: Option<String>,
    /// The reason, for programs.
    pub reason: &'static str,
    /// The finding and what to do, for people.
    pub note: String,
}

impl PodEvent {
    /// The reason of an event about GPUs whose links are far below the best that the machine has for so many.
    pub const SLOW_GPUS: &'static str = "SlowGPUPlacement";

    /// Makes one event for each pod with a container whose quality `collective / best` is below `below` percent, in the
    /// order of the pods' names. The event is about the container with the lowest quality. A pod gets no event as long
    /// as neither its UID nor a claim of it is known.
    pub fn of(
        placements: &Placements,
        by_container: &BTreeMap<ContainerName, ContainerHoldings>,
        below: u8,
    ) -> Vec<Self> {
        let mut worst: BTreeMap<(&str, &str), (&Allocation, _)> = BTreeMap::new();
        for allocation in &placements.allocations {
            let share = allocation.collective.zip(allocation.best);
            let Some(share) = share.filter(|share| compare(share, &(below.into(), 100)).is_lt()) else { continue };
            let known = worst.entry((&allocation.namespace, &allocation.pod)).or_insert((allocation, share));
            if compare(&share, &known.1).is_lt() {
                *known = (allocation, share);
            }
        }
        let event = |(allocation, share): (&Allocation, _)| {
            let holdings = by_container.get(&allocation.holder())?;
            Self::about(allocation, share, holdings)
        };
        worst.into_values().filter_map(event).collect()
    }

    /// The event about an allocation with this collective and this best one, MB/s.
    fn about(allocation: &Allocation, (has, best): (u64, u64), holdings: &ContainerHoldings) -> Option<Self> {
        let Allocation { namespace, pod, container, gpus, why, .. } = allocation;
        let (count, has, best) = (gpus.len(), gigabytes(has), gigabytes(best));
        let finding = format!(
            "The {count} GPUs of container {container} reach {has} GB/s together, and {count} GPUs of this node can \
             reach {best}."
        );
        let note = core::iter::once(&*finding).chain(sentences(why)).collect::<Vec<_>>().join(" ");
        let (namespace, pod) = (namespace.clone(), pod.clone());
        let claims = holdings.claims.iter().filter(|claimed| claimed.driver == DRA_DRIVER);
        let (uid, claim) = (holdings.pod_uid.clone(), claims.map(|claimed| claimed.claim.clone()).next());
        let is_known = uid.is_some() || claim.is_some();
        is_known.then_some(Self { namespace, pod, uid, claim, reason: Self::SLOW_GPUS, note })
    }
}

/// The causes, each with what to do.
fn sentences(why: &[Shortfall]) -> Vec<&'static str> {
    if why.is_empty() {
        return vec!["Cause unknown: the pod may be older than the linkwise that runs now."];
    }
    let sentence = |why: &Shortfall| match why {
        Shortfall::Narrowed => Some(
            "Narrowed: the kubelet's Topology Manager left only some of the free GPUs to choose from; \
             set linkwise.numaHints to fit the machine.",
        ),
        Shortfall::Scheduler => Some(
            "Scheduler: the claim got these GPUs while better ones were free; make the claim with 'linkwise claim', \
             so that it requests GPUs that belong together.",
        ),
        Shortfall::Fragmented => Some(
            "Fragmented: other pods have the better ones; recreate this pod when they have ended, and give each node \
             jobs of similar sizes.",
        ),
        Shortfall::Sick => Some(
            "Sick: unhealthy GPUs are among the better ones; run 'linkwise doctor' on the node, and do what it says.",
        ),
        Shortfall::Unknown => None,
    };
    why.iter().filter_map(sentence).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::ClaimedDevice;

    /// A container `namespace/pod/container` with GPUs of these MB/s.
    fn allocation(holder: &str, collective: Option<u64>, best: Option<u64>, why: &[Shortfall]) -> Allocation {
        let [namespace, pod, container]: [&str; 3] = holder.split('/').collect::<Vec<_>>().try_into().unwrap();
        let own = str::to_owned;
        Allocation {
            namespace: own(namespace),
            pod: own(pod),
            container: own(container),
            resource: own("nvidia.com/gpu"),
            gpus: vec!["GPU-a".parse().unwrap(), "GPU-b".parse().unwrap()],
            collective,
            best,
            why: why.to_vec(),
            ..Allocation::default()
        }
    }

    fn events(allocations: Vec<Allocation>, below: u8) -> Vec<PodEvent> {
        let holdings = ContainerHoldings { pod_uid: Some("uid".to_owned()), ..Default::default() };
        let holders = allocations.iter().map(|it| (it.holder(), holdings.clone())).collect();
        PodEvent::of(&Placements { allocations, ..Placements::default() }, &holders, below)
    }

    #[test]
    fn pod_without_uid_is_named_by_its_claim_or_waits() {
        let allocations = vec![allocation("a/p/c", Some(1), Some(9), &[])];
        let of_holdings = |holdings: ContainerHoldings| {
            let holders = allocations.iter().map(|it| (it.holder(), holdings.clone())).collect();
            PodEvent::of(&Placements { allocations: allocations.clone(), ..Placements::default() }, &holders, 75)
        };
        assert_eq!(of_holdings(ContainerHoldings::default()), []);
        let claimed = |driver: &str| ClaimedDevice {
            claim: "a/claim".to_owned(),
            driver: driver.to_owned(),
            ..ClaimedDevice::default()
        };
        let of = |driver: &str| ContainerHoldings { claims: [claimed(driver)].into(), ..Default::default() };
        assert_eq!(of_holdings(of("dra.net")), []);
        let [event] = of_holdings(of(DRA_DRIVER)).try_into().unwrap();
        assert_eq!((event.uid, event.claim.as_deref()), (None, Some("a/claim")));
    }

    #[test]
    fn pod_below_the_threshold_is_told_why_and_what_to_do() {
        let why = [Shortfall::Fragmented, Shortfall::Sick];
        let made = events(vec![allocation("a/p/main", Some(20_000), Some(40_960), &why)], 75);
        let [PodEvent { namespace, pod, reason, note, .. }] = made.as_slice() else { panic!("{made:?}") };
        assert_eq!((namespace.as_str(), pod.as_str(), *reason), ("a", "p", "SlowGPUPlacement"));
        let expected = "The 2 GPUs of container main reach 20.0 GB/s together, and 2 GPUs of this node can reach 40.9. \
                        Fragmented: other pods have the better ones; recreate this pod when they have ended, and give \
                        each node jobs of similar sizes. Sick: unhealthy GPUs are among the better ones; run 'linkwise \
                        doctor' on the node, and do what it says.";
        assert_eq!(note, expected);
    }

    #[test]
    fn quality_at_the_threshold_has_no_event() {
        let at = |collective| events(vec![allocation("a/p/c", Some(collective), Some(40_000), &[])], 75).len();
        assert_eq!((at(30_000), at(29_999)), (0, 1));
        let huge = allocation("a/p/c", Some(u64::MAX - 1), Some(u64::MAX), &[]);
        assert_eq!((events(vec![huge.clone()], 100).len(), events(vec![huge], 99).len()), (1, 0));
    }

    #[test]
    fn unknown_or_best_quality_has_no_event() {
        let of = |collective, best| events(vec![allocation("a/p/c", collective, best, &[])], 100);
        for (collective, best) in
            [(None, None), (None, Some(1)), (Some(1), None), (Some(7), Some(7)), (Some(0), Some(0))]
        {
            assert_eq!(of(collective, best), []);
        }
    }

    #[test]
    fn pod_has_one_event_about_its_worst_container() {
        let allocations = vec![
            allocation("a/p/first", Some(20), Some(40), &[]),
            allocation("a/p/worst", Some(30), Some(90), &[Shortfall::Narrowed]),
            allocation("a/p/last", Some(25), Some(60), &[]),
            allocation("a/good/c", Some(9), Some(9), &[]),
        ];
        let made = events(allocations, 75);
        assert!(made.len() == 1 && made[0].note.contains("container worst"), "{made:?}");
    }

    /// `events.k8s.io/v1` takes at most 1024 bytes.
    #[test]
    fn longest_note_fits_an_event() {
        let why = [Shortfall::Narrowed, Shortfall::Scheduler, Shortfall::Fragmented, Shortfall::Sick];
        let name = format!("a/p/{}", "c".repeat(63));
        let made = events(vec![allocation(&name, Some(999_999_999), Some(9_999_999_999), &why)], 100);
        assert!(made[0].note.len() <= 1024, "{}", made[0].note.len());
    }
}
