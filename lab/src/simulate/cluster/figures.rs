//! The results of the jobs through one door: the figures, and their sums.

use serde::Serialize;

use super::scheduler::Placed;
use crate::simulate::replay::whole;

/// The number of requests that change objects for one pod with a claim from a template (Kubernetes 1.36). The
/// controller of claims creates the claim, writes its name to the pod's status, ends reservation and allocation in one
/// request, removes the finalizer and deletes the claim (`pkg/controller/resourceclaim/controller.go`). The scheduler
/// adds the finalizer and writes the allocation (`bindClaim`).
const WRITES_PER_CLAIM: u64 = 7;

/// The results of the jobs through one door. Shares are in per mille, rounded down. Collectives are compared for jobs
/// whose pods have several GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Figures {
    /// The counted jobs: those that started, without those that fill the cluster first.
    pub jobs: u64,
    /// The counted jobs whose pods have several GPUs.
    pub several: u64,
    /// The mean of the collective against the best that any node of the cluster had free when the job started.
    pub collective_of_cluster: Option<u64>,
    /// The share of the jobs of which each pod got the best that any node of the cluster had free.
    pub best_of_cluster: Option<u64>,
    /// The mean of the collective against the best that the job's own node had free.
    pub collective_of_node: Option<u64>,
    /// The mean of the collective against the best of the job's node while it is idle.
    pub collective_of_machine: Option<u64>,
    /// The share of the pairs of a job's pods that have their GPUs on the same rails.
    pub equal_rails: Option<u64>,
    /// The mean of the seconds in the queue, rounded down.
    pub mean_wait_seconds: u64,
    /// The wait that 99 of 100 jobs do not exceed, in seconds.
    pub p99_wait_seconds: u64,
    /// The share of the jobs that waited.
    pub waited: u64,
    /// Jobs that never started.
    pub never_started: usize,
    /// The share of the GPUs that are in use, over time.
    pub busy: Option<u64>,
    /// The share of the free GPUs of machines with sets of four, over time, that are stuck (`State::stuck`).
    pub fragmentation: Option<u64>,
    /// The ResourceSlices of a node on average, in bytes of JSON.
    pub slice_bytes_per_node: u64,
    /// The ResourceSlices of all nodes, in bytes of JSON.
    pub slice_bytes: u64,
    /// A claim with its allocation on average, in bytes of JSON.
    pub claim_bytes: u64,
    /// Requests in an hour that change objects of DRA, or the parts of pods that are about them.
    pub writes_per_hour: Option<u64>,
    /// The mean number of devices that the allocator examined for a pod, in the attempt that placed it, on all tried
    /// nodes.
    pub steps_mean: u64,
    /// The largest such number for a pod.
    pub steps_worst: u64,
}

/// A pod that starts.
pub(super) struct Started {
    pub placed: Placed,
    /// The rails of its GPUs, as `Machine::rails` gives them.
    pub rails: Vec<Option<u32>>,
    /// The collective of its GPUs, if it has several.
    pub got: Option<u64>,
    /// The best collectives of the cluster, of its node and of its idle machine.
    pub best: [Option<u64>; 3],
}

/// The sums behind the figures.
#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    /// The present second, from the trace's zero.
    pub now: u64,
    /// The number of GPUs of the cluster.
    pub total: usize,
    /// The number of free GPUs.
    pub free: usize,
    /// The number of free GPUs of machines that have sets of four (`states::FOUR`).
    of_fours: usize,
    /// The number of these GPUs that are stuck (`State::stuck`).
    stuck: usize,
    /// The time over which sums are made: from the arrival of the first counted job to the arrival of the last one, or
    /// to the last end if all jobs come at once.
    window: (u64, u64),
    seconds: u128,
    free_seconds: u128,
    of_fours_seconds: u128,
    stuck_seconds: u128,
    waits: Vec<u64>,
    several: u128,
    got_best: u128,
    pods: u128,
    pairs: u128,
    equal_pairs: u128,
    /// Millionths of the best of the cluster, the node and the idle machine.
    collectives: [u128; 3],
    claim_bytes: u128,
    claims: u128,
    steps: u128,
    steps_worst: u64,
}

impl Tally {
    /// `window` holds the arrivals of the first and the last counted job.
    pub fn new((first, last): (u64, u64)) -> Self {
        Self { window: (first, if last > first { last } else { u64::MAX }), ..Self::default() }
    }

