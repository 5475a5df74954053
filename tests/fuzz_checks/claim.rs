//! Claims and their checkpoints: any claim is refused in one line, or prepared with devices of this node. Called by the
//! targets `claim` and `checkpoint`.

use std::collections::BTreeSet;
use std::sync::LazyLock;
use std::time::Duration;

use linkwise_core::claims::{
    AllocatedConfig, AllocatedDevice, Claim, ClaimError, ClaimName, DeviceRefusal, OpaqueConfig, PlanInputs, Prepared,
    PreparedDevice, devices, plan,
};
use linkwise_core::publish::RdmaNodes;
use linkwise_core::publish::injection::{CdiOptions, HostDevices, InjectionOptions};
use linkwise_core::state::{
    DeviceSelector, Door, Event, Holdings, NodeState, NumaHints, PreparedClaim, ResourceName, ResourcePlan,
    SharedDevices, SharedResource, Sharing, SharingKind,
};
use linkwise_kubelet::dra::parse_checkpoint;

use super::bytes::Bytes;
use super::machine::assert_one_line;

const DRIVER: &str = "gpu.nvidia.com";
const POOL: &str = "node/gpu";

/// The UID of each claim that the kubelet asks for.
const UID: &str = "u";

/// Eight GPUs on a DRA node: the first has two MIG devices, the last is shared.
static STATE: LazyLock<NodeState> = LazyLock::new(|| {
    let mut observed = linkwise_host::machines::load("dgx-h100").expect("a built-in machine").observed;
    let mig = |index: u32| {
        serde_json::json!({"index": index, "uuid": format!("MIG-{index}"), "gpu_instance": index + 1,
            "compute_instance": 0, "gpu_slices": 1, "compute_slices": 1, "memory_mib": 9728})
    };
    let mig = serde_json::json!({"enabled": true, "devices": [mig(0), mig(1)]});
    observed.gpus[0].mig = serde_json::from_value(mig).expect("MIG facts as in a node file");
    let devices = SharedDevices::List(vec![DeviceSelector::Index(7)]);
    let row = SharedResource { devices, ..SharedResource::new(ResourceName::gpu(), 4) };
    let sharing = Some(Sharing::new(SharingKind::TimeSlicing, vec![row]));
    let plan = ResourcePlan { door: Door::Dra, sharing, ..ResourcePlan::default() };
    let unheld = || Event::Holders(Some(Holdings::default()));
    let events = [Event::Planned(Box::new(plan)), Event::Observed(Box::new(observed)), unheld(), unheld()];
    events.into_iter().fold(NodeState::new(NumaHints::default()), |state, event| state.apply(event, Duration::ZERO).0)
});

/// Checks a claim in the API server's JSON. Bytes that do not begin with `{` are numbers from which a claim is made.
pub fn claim(bytes: &[u8]) {
    let mut claim = match bytes.first() {
        Some(b'{') => match Claim::from_json(bytes) {
            Ok(claim) => claim,
            Err(error) => return assert_one_line(&error.to_string()),
        },
        _ => claim_from_numbers(&mut Bytes(bytes)),
    };
    let asked = ClaimName { namespace: "ml".to_owned(), name: "claim".to_owned(), uid: UID.to_owned() };
    if claim.metadata != asked {
        let refused = plan_claim(&claim, &asked, &[]);
        assert_one_line(&refused.expect_err("a claim with another name is refused").to_string());
        claim.metadata = asked.clone();
    }
    let prepared = match plan_claim(&claim, &asked, &[]) {
        Ok(prepared) => prepared,
        Err(error) => return assert_one_line(&error.to_string()),
    };
    check_prepared(&claim, &prepared);
    let own = [(asked.clone(), prepared.clone())];
    assert_eq!(plan_claim(&claim, &asked, &own).as_ref(), Ok(&prepared), "a claim conflicts with its own checkpoint");
    let other = ClaimName { uid: "other".to_owned(), ..asked.clone() };
    match plan_claim(&claim, &asked, &[(other, prepared.clone())]) {
        Ok(_) => assert!(prepared.devices.iter().all(|device| device.admin), "a GPU in two claims"),
        Err(error) => assert!(matches!(error, ClaimError::Device { why: DeviceRefusal::Taken(_), .. }), "{error}"),
    }
}

