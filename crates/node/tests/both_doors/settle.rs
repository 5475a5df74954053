//! The end of a history: what is left when nothing happens any more.

use std::collections::BTreeSet;
use std::time::Duration;

use linkwise_core::state::Door;

use super::agent::LISTED_WITHIN;
use super::books::{GPUS, Part};
use super::kubelet::BOOKED_WITHIN;
use super::{Checked, PodState, World, healthy};

impl World {
    /// Everything ends and comes back; then each GPU is offered through the door that the plan names.
    pub fn settle(&mut self) -> Checked {
        self.gpus.iter_mut().for_each(|(is_there, _)| *is_there = true);
        (self.kubelet.runs, self.kubelet.lists) = (true, 1);
        if self.agent.is_none() {
            self.start_agent();
        }
        let observed = self.observed();
        self.agent.as_mut().unwrap().events.push_back(observed);
        self.pass(BOOKED_WITHIN * 2)?;
        for (pod, devices) in &mut self.kubelet.pods {
            self.books.release(pod);
            devices.ended = true;
        }
        while let Some(uid) = self.pick_claim(|_, _, state| state != PodState::Ended) {
            self.end_claim(uid);
        }
        self.cluster.clear();
        while !self.claims.is_empty() {
            self.pass(Duration::from_millis(100))?;
            self.unprepare();
        }
        for _ in 0..3 {
            self.pass(LISTED_WITHIN * 2)?;
            let agent = self.agent.as_mut().unwrap();
            agent.sweep(&self.cluster, &mut self.disk, self.now);
        }
        self.keep();
        let agent = self.agent.as_ref().unwrap();
        let parts = |door: Door| -> BTreeSet<Part> {
            let of_door = (0..GPUS).zip(self.gpus).filter(|_| self.door == door);
            of_door.flat_map(|(gpu, (_, by_mig))| Part::all_of(gpu, by_mig)).collect()
        };
        let dra: BTreeSet<Part> =
            self.slices.back().into_iter().flat_map(|(.., it)| it).map(|it| Part::of_device(it)).collect();
        let plugin: BTreeSet<Part> = healthy(agent).map(|(id, _)| Part::of_id(&id).0).collect();
        if dra != parts(Door::Dra) || plugin != parts(Door::Plugin) {
            return Err(format!("left alone, the doors offer {plugin:?} and {dra:?}; {:?}", self.door));
        }
        for gpu in 0..GPUS {
            let uuid = Part { gpu, mig: None }.uuid().parse().unwrap();
            if agent.snapshot.door(&uuid) != Some(self.door) {
                return Err(format!("the door of GPU {gpu} is {:?}", agent.snapshot.door(&uuid)));
            }
        }
        if self.disk.claims.is_empty() { Ok(()) } else { Err(format!("left on the disk: {:?}", self.disk.claims)) }
    }
}