    /// Adds the free GPUs of a node, or subtracts them.
    pub fn count_free(&mut self, free: usize, of_fours: usize, stuck: usize, adds: bool) {
        for (sum, part) in [(&mut self.free, free), (&mut self.of_fours, of_fours), (&mut self.stuck, stuck)] {
            *sum = if adds { *sum + part } else { sum.saturating_sub(part) };
        }
    }

    pub fn advance(&mut self, to: u64) {
        let (first, last) = self.window;
        let seconds = u128::from(to.min(last).saturating_sub(self.now.max(first)));
        self.seconds += seconds;
        self.free_seconds += seconds * self.free as u128;
        self.of_fours_seconds += seconds * self.of_fours as u128;
        self.stuck_seconds += seconds * self.stuck as u128;
        self.now = self.now.max(to);
    }

    /// Records the start of a counted job. The job's collective is the mean over its pods.
    pub fn started(&mut self, wait: u64, pods: &[Started]) {
        self.waits.push(wait);
        let (mut got_best, mut shares) = (true, [0_u128; 3]);
        for (at, Started { placed, rails, got, best }) in pods.iter().enumerate() {
            self.pods += 1;
            self.steps += u128::from(placed.steps);
            self.steps_worst = self.steps_worst.max(placed.steps);
            self.claims += u128::from(placed.claim_bytes > 0);
            self.claim_bytes += u128::from(placed.claim_bytes);
            let others = pods.iter().skip(at + 1);
            self.pairs += others.len() as u128;
            let is_equal = |other: &&Started| other.rails == *rails && !rails.contains(&None);
            self.equal_pairs += others.filter(is_equal).count() as u128;
            let Some(got) = *got else { continue };
            got_best &= best.first().copied().flatten().is_none_or(|best| got >= best);
            for (sum, best) in shares.iter_mut().zip(best) {
                // If the best is 0, the pod got all that there is.
                *sum += (u128::from(got) * 1_000_000).checked_div(u128::from(best.unwrap_or(0))).unwrap_or(1_000_000);
            }
        }
        if pods.iter().any(|pod| pod.got.is_some()) {
            self.several += 1;
            self.got_best += u128::from(got_best);
            for (sum, share) in self.collectives.iter_mut().zip(shares) {
                *sum += share / pods.len() as u128;
            }
        }
    }

    /// The figures, without those of the slices.
    pub fn figures(mut self, never_started: usize) -> Figures {
        self.waits.sort_unstable();
        let jobs = self.waits.len();
        let mille = |part: u128, of: u128| (part * 1000).checked_div(of).map(whole);
        let mean = |sum: u128, of: u128| whole(sum.checked_div(of).unwrap_or(0));
        let [of_cluster, of_node, of_machine] = self.collectives.map(|sum| mille(sum, self.several * 1_000_000));
        let waited = self.waits.iter().filter(|wait| **wait > 0).count() as u128;
        let count = jobs as u128;
        let (total, last) = (self.seconds * self.total as u128, jobs.saturating_sub(1));
        let p99 = self.waits.get((jobs * 99).div_ceil(100).saturating_sub(1).min(last)).copied();
        let writes = self.claims * u128::from(WRITES_PER_CLAIM) * 3600;
        Figures {
            jobs: jobs as u64,
            several: whole(self.several),
            collective_of_cluster: of_cluster,
            best_of_cluster: mille(self.got_best, self.several),
            collective_of_node: of_node,
            collective_of_machine: of_machine,
            equal_rails: mille(self.equal_pairs, self.pairs),
            mean_wait_seconds: mean(self.waits.iter().copied().map(u128::from).sum(), count),
            p99_wait_seconds: p99.unwrap_or(0),
            waited: mille(waited, count).unwrap_or(0),
            never_started,
            busy: mille(total.saturating_sub(self.free_seconds), total),
            fragmentation: mille(self.stuck_seconds, self.of_fours_seconds),
            claim_bytes: mean(self.claim_bytes, self.claims),
            writes_per_hour: writes.checked_div(self.seconds).map(whole),
            steps_mean: mean(self.steps, self.pods),
            steps_worst: self.steps_worst,
            ..Figures::default()
        }
    }
}