fn plan_claim(claim: &Claim, asked: &ClaimName, before: &[(ClaimName, Prepared)]) -> Result<Prepared, ClaimError> {
    let cdi = CdiOptions { kind: "v/gpu".to_owned(), annotation_prefix: None, cri: true };
    let injection = InjectionOptions { cdi: Some(cdi), ..InjectionOptions::default() };
    // With RDMA nodes each request gets a variable, so that each has a CDI edit.
    let host = HostDevices { rdma: Some(RdmaNodes::default()), ..HostDevices::default() };
    let common_shm = BTreeSet::new();
    let entry = |(claim, prepared): &(ClaimName, Prepared)| PreparedClaim {
        claim: claim.clone(),
        prepared: prepared.clone(),
        is_of_another_boot: false,
    };
    let state = STATE.clone().apply(Event::Prepared(before.iter().map(entry).collect()), Duration::ZERO).0;
    let node = PlanInputs {
        pool: POOL,
        state: &state,
        injection: &injection,
        host: &host,
        makes_mig: true,
        common_shm: &common_shm,
    };
    plan(claim, asked, node)
}

/// Checks that exactly the allocated devices are prepared, with CDI names, and overlap only by admin access or shares.
fn check_prepared(claim: &Claim, prepared: &Prepared) {
    let results = claim.status.allocation.iter().flat_map(|allocation| &allocation.devices.results);
    let ours: Vec<&AllocatedDevice> = results.filter(|result| result.driver == DRIVER).collect();
    assert!((1..=32).contains(&ours.len()), "{} devices", ours.len());
    let names = |device: &AllocatedDevice| (device.pool.clone(), device.device.clone());
    let actual: Vec<_> = prepared.devices.iter().map(|device| (device.pool.clone(), device.device.clone())).collect();
    assert_eq!(actual, ours.into_iter().map(names).collect::<Vec<_>>());
    let known: BTreeSet<String> = devices(STATE.topology()).into_iter().map(|(name, _)| name).collect();
    for order in prepared.mps.iter().map(|mps| &mps.order) {
        assert!((1..=100).contains(&order.thread_percentage) && order.name().is_some(), "{order:?}");
        for gpu in &order.gpus {
            // The claim may also have admin access to the GPU; that device does not use MPS.
            let is_own = |device: &&PreparedDevice| device.gpu == gpu.gpu && !device.admin;
            let own = prepared.devices.iter().find(is_own).expect("an MPS order names a GPU of the claim");
            assert!(own.mig.is_none() && own.share.is_some() != order.exclusive, "{order:?}");
            assert!(gpu.mib.is_none_or(|mib| (1..=81_559).contains(&mib)), "{order:?}");
        }
    }
    for (at, device) in prepared.devices.iter().enumerate() {
        assert!(device.pool == POOL && known.contains(&device.device), "{device:?} is not a device of this node");
        assert!(!device.request.contains('/'), "{device:?} names an alternative");
        let name = format!("{}-{}", claim.metadata.uid, device.request);
        let names = [format!("linkwise.dev/device={name}-{}", device.device), format!("linkwise.dev/claim={name}")];
        assert_eq!(device.cdi, names, "{device:?}");
        let before = prepared.devices.iter().take(at).filter(|other| !other.admin && !device.admin);
        let before = before.filter(|other| other.share.is_none() || other.share_id == device.share_id);
        assert!(before.into_iter().all(|other| !device.overlaps(other)), "{device:?} overlaps an earlier device");
    }
    let text = serde_json::to_vec(prepared).expect("a checkpoint can be written");
    assert_eq!(serde_json::from_slice::<Prepared>(&text).expect("a checkpoint can be read"), *prepared);
}

