//! A load of pods that start and end: admissions at a steady rate, one at a time, as in a kubelet.
//!
//! Started by `KubeletBox::load`. It keeps no record of devices. Its result is the [`Tally`].

use std::collections::VecDeque;
use std::future::Future;
use std::num::NonZeroU32;
use std::ops::RangeInclusive;
use std::pin::pin;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval};

use super::KubeletBox;
use super::errors::AdmissionError;
use super::pod::{Admitted, Pod};
use super::rng::Rng;

/// The load on a node.
#[derive(Clone, Debug)]
pub struct Load {
    /// The resource's name.
    pub resource: String,
    /// Admissions in a second. Late admissions are caught up with.
    pub per_second: NonZeroU32,
    /// The range of the random number of devices of a pod.
    pub sizes: RangeInclusive<u32>,
    /// The most devices that the pods hold together. The oldest pods end before a new pod would exceed it.
    pub held: u32,
    /// The seed of the random sizes.
    pub seed: u64,
}

/// The result of a load.
#[derive(Debug, Default)]
pub struct Tally {
    /// Pods that were admitted.
    pub admitted: u64,
    /// The errors of the rejected pods, in order.
    pub rejected: Vec<AdmissionError>,
    /// The duration of the longest admission.
    pub longest: Duration,
}

impl KubeletBox {
    /// Admits pods until `end`, and shows each result to `see`. An admission that has begun is finished. Then all pods
    /// are removed.
    pub async fn load(
        &self,
        load: &Load,
        end: impl Future<Output = ()>,
        mut see: impl FnMut(&Pod, Result<&Admitted, &AdmissionError>),
    ) -> Tally {
        let mut rng = Rng::new(load.seed);
        let mut ticks = interval(Duration::from_secs(1) / load.per_second.get());
        ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
        let (mut tally, mut running, mut held) = (Tally::default(), VecDeque::<(String, u32)>::new(), 0);
        let mut end = pin!(end);
        for number in 0_u64.. {
            tokio::select! {
                biased;
                () = &mut end => break,
                _ = ticks.tick() => {}
            }
            let (least, most) = load.sizes.clone().into_inner();
            let more = rng.below(usize::try_from(most.saturating_sub(least)).unwrap_or(0) + 1);
            let size = least + u32::try_from(more).unwrap_or(0);
            while held + size > load.held
                && let Some((oldest, devices)) = running.pop_front()
            {
                self.remove_pod(&oldest);
                held -= devices;
            }
            let pod = Pod::single(format!("load-{number}"), load.resource.as_str(), size);
            let since = Instant::now();
            let outcome = self.admit(&pod, None).await;
            see(&pod, outcome.as_ref());
            match outcome {
                Ok(_) => {
                    tally.admitted += 1;
                    running.push_back((pod.name, size));
                    held += size;
                }
                Err(error) => tally.rejected.push(error),
            }
            tally.longest = tally.longest.max(since.elapsed());
        }
        for (pod, _) in running {
            self.remove_pod(&pod);
        }
        tally
    }
}
