//! GPUs that several claims share through DRA: the shares of a plan, and when a changed plan applies.

use linkwise_core::state::{Door, Event, GpuShares, GpuSharing, Health, HealthRecord, ResourcePlan};
use linkwise_core::topology::{GpuUuid, MigObservation};

use crate::resources::{World, dgx, no_holders, planned, problems, seen, sliced};

fn uuid(at: usize) -> GpuUuid {
    dgx(3).gpus[at].uuid.clone()
}

/// A plan with all GPUs in DRA, each with this number of shares; with 0, each for one claim.
fn plan(shares: u32) -> ResourcePlan {
    let plan = if shares > 0 { sliced(shares) } else { ResourcePlan::default() };
    ResourcePlan { door: Door::Dra, ..plan }
}

fn in_shares(shares: u32) -> Option<GpuShares> {
    (shares > 0).then_some(GpuShares { shares, one_each: false })
}

fn prepared(at: usize) -> Event {
    Event::Prepared(vec![crate::resources::prepared("default", "a", &format!("gpu-{at}"), uuid(at))])
}

impl World {
    /// A node whose GPUs have moved to DRA.
    fn through_dra_by(plan: &ResourcePlan) -> Self {
        Self::of([planned(plan), seen(dgx(3)), no_holders(), no_holders()])
    }

    /// A GPU's current shares, its planned shares, and true if new claims may get it.
    fn sharing(&self, at: usize) -> (Option<GpuShares>, Option<GpuShares>, bool) {
        let GpuSharing { now, next } = self.state.dra_sharing(&uuid(at));
        let mut devices = self.state.offers().through_dra().iter();
        let device = devices.find(|device| device.gpu.uuid == uuid(at)).unwrap();
        (now, next, device.health == Health::Healthy)
    }
}

#[test]
fn gpu_moves_to_dra_with_the_plans_shares() {
    let world = World::through_dra_by(&plan(4));
    assert_eq!(world.sharing(0), (in_shares(4), in_shares(4), true));
    assert_eq!((World::through_dra_by(&plan(0)).sharing(0), problems(&world.effects)), ((None, None, true), vec![]));
    let mut one = plan(4);
    one.sharing.as_mut().unwrap().fail_requests_greater_than_one = true;
    assert_eq!(World::through_dra_by(&one).sharing(0).0, Some(GpuShares { shares: 4, one_each: true }));
}

#[test]
fn changed_shares_wait_for_claims_of_the_gpu() {
    for (before, after) in [(0, 4), (4, 0), (4, 2)] {
        let (was, is) = (in_shares(before), in_shares(after));
        let mut world = World::through_dra_by(&plan(before));
        world.apply(prepared(0));
        world.apply(planned(&plan(after)));
        assert_eq!((world.sharing(0), world.sharing(1)), ((was, is, false), (is, is, true)), "{before} {after}");
        assert!(world.state.offers().awaits_holders());
        world.apply(Event::Prepared(Vec::new()));
        assert_eq!(world.sharing(0), (is, is, true));
    }
}

#[test]
fn changed_shares_wait_until_claims_are_known() {
    let mut world = World::through_dra_by(&plan(4));
    world.apply(planned(&plan(0)));
    assert_eq!(world.sharing(0), (in_shares(4), None, false), "the claims' checkpoints have not been read");
    world.apply(Event::Prepared(Vec::new()));
    assert_eq!(world.sharing(0), (None, None, true));
}

#[test]
fn reverted_change_of_shares_has_no_effect() {
    let mut world = World::through_dra_by(&plan(4));
    world.apply(prepared(0));
    world.apply(planned(&plan(0)));
    world.apply(planned(&plan(4)));
    assert_eq!(world.sharing(0), (in_shares(4), in_shares(4), true));
}

#[test]
fn restart_keeps_published_shares() {
    let mut world = World::through_dra_by(&plan(4));
    world.apply(prepared(0));
    let record = world.state.record();
    let text = serde_json::to_string(&record).unwrap();
    assert_eq!(serde_json::from_str::<HealthRecord>(&text).unwrap(), record);
    for (shares, now) in [(4, 4), (0, 4), (2, 4)] {
        let restored = Event::Restored(Box::new(record.clone()));
        let next = World::of([restored, prepared(0), planned(&plan(shares)), seen(dgx(3)), no_holders()]);
        assert_eq!(next.sharing(0), (in_shares(now), in_shares(shares), shares == now), "{shares}");
    }
    // A record from a version without shared GPUs.
    let old = HealthRecord { dra_shares: [].into(), ..record };
    let next = World::of([Event::Restored(Box::new(old)), planned(&plan(4)), seen(dgx(3))]);
    assert_eq!(next.sharing(0), (None, in_shares(4), false));
}

#[test]
fn mig_devices_are_not_shared_through_dra() {
    let mut observed = dgx(3);
    observed.gpus[0].mig = Some(MigObservation { enabled: true, devices: Vec::new(), profiles: Vec::new() });
    let world = World::of([planned(&plan(4)), seen(observed)]);
    let problem = &problems(&world.effects)[0];
    assert!(problem.contains("but DRA shares only whole GPUs; each MIG device of GPUs 0000:"), "{problem}");
}