/// Makes a claim with any allocation; most of its devices exist.
fn claim_from_numbers(bytes: &mut Bytes<'_>) -> Claim {
    const DEVICES: &str = "gpu-1,gpu-2,gpu-3,gpu-4,gpu-5,gpu-6,gpu-7,gpu-0-mig-1g10gb-gi1-ci0,gpu-0-mig-1g10gb-gi2-ci0,\
                           gpu-0,gpu-99,";
    let devices: Vec<&str> = DEVICES.split(',').collect();
    const REQUESTS: [&str; 6] = ["a", "a/b", "b", "", "/", "a/b/c"];
    let one = |bytes: &mut Bytes<'_>, among: &[&str]| among[bytes.below(among.len())].to_owned();
    let request = |bytes: &mut Bytes<'_>| one(bytes, &REQUESTS);
    let mut claim = Claim::default();
    let allocation = claim.status.allocation.insert(Default::default());
    const AMOUNTS: [&str; 8] = ["1", "0", "-1", "2Ki", "1500m", "many", "", "99999999999999999999Ei"];
    for _ in 0..bytes.below(40) {
        let mut result = AllocatedDevice {
            request: request(bytes),
            driver: one(bytes, &[DRIVER, DRIVER, DRIVER, "nic.example.com"]),
            pool: one(bytes, &[POOL, POOL, POOL, POOL, POOL, POOL, POOL, "node"]),
            device: one(bytes, &devices),
            admin_access: [None, Some(true), Some(true), Some(false)][bytes.below(4)],
            share_id: bytes.maybe(|bytes| one(bytes, &["", "s"])),
            consumed_capacity: Default::default(),
        };
        for capacity in result.share_id.iter().flat_map(|_| ["shares", "memory"]) {
            result.consumed_capacity.insert(capacity.to_owned(), one(bytes, &AMOUNTS));
        }
        allocation.devices.results.push(result);
    }
    for _ in 0..bytes.below(70) {
        allocation.devices.config.push(AllocatedConfig {
            source: one(bytes, &["FromClass", "FromClaim", "FromClaim", "FromNobody"]),
            requests: (0..bytes.below(3)).map(|_| request(bytes)).collect(),
            opaque: bytes.maybe(|bytes| OpaqueConfig {
                driver: one(bytes, &[DRIVER, DRIVER, "nic.example.com"]),
                parameters: parameters(bytes),
            }),
        });
    }
    claim
}

/// Parameters of NVIDIA's API; most values are allowed.
fn parameters(bytes: &mut Bytes<'_>) -> String {
    let kind = ["GpuConfig", "GpuConfig", "MigDeviceConfig", "Gpu\nConfig"][bytes.below(4)];
    let mut object = serde_json::json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": kind});
    let sharing = bytes.maybe(|bytes| {
        let strategy = ["TimeSlicing", "MPS", "\u{2028}"][bytes.below(3)];
        let mut sharing = serde_json::json!({"strategy": strategy});
        if bytes.below(2) == 1 {
            let interval = [Some("Default"), Some("Long"), Some("Ever"), None][bytes.below(4)];
            sharing["timeSlicingConfig"] = serde_json::json!({"interval": interval});
        }
        if bytes.below(4) == 1 {
            let threads = [serde_json::json!(bytes.any()), serde_json::json!(30), serde_json::Value::Null];
            let limit = [serde_json::json!("1500M"), serde_json::json!(bytes.any()), serde_json::json!("1Ei")];
            sharing["mpsConfig"] = serde_json::json!({
                "defaultActiveThreadPercentage": threads[bytes.below(3)],
                "defaultPerDevicePinnedMemoryLimit": {["0", "3", "x"][bytes.below(3)]: limit[bytes.below(3)]},
            });
        }
        sharing
    });
    if let Some(sharing) = sharing {
        object["sharing"] = sharing;
    }
    object.to_string()
}

pub fn checkpoint(bytes: &[u8]) {
    let record = match parse_checkpoint(bytes, UID) {
        Ok(record) => record,
        Err(error) => return assert_one_line(&error),
    };
    let text = record.text().expect("a checkpoint can be written");
    assert_eq!(parse_checkpoint(&text, UID).as_ref(), Ok(&record), "read back as another checkpoint");
    let (entry, devices) = (record.entry(None), &record.prepared.devices);
    assert_eq!(entry.claim.uid, UID);
    assert_eq!(entry.gpus().count(), devices.iter().filter(|device| !device.admin).count());
    assert!(!record.is_completed_in(None) && !record.is_of_another_boot(None), "an unknown boot is taken as known");
    let boot = record.boot.as_deref();
    assert!(!record.is_of_another_boot(boot), "a checkpoint is not of its own boot");
}
