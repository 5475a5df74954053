//! GPUs that several claims share through DRA: what the plan makes of them, and when that changes.

use linkwise_core::claims::ClaimName;
use linkwise_core::state::{
    Door, Event, GpuShares, GpuSharing, Health, HealthRecord, Prepared, PreparedClaim, PreparedDevice, ResourcePlan,
};
use linkwise_core::topology::{GpuUuid, MigObservation};

use crate::resources::{World, dgx, nobody, planned, seen, sliced, told};

fn uuid(at: usize) -> GpuUuid {
    dgx(3).gpus[at].uuid.clone()
}

/// All GPUs behind DRA, in so many shares; 0: one claim's each.
fn plan(shares: u32) -> ResourcePlan {
    let plan = if shares > 0 { sliced(shares) } else { ResourcePlan::default() };
    ResourcePlan { door: Door::Dra, ..plan }
}

fn in_shares(shares: u32) -> Option<GpuShares> {
    (shares > 0).then_some(GpuShares { shares, one_each: false })
}

fn prepared(at: usize) -> Event {
    let claim = ClaimName { namespace: "default".into(), name: "a".into(), uid: "u".into() };
    let devices = vec![PreparedDevice::whole(&format!("gpu-{at}"), uuid(at))];
    Event::Prepared(vec![PreparedClaim {
        claim,
        prepared: Prepared { devices, ..Prepared::default() },
        is_of_another_boot: false,
    }])
}

impl World {
    /// A node whose GPUs have gone to DRA.
    fn through_dra_by(plan: &ResourcePlan) -> Self {
        Self::of([planned(plan), seen(dgx(3)), nobody(), nobody()])
    }

    /// How a GPU is shared, how it is to be, and whether it takes new claims.
    fn sharing(&self, at: usize) -> (Option<GpuShares>, Option<GpuShares>, bool) {
        let GpuSharing { now, next } = self.state.dra_sharing(&uuid(at));
        let mut devices = self.state.offers().through_dra().iter();
        let device = devices.find(|device| device.gpu.uuid == uuid(at)).unwrap();
        (now, next, device.health == Health::Healthy)
    }
}

#[test]
fn gpu_comes_to_dra_as_the_plan_shares_it() {
    let world = World::through_dra_by(&plan(4));
    assert_eq!(world.sharing(0), (in_shares(4), in_shares(4), true));
    assert_eq!((World::through_dra_by(&plan(0)).sharing(0), told(&world.effects)), ((None, None, true), vec![]));
    let mut one = plan(4);
    one.sharing.as_mut().unwrap().fail_requests_greater_than_one = true;
    assert_eq!(World::through_dra_by(&one).sharing(0).0, Some(GpuShares { shares: 4, one_each: true }));
}

#[test]
fn change_waits_for_claims_alone() {
    for (before, after) in [(0, 4), (4, 0), (4, 2)] {
        let (was, is) = (in_shares(before), in_shares(after));
        let mut world = World::through_dra_by(&plan(before));
        world.tell(prepared(0));
        world.tell(planned(&plan(after)));
        assert_eq!((world.sharing(0), world.sharing(1)), ((was, is, false), (is, is, true)), "{before} {after}");
        assert!(world.state.offers().awaits_holders());
        world.tell(Event::Prepared(Vec::new()));
        assert_eq!(world.sharing(0), (is, is, true));
    }
}

#[test]
fn change_waits_until_claims_are_known() {
    let mut world = World::through_dra_by(&plan(4));
    world.tell(planned(&plan(0)));
    assert_eq!(world.sharing(0), (in_shares(4), None, false), "no checkpoint has been read");
    world.tell(Event::Prepared(Vec::new()));
    assert_eq!(world.sharing(0), (None, None, true));
}

#[test]
fn change_that_is_taken_back_changes_nothing() {
    let mut world = World::through_dra_by(&plan(4));
    world.tell(prepared(0));
    world.tell(planned(&plan(0)));
    world.tell(planned(&plan(4)));
    assert_eq!(world.sharing(0), (in_shares(4), in_shares(4), true));
}

#[test]
fn restart_keeps_what_is_published() {
    let mut world = World::through_dra_by(&plan(4));
    world.tell(prepared(0));
    let record = world.state.record();
    let text = serde_json::to_string(&record).unwrap();
    assert_eq!(serde_json::from_str::<HealthRecord>(&text).unwrap(), record);
    for (shares, now) in [(4, 4), (0, 4), (2, 4)] {
        let restored = Event::Restored(Box::new(record.clone()));
        let next = World::of([restored, prepared(0), planned(&plan(shares)), seen(dgx(3)), nobody()]);
        assert_eq!(next.sharing(0), (in_shares(now), in_shares(shares), shares == now), "{shares}");
    }
    // A record of before GPUs were shared.
    let old = HealthRecord { dra_shares: [].into(), ..record };
    let next = World::of([Event::Restored(Box::new(old)), planned(&plan(4)), seen(dgx(3))]);
    assert_eq!(next.sharing(0), (None, in_shares(4), false));
}

/// Rows of MPS and of more GPUs than there are: `dra/shares.rs`.
#[test]
fn mig_devices_are_not_shared_through_dra() {
    let mut observed = dgx(3);
    observed.gpus[0].mig = Some(MigObservation { enabled: true, devices: Vec::new(), profiles: Vec::new() });
    let world = World::of([planned(&plan(4)), seen(observed)]);
    let said = &told(&world.effects)[0];
    assert!(said.contains("but DRA shares only whole GPUs; each MIG device of GPUs 0000:"), "{said}");
}
