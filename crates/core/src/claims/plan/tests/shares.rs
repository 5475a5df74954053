//! Claims that share a GPU.

use super::*;
use crate::claims::Share;
use crate::state::{DeviceSelector, SharedDevices, SharedResource, Sharing, SharingKind};

/// Two GPUs, the first of 80 GiB and in `shares` shares; `one_each` allows a claim one share only.
pub(super) fn shared(shares: u32, one_each: bool) -> NodeState {
    let state = state_with(Door::Plugin, &serde_json::json!({"memory_mib": 81_920}));
    let devices = SharedDevices::List(vec![DeviceSelector::Index(0)]);
    let row = SharedResource { devices, ..SharedResource::new(crate::state::ResourceName::gpu(), shares) };
    let mut sharing = Sharing::new(SharingKind::TimeSlicing, vec![row]);
    sharing.fail_requests_greater_than_one = one_each;
    let plan = ResourcePlan { door: Door::Dra, sharing: Some(sharing), ..ResourcePlan::default() };
    let unheld = || Event::Holders(Some(Holdings::default()));
    let events = [Event::Planned(Box::new(plan)), unheld(), unheld(), unheld()];
    events.into_iter().fold(state, |state, event| state.apply(event, Duration::ZERO).0)
}

/// A claim for a share of the first GPU, with the share's ID and amounts.
pub(super) fn share(uid: &str, id: &str, shares: &str, memory: &str) -> Claim {
    let mut claim = claim(uid, &[("a", "gpu-0")]);
    let result = &mut claim.status.allocation.as_mut().unwrap().devices.results[0];
    result.share_id = Some(id.to_owned());
    let consumed = [("shares", shares), ("memory", memory)];
    result.consumed_capacity = consumed.map(|(name, amount)| (name.to_owned(), amount.to_owned())).into();
    claim
}

/// Plans claims one after another; each finds the earlier ones in the ledger.
fn in_turn(state: &NodeState, claims: &[Claim]) -> Vec<Result<(), String>> {
    let mut others: Vec<(ClaimName, Prepared)> = Vec::new();
    let plan = |claim: &Claim| {
        let planned = planned_on(state, &HostDevices::default(), claim, &claim.metadata.uid, &others);
        planned.map(|planned| others.push((claim.metadata.clone(), planned)))
    };
    claims.iter().map(plan).collect()
}

