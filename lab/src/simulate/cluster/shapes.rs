//! The shapes of jobs. Pods of one shape have the same claim, and jobs of one shape wait in one queue.

use anyhow::{Result, ensure};

use super::machines::Machine;
use crate::simulate::{Door, Job};

/// A kind of job, by the GPUs that it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Shape {
    /// The GPUs of each pod.
    pub gpus: usize,
    pub pods: usize,
    /// The first rail that each pod's claim names, and the number of rails, if it names any.
    pub rails: Option<(u8, u8)>,
}

#[derive(Debug)]
pub(super) struct Shapes {
    pub shapes: Vec<Shape>,
    /// If claims name rails: the fewest rails of a machine, and the fewest GPUs on a rail (1 if `gpus_per_rail` is 0).
    rails: Option<(u8, usize)>,
}

impl Shapes {
    pub fn of(machines: &[Machine], jobs: &[Job], door: Door) -> Result<Self> {
        let mut found = Self { shapes: Vec::new(), rails: None };
        if door == Door::DraRails {
            for machine in machines {
                let topology = machine.tables.topology();
                let (rails, each) = (u8::try_from(topology.rails().len())?, topology.gpus_per_rail().max(1));
                ensure!(rails > 0, "--door dra-rails: no GPU of '{}' has an RDMA NIC", machine.name);
                found.rails = Some(found.rails.map_or((rails, each), |(all, own)| (all.min(rails), own.min(each))));
            }
        }
        found.shapes = jobs.iter().enumerate().map(|(number, job)| found.shape(number, job)).collect();
        found.shapes.sort_unstable();
        found.shapes.dedup();
        Ok(found)
    }

    /// The place of a job's shape.
    pub fn position(&self, number: usize, job: &Job) -> Option<usize> {
        self.shapes.binary_search(&self.shape(number, job)).ok()
    }

    /// The shape of a job. If claims name rails and the job has several pods, all its pods get the same rails: as few
    /// as hold a pod's GPUs. The job's number chooses them, so that jobs spread over all rails.
    fn shape(&self, number: usize, job: &Job) -> Shape {
        let rails = self.rails.filter(|_| job.pods > 1).map(|(all, each)| {
            let own = u8::try_from(job.size.div_ceil(each)).unwrap_or(u8::MAX).min(all).max(1);
            let sets_before = number % usize::from(all / own).max(1);
            (u8::try_from(sets_before).unwrap_or(0) * own, own)
        });
        Shape { gpus: job.size, pods: job.pods, rails }
    }
}