#[test]
fn claims_share_a_gpu_up_to_its_capacity() {
    let state = shared(4, false);
    let claims = [
        share("u", "1", "2", "40Gi"),
        share("v", "2", "1", "20Gi"),
        share("w", "3", "2", "1Mi"),
        share("x", "4", "1", "20481Mi"),
        share("y", "5", "1", "20Gi"),
    ];
    let holders = "held by the claim ml/claim-u (UID u), the claim ml/claim-v (UID v)";
    let refused = |why: String| Err(format!("device gpu-0 (GPU-0): {why}"));
    let bytes = |mib: u64| mib << 20;
    assert_eq!(
        in_turn(&state, &claims),
        [
            Ok(()),
            Ok(()),
            refused(format!("2 of 4 shares are allocated to the claim, but 3 are {holders}")),
            refused(format!(
                "{} of {} bytes of memory are allocated to the claim, but {} are {holders}",
                bytes(20_481),
                bytes(81_920),
                bytes(61_440)
            )),
            Ok(()),
        ]
    );
    let planned = planned_on(&state, &HostDevices::default(), &claims[0], "u", &[]).unwrap();
    let device = &planned.devices[0];
    assert_eq!((device.share_id.as_deref(), device.share), (Some("1"), Some(Share { shares: 2, memory: 40 << 30 })));
    assert_eq!(device.cdi, ["linkwise.dev/device=u-a-gpu-0", "linkwise.dev/claim=u-a"]);
    // A checkpoint without the field `share`, as older releases wrote it, can still be read.
    let text = serde_json::to_string(&planned).unwrap();
    assert_eq!(serde_json::from_str::<Prepared>(&text).unwrap(), planned);
    let old = text.replace(r#""share":{"shares":2,"memory":42949672960},"#, "");
    assert_ne!(old, text);
    assert_eq!(serde_json::from_str::<Prepared>(&old).unwrap().devices[0].share, None);
}

#[test]
fn one_claim_may_have_two_shares_of_a_gpu() {
    let mut both = share("u", "1", "2", "1Gi");
    let mut second = share("u", "2", "2", "1Gi").status.allocation.unwrap().devices.results.remove(0);
    let add = |claim: &mut Claim, result: &AllocatedDevice| {
        claim.status.allocation.as_mut().unwrap().devices.results.push(result.clone());
    };
    add(&mut both, &second);
    assert_eq!(in_turn(&shared(4, false), &[both.clone()]), [Ok(())]);
    let why = in_turn(&shared(3, false), &[both]).remove(0).unwrap_err();
    assert!(why.ends_with(": 2 of 3 shares are allocated to the claim, but 2 are held by the claim itself"), "{why}");
    // The claim has the same share twice.
    let mut twice = share("u", "1", "2", "1Gi");
    second.share_id = Some("1".to_owned());
    add(&mut twice, &second);
    assert!(in_turn(&shared(4, false), &[twice]).remove(0).unwrap_err().contains("shares hardware"));
    let same = in_turn(&shared(4, false), &[share("u", "1", "1", "1Gi"), share("v", "1", "1", "1Gi")]);
    assert_eq!(same[1], Err("device gpu-0 (GPU-0) is prepared for the claim ml/claim-u (UID u)".to_owned()));
}

#[test]
fn share_and_exclusive_claim_exclude_each_other() {
    let (part, whole) = (share("u", "1", "1", "1Gi"), claim("v", &[("a", "gpu-0")]));
    let taken = |by: &str| Err(format!("device gpu-0 (GPU-0) is prepared for the claim ml/claim-{by} (UID {by})"));
    let state = shared(4, false);
    assert_eq!(in_turn(&state, &[part.clone(), whole.clone()]), [Ok(()), taken("u")]);
    // If the API server drops allowMultipleAllocations, claims have the whole GPU.
    assert_eq!(in_turn(&state, &[whole.clone(), part.clone()]), [Ok(()), taken("v")]);
    let mut admin_whole = whole;
    admin_whole.status.allocation.as_mut().unwrap().devices.results[0].admin_access = Some(true);
    assert_eq!(in_turn(&state, &[part.clone(), admin_whole.clone()]), [Ok(()), Ok(())]);
    let mut admin_share = part.clone();
    admin_share.metadata = name("v");
    admin_share.status.allocation.as_mut().unwrap().devices.results[0].admin_access = Some(true);
    assert_eq!(in_turn(&state, &[share("u", "2", "4", "80Gi"), admin_share]), [Ok(()), Ok(())]);
}

#[test]
fn invalid_share_is_refused_by_name() {
    let refused = |state: &NodeState, claim: Claim| in_turn(state, &[claim]).remove(0).unwrap_err();
    let not_shared = state_with(Door::Dra, &serde_json::json!({"memory_mib": 81_920}));
    let why = refused(&not_shared, share("u", "s1", "1", "1Gi"));
    let words = "the allocation has the share ID 's1', but this node gives the GPU to one claim at a time";
    assert_eq!(why, format!("device gpu-0 (GPU-0): {words}"));
    let state = shared(4, false);
    for (shares, memory, words) in [
        ("0", "1Gi", "the allocation takes '0' of the capacity shares, which is not a positive quantity"),
        ("1", "-1Gi", "the allocation takes '-1Gi' of the capacity memory, which is not a positive quantity"),
        ("many", "1Gi", "the allocation takes 'many' of the capacity shares, which is not a positive quantity"),
        ("5", "1Gi", "5 shares are allocated to the claim, which may have 4"),
        ("1", "81921Mi", "85900394496 bytes of memory are allocated to the claim, which may have 85899345920"),
        ("18446744073709551615", "1Gi", "18446744073709551615 shares are allocated to the claim, which may have 4"),
    ] {
        assert_eq!(refused(&state, share("u", "s1", shares, memory)), format!("device gpu-0 (GPU-0): {words}"));
    }
    let mut silent = share("u", "s1", "1", "1Gi");
    silent.status.allocation.as_mut().unwrap().devices.results[0].consumed_capacity.remove("shares");
    assert!(refused(&state, silent).ends_with("the allocation of a share lacks the capacity shares"));
    let why = refused(&shared(4, true), share("u", "s1", "2", "1Gi"));
    assert!(why.ends_with("2 shares are allocated to the claim, which may have 1"), "{why}");
}

/// An independent count checks that planned claims never exceed the GPU, and that a claim that fits is planned.
#[test]
fn shares_never_exceed_the_gpu() {
    let mut random = 1_u64;
    let mut below = |limit: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 33) % limit
    };
    let (mut planned, mut refused) = (0, 0);
    for _ in 0..200 {
        let shares = u32::try_from(2 + below(4)).unwrap();
        let wants: Vec<(u64, u64, bool)> = (0..8).map(|_| (below(4), below(60), below(8) == 0)).collect();
        let claims = wants.iter().enumerate().map(|(at, (shares, memory, whole))| {
            let uid = format!("u{at}");
            let part = || share(&uid, &format!("s{at}"), &shares.to_string(), &format!("{memory}Gi"));
            if *whole { claim(&uid, &[("a", "gpu-0")]) } else { part() }
        });
        let outcomes = in_turn(&shared(shares, false), &claims.collect::<Vec<_>>());
        let (mut left, mut memory_left, mut used) = (u64::from(shares), 80, false);
        for (outcome, (wants, memory, whole)) in outcomes.into_iter().zip(wants) {
            let fits = if whole { !used } else { wants > 0 && memory > 0 && wants <= left && memory <= memory_left };
            assert_eq!(outcome.is_ok(), fits, "{outcome:?}");
            if fits {
                used = true;
                (left, memory_left) = if whole { (0, 0) } else { (left - wants, memory_left - memory) };
            }
            *(if fits { &mut planned } else { &mut refused }) += 1;
        }
    }
    assert!(planned > 300 && refused > 300, "{planned} planned, {refused} refused");
}
