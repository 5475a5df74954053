//! MIG devices made for claims: made, refused, destroyed, and left by a plugin that was killed in between.

mod late;

use std::fs;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use linkwise_core::claims::{ClaimName, MigOrder, MigOrderError, MigTask};
use linkwise_core::state::{Event, HealthPoll, NodeState, Reach};
use linkwise_core::topology::{MigCapabilities, MigDeviceObservation, MigExtension, MigPlacement, MigSlot, MigUuid};
use linkwise_host::machines;
use linkwise_kubelet::dra::{MigDone, MigRequest};
use linkwise_kubelet_box::dra::DraKubelet;
use tokio::sync::mpsc;

use super::node::{Answer, KIND, Node, StateCell, assert_refused, end, name, pod, restart, start, state, until};
use crate::dra::published::limits::mig_device;
use crate::dra::published::mig::{DEVICE, MACHINE};

/// The profile and placement of [`DEVICE`].
const SLOT: MigSlot = MigSlot { profile_id: 14, placement: MigPlacement { start: 2, size: 2 } };

/// 1g.10gb from memory slice 0, which does not overlap [`DEVICE`].
const OTHER: &str = "gpu-0-mig-1g10gb-19-0";
const APART: MigSlot = MigSlot { profile_id: 19, placement: MigPlacement { start: 0, size: 1 } };

/// The driver's behaviour when it gets an order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Behaviour {
    #[default]
    Obeys,
    /// Makes no device, and returns an error.
    Refuses,
    /// Destroys no device, because it is in use.
    InUse,
    /// Has lost the GPU: an order to destroy succeeds, and scans keep the instances that they saw last.
    Keeps,
    /// Hangs before it does anything.
    HangsBefore,
    /// Does what was ordered and hangs; no scan follows.
    HangsAfter,
    /// Does what was ordered and hangs after a scan.
    HangsSeen,
    /// Hangs, and does not list the devices either.
    Silent,
    /// Obeys; no scan follows.
    Late,
    /// Does what was ordered; then the agent dies.
    Dies,
}

/// A driver, its MIG devices, and the orders that it got.
struct Driver {
    instances: Vec<MigDeviceObservation>,
    orders: Vec<MigOrder>,
    behaviour: Behaviour,
    made: u32,
    done: u64,
    /// Orders on which the driver hangs.
    held: Vec<MigRequest>,
    state: StateCell,
}

type Shared = Arc<Mutex<Driver>>;

impl Driver {
    fn execute(&mut self, order: &MigOrder) -> Result<Vec<MigUuid>, MigOrderError> {
        let failed = |why: &str, may_exist| Err(MigOrderError { why: why.to_owned(), may_exist });
        match &order.task {
            MigTask::List => Ok(self.instances.iter().map(|instance| instance.uuid.clone()).collect()),
            MigTask::Make(slot) => {
                let is_taken = |instance: &MigDeviceObservation| {
                    instance.placement.is_some_and(|place| place.overlaps(slot.placement))
                };
                if self.behaviour == Behaviour::Refuses || self.instances.iter().any(is_taken) {
                    let why = "nvmlDeviceCreateGpuInstanceWithPlacement: NVML_ERROR_INSUFFICIENT_RESOURCES (23)";
                    return failed(why, false);
                }
                self.made += 1;
                let made = instance(&format!("MIG-made-{}", self.made), *slot);
                self.instances.push(made.clone());
                Ok(vec![made.uuid])
            }
            MigTask::Destroy(..) if self.behaviour == Behaviour::InUse => {
                failed("nvmlGpuInstanceDestroy: NVML_ERROR_IN_USE (19)", true)
            }
            MigTask::Destroy(..) if self.behaviour == Behaviour::Keeps => Ok(Vec::new()),
            MigTask::Destroy(slot, only) => {
                self.instances.retain(|instance| {
                    let is_there =
                        instance.profile_id == Some(slot.profile_id) && instance.placement == Some(slot.placement);
                    !is_there || only.as_ref().is_some_and(|only| instance.uuid != *only)
                });
                Ok(Vec::new())
            }
        }
    }

    /// Executes an order, and counts it if it succeeds.
    fn carry_out(&mut self, order: &MigOrder) -> Result<MigDone, MigOrderError> {
        let devices = self.execute(order)?;
        self.done += 1;
        Ok(MigDone { devices, number: self.done })
    }

    /// Scans the GPU: the node's state gets the driver's MIG devices and the number of executed orders.
    fn scan(&self) {
        let mut observed = machines::load(MACHINE).unwrap().observed;
        observed.gpus[0].mig.as_mut().unwrap().devices = self.instances.clone();
        observed.mig_orders = self.done;
        let before = NodeState::clone(&self.state.borrow());
        let after = before.apply(Event::Observed(Box::new(observed)), Duration::from_secs(1)).0;
        self.state.send_replace(Arc::new(after));
    }
}

/// A MIG device that has all of its GPU instance.
fn instance(uuid: &str, slot: MigSlot) -> MigDeviceObservation {
    let machine = machines::load(MACHINE).unwrap().observed;
    let mig = machine.gpus[0].mig.clone().unwrap();
    let profile = mig.profiles.iter().find(|profile| profile.id == slot.profile_id).unwrap();
    let first = slot.placement.start;
    MigDeviceObservation {
        uuid: uuid.parse().unwrap(),
        gpu_instance: 1 + first,
        memory_mib: profile.memory_mib,
        extension: Some(MigExtension::of_profile(profile.number)),
        engines: Some(profile.engines),
        capabilities: Some(MigCapabilities { gpu_instance: 10 + first, compute_instance: 20 + first }),
        ..mig_device(first, profile.gpu_slices, slot.profile_id, slot.placement)
    }
}

/// A node with such a driver, before its plugin is started.
fn node() -> (Node, Shared) {
    let mut node = Node::new();
    node.state.send_replace(Arc::new(state(MACHINE)));
    node.settings.makes_mig = true;
    let (mig, mut requests) = mpsc::channel::<MigRequest>(16);
    node.settings.mig = Some(mig);
    let (instances, orders, held) = Default::default();
    let driver =
        Driver { instances, orders, behaviour: Behaviour::Obeys, made: 0, done: 0, held, state: node.state.clone() };
    let driver = Arc::new(Mutex::new(driver));
    let (shared, cdi, snapshot) = (Arc::clone(&driver), node.cdi.clone(), node.state.subscribe());
    tokio::spawn(async move {
        while let Some(request) = requests.recv().await {
            let mut driver = shared.lock().unwrap();
            driver.orders.push(request.order.clone());
            let spares_lists = !matches!(driver.behaviour, Behaviour::Silent | Behaviour::Late);
            let obeys = spares_lists && request.order.task == MigTask::List;
            let behaviour = if obeys { Behaviour::Obeys } else { driver.behaviour };
            if matches!(behaviour, Behaviour::HangsBefore | Behaviour::Silent) {
                driver.held.push(request);
                continue;
            }
            let result = driver.carry_out(&request.order);
            if matches!(behaviour, Behaviour::HangsAfter | Behaviour::Dies) {
                if behaviour == Behaviour::HangsAfter {
                    driver.held.push(request);
                }
                continue;
            }
            if behaviour != Behaviour::Late {
                driver.scan();
            }
            // A scan of the host follows the agent's scan.
            cdi.send_replace(Some(Arc::new(super::node::cdi_devices(&snapshot.borrow()))));
            if behaviour == Behaviour::HangsSeen {
                driver.held.push(request);
            } else {
                let _ = request.answer.send(result);
            }
        }
    });
    (node, driver)
}

/// A node whose claim `a` has [`DEVICE`], its driver and its kubelet.
struct Prepared {
    node: Node,
    driver: Shared,
    kubelet: DraKubelet,
    claim: ClaimName,
}

async fn prepared() -> Prepared {
    let (mut node, driver) = node();
    let kubelet = node.serve().await;
    let claim = node.claim("a", &[("gpus", DEVICE)]);
    assert_eq!(start(&kubelet, &claim).await.unwrap(), [format!("{KIND}=MIG-made-1")]);
    Prepared { node, driver, kubelet, claim }
}

/// Sets the driver's MIG devices, and scans.
fn set_instances(driver: &Shared, instances: Vec<MigDeviceObservation>) {
    let mut driver = driver.lock().unwrap();
    driver.instances = instances;
    driver.scan();
}

/// Lets the driver obey new orders, and drops those on which it hangs.
fn recover(driver: &Shared) {
    let mut driver = driver.lock().unwrap();
    driver.behaviour = Behaviour::Obeys;
    driver.held.clear();
}

fn assert_nothing_left(node: &Node, driver: &Shared) {
    assert_eq!((instances(driver).len(), node.checkpoints().len()), (0, 0));
}

fn instances(driver: &Shared) -> Vec<String> {
    driver.lock().unwrap().instances.iter().map(|instance| instance.uuid.to_string()).collect()
}

/// The orders to make and to destroy devices.
fn orders(driver: &Shared) -> Vec<MigTask> {
    let driver = driver.lock().unwrap();
    driver.orders.iter().map(|order| order.task.clone()).filter(|task| *task != MigTask::List).collect()
}

fn set_behaviour(driver: &Shared, behaviour: Behaviour) {
    driver.lock().unwrap().behaviour = behaviour;
}

/// Starts a pod with the claim `a`, and kills the plugin in the middle of the order.
async fn kill_during_order(node: &mut Node, driver: &Shared, behaviour: Behaviour) {
    set_behaviour(driver, behaviour);
    let kubelet = node.serve().await;
    node.claim("a", &[("gpus", DEVICE)]);
    let starting = tokio::spawn({
        let claim = pod(&name("a"));
        async move {
            let _ = kubelet.start_pod(&claim).await;
            kubelet.stop().await;
        }
    });
    let hangs = || !driver.lock().unwrap().held.is_empty();
    until(|| !orders(driver).is_empty() && (behaviour != Behaviour::HangsSeen || hangs())).await;
    node.kill().await;
    starting.abort();
    let _ = starting.await;
    recover(driver);
}

#[tokio::test]
async fn mig_device_is_made_and_destroyed() {
    let (mut node, driver) = node();
    let kubelet = node.serve().await;
    let claim = node.claim("a", &[("gpus", DEVICE), ("gpus", OTHER)]);
    let devices = start(&kubelet, &claim).await.unwrap();
    assert_eq!(devices, [format!("{KIND}=MIG-made-1"), format!("{KIND}=MIG-made-2")]);
    assert_eq!(instances(&driver), ["MIG-made-1", "MIG-made-2"]);
    let text = node.checkpoint_text("a");
    assert!(text.contains("\"Completed\"") && text.contains("\"profileId\": 14"), "{text}");
    end(&kubelet, &claim).await;
    assert_nothing_left(&node, &driver);
    let uuid = |number| Some(format!("MIG-made-{number}").parse().unwrap());
    let expected =
        [MigTask::Make(SLOT), MigTask::Make(APART), MigTask::Destroy(SLOT, uuid(1)), MigTask::Destroy(APART, uuid(2))];
    assert_eq!(orders(&driver), expected);
    let is_gpu_0 = |order: &MigOrder| order.gpu.as_str() == "GPU-00000000-0000-0000-0000-000000000000";
    assert!(driver.lock().unwrap().orders.iter().all(is_gpu_0));
}

#[tokio::test]
async fn refused_placement_fails_the_claim() {
    let (mut node, driver) = node();
    set_behaviour(&driver, Behaviour::Refuses);
    let kubelet = node.serve().await;
    let claim = node.claim("a", &[("gpus", DEVICE)]);
    let parts = [DEVICE, "profile 14, memory slices from 2", "NVML_ERROR_INSUFFICIENT_RESOURCES (23)"];
    assert_refused(&kubelet, &claim, &parts).await;
    assert_eq!((node.checkpoints().len(), instances(&driver).len()), (0, 0));
    // No order to destroy follows, because the device there may be someone else's.
    assert!(orders(&driver).iter().all(|task| *task == MigTask::Make(SLOT)), "{:?}", orders(&driver));
    set_behaviour(&driver, Behaviour::Obeys);
    assert_eq!(start(&kubelet, &claim).await.unwrap(), [format!("{KIND}=MIG-made-1")]);
}

#[tokio::test]
async fn first_device_is_destroyed_if_the_second_is_refused() {
    let (mut node, driver) = node();
    // An instance that no scan has found yet blocks the second device.
    let hidden = instance("MIG-hidden", APART);
    let kubelet = node.serve().await;
    let before = node.started_claim(&kubelet, "before", &[("gpus", DEVICE)]).await;
    end(&kubelet, &before).await;
    driver.lock().unwrap().instances.push(hidden);
    let claim = node.claim("a", &[("gpus", DEVICE), ("gpus", OTHER)]);
    assert_refused(&kubelet, &claim, &[OTHER, "INSUFFICIENT_RESOURCES"]).await;
    assert_eq!((instances(&driver), node.checkpoints().len()), (vec!["MIG-hidden".to_owned()], 0));
}

#[tokio::test]
async fn device_in_use_stays_until_unprepare_succeeds() {
    let Prepared { node, driver, kubelet, claim } = prepared().await;
    set_behaviour(&driver, Behaviour::InUse);
    let error = format!("{:?}", kubelet.stop_pod(&pod(&claim).pod).await.unwrap_err());
    assert!(error.contains(DEVICE) && error.contains("NVML_ERROR_IN_USE (19)"), "{error}");
    assert_eq!((instances(&driver).len(), node.checkpoints().len()), (1, 1));
    let other = node.claim("b", &[("gpus", "gpu-0-mig-1g10gb-19-3")]);
    assert_refused(&kubelet, &other, &["is prepared for the claim ml/claim-a"]).await;
    set_behaviour(&driver, Behaviour::Obeys);
    end(&kubelet, &claim).await;
    assert_nothing_left(&node, &driver);
}

#[tokio::test]
async fn plugin_killed_while_making_makes_one_device() {
    for behaviour in [Behaviour::HangsBefore, Behaviour::HangsAfter, Behaviour::HangsSeen] {
        let (mut node, driver) = node();
        kill_during_order(&mut node, &driver, behaviour).await;
        let kubelet = node.serve().await;
        let claim = name("a");
        let devices = start(&kubelet, &claim).await.unwrap();
        let made = instances(&driver);
        assert_eq!(devices, [format!("{KIND}={}", made[0])], "{behaviour:?}");
        assert_eq!(made.len(), 1, "{behaviour:?}");
        end(&kubelet, &claim).await;
        assert_nothing_left(&node, &driver);
    }
}

#[tokio::test]
async fn device_of_a_begun_claim_is_destroyed_at_start() {
    for behaviour in [Behaviour::HangsAfter, Behaviour::HangsSeen] {
        let (mut node, driver) = node();
        kill_during_order(&mut node, &driver, behaviour).await;
        assert_eq!(instances(&driver).len(), 1, "{behaviour:?}");
        // The plugin has neither an API server nor a kubelet.
        node.set_answer("a", Answer::Failed);
        node.start();
        until(|| instances(&driver).is_empty() && node.checkpoints().is_empty()).await;
    }
}

/// A pod may use a begun claim: Prepare begins claims of an earlier boot again.
#[tokio::test]
async fn begun_claim_is_prepared_after_dra_is_off() {
    let (mut node, driver) = node();
    kill_during_order(&mut node, &driver, Behaviour::HangsAfter).await;
    node.settings.serves = false;
    let kubelet = node.serve().await;
    let devices = start(&kubelet, &name("a")).await.unwrap();
    assert_eq!(devices, instances(&driver).iter().map(|uuid| format!("{KIND}={uuid}")).collect::<Vec<_>>());
    end(&kubelet, &name("a")).await;
    assert_nothing_left(&node, &driver);
}

#[tokio::test]
async fn device_is_destroyed_after_a_kill_in_unprepare() {
    for behaviour in [Behaviour::HangsBefore, Behaviour::HangsAfter, Behaviour::HangsSeen] {
        let Prepared { mut node, driver, kubelet, claim } = prepared().await;
        set_behaviour(&driver, behaviour);
        let ending = tokio::spawn(async move {
            let _ = kubelet.stop_pod(&pod(&name("a")).pod).await;
            kubelet.stop().await;
        });
        until(|| !driver.lock().unwrap().held.is_empty()).await;
        node.kill().await;
        ending.abort();
        let _ = ending.await;
        recover(&driver);
        let kubelet = node.serve().await;
        // The kubelet unprepares only claims that it tried to prepare; this attempt may fail.
        let _ = kubelet.start_pod(&pod(&claim)).await;
        end(&kubelet, &claim).await;
        assert_nothing_left(&node, &driver);
    }
}

#[tokio::test]
async fn order_lost_with_the_agent_makes_one_device() {
    let (mut node, driver) = node();
    let kubelet = node.serve().await;
    let claim = node.claim("a", &[("gpus", DEVICE)]);
    set_behaviour(&driver, Behaviour::Dies);
    assert_refused(&kubelet, &claim, &["ended before it answered"]).await;
    // The order to destroy the device was lost too, so the next Prepare repeats it first.
    set_behaviour(&driver, Behaviour::Obeys);
    let devices = start(&kubelet, &claim).await.unwrap();
    assert_eq!(devices, [format!("{KIND}={}", instances(&driver)[0])]);
    assert_eq!(instances(&driver).len(), 1);
}

#[tokio::test]
async fn device_is_made_again_after_a_reboot() {
    let Prepared { mut node, driver, kubelet, claim } = prepared().await;
    node.crash(&kubelet).await;
    // MIG devices do not survive the reboot.
    set_instances(&driver, Vec::new());
    node.settings.boot = Some("the next boot".to_owned());
    let kubelet = node.serve().await;
    assert_eq!(start(&kubelet, &claim).await.unwrap(), [format!("{KIND}=MIG-made-2")]);
    end(&kubelet, &claim).await;
    assert_nothing_left(&node, &driver);
}

#[tokio::test]
async fn refusal_after_a_reboot_leaves_no_begun_claim() {
    let Prepared { mut node, driver, kubelet, claim } = prepared().await;
    node.crash(&kubelet).await;
    set_instances(&driver, Vec::new());
    node.settings.boot = Some("the next boot".to_owned());
    set_behaviour(&driver, Behaviour::Refuses);
    let kubelet = node.serve().await;
    assert_refused(&kubelet, &claim, &["NVML_ERROR_INSUFFICIENT_RESOURCES"]).await;
    node.crash(&kubelet).await;
    set_instances(&driver, vec![instance("MIG-of-an-administrator", SLOT)]);
    node.delete("a");
    node.settings.sweep = Duration::from_millis(1);
    node.start();
    until(|| node.checkpoints().is_empty()).await;
    assert_eq!(instances(&driver), ["MIG-of-an-administrator"]);
}

#[tokio::test]
async fn claim_on_a_lost_gpu_is_unprepared() {
    let Prepared { node, driver, kubelet, claim } = prepared().await;
    set_behaviour(&driver, Behaviour::Keeps);
    let gpu = node.state.borrow().topology().gpus()[0].uuid.clone();
    let lost = HealthPoll { reach: Reach::Lost { call: "nvmlDeviceGetUUID".to_owned() }, ..HealthPoll::default() };
    node.apply(Event::Polled([(gpu, lost)].into()));
    end(&kubelet, &claim).await;
    assert_eq!((instances(&driver).len(), node.checkpoints().len()), (1, 0));
}

#[tokio::test]
async fn device_of_another_boot_is_not_destroyed() {
    let Prepared { mut node, driver, kubelet, .. } = prepared().await;
    node.crash(&kubelet).await;
    // An administrator made an equal device after the reboot, and the driver may give it the same UUID.
    set_instances(&driver, vec![instance("MIG-made-1", SLOT)]);
    node.settings.boot = Some("the next boot".to_owned());
    node.delete("a");
    node.settings.sweep = Duration::from_millis(1);
    node.start();
    until(|| node.checkpoints().is_empty()).await;
    assert_eq!(instances(&driver), ["MIG-made-1"]);
}

#[tokio::test]
async fn device_of_an_administrator_is_left_alone() {
    let (mut node, driver) = node();
    set_instances(&driver, vec![instance("MIG-of-admin", SLOT)]);
    node.scan();
    let kubelet = node.serve().await;
    let claim = node.claim("a", &[("gpus", DEVICE)]);
    assert_eq!(start(&kubelet, &claim).await.unwrap(), [format!("{KIND}=MIG-of-admin")]);
    let over = node.claim("b", &[("gpus", "gpu-0-mig-3g40gb-9-0")]);
    assert_refused(&kubelet, &over, &["MIG-of-admin is in its place"]).await;
    end(&kubelet, &claim).await;
    assert_eq!((instances(&driver), orders(&driver)), (vec!["MIG-of-admin".to_owned()], Vec::new()));
}

#[tokio::test]
async fn remade_device_gives_its_claim_no_old_nodes() {
    let (mut node, driver) = node();
    let make = |uuid: &str, node: &Node| {
        set_instances(&driver, vec![instance(uuid, SLOT)]);
        node.scan();
    };
    make("MIG-of-admin", &node);
    let kubelet = node.serve().await;
    let claim = node.claim("a", &[("gpus", DEVICE)]);
    assert_eq!(start(&kubelet, &claim).await.unwrap(), [format!("{KIND}=MIG-of-admin")]);
    // The device is destroyed, as the driver allows while no process uses it. Its device nodes may be reused.
    set_instances(&driver, Vec::new());
    node.scan();
    until(|| node.claim_specs().is_empty()).await;
    make("MIG-made-again", &node);
    restart(&kubelet).await;
    assert_eq!(start(&kubelet, &claim).await.unwrap(), [format!("{KIND}=MIG-made-again")]);
}

#[tokio::test]
async fn device_made_after_the_last_scan_keeps_its_spec() {
    let Prepared { mut node, driver, kubelet, claim } = prepared().await;
    let (mig_specs, whole) = (node.claim_specs(), node.claim("b", &[("gpus", "gpu-1")]));
    start(&kubelet, &whole).await.unwrap();
    node.crash(&kubelet).await;
    // The process that takes over scanned the GPUs before the claim's device was made.
    let made = std::mem::take(&mut driver.lock().unwrap().instances);
    driver.lock().unwrap().scan();
    driver.lock().unwrap().instances = made;
    set_behaviour(&driver, Behaviour::Silent);
    node.start();
    until(|| driver.lock().unwrap().orders.last().is_some_and(|order| order.task == MigTask::List)).await;
    // Once the other claim's spec has been written again twice, each spec has been renewed.
    for _ in 0..2 {
        let other = node.claim_specs().into_iter().find(|name| !mig_specs.contains(name)).unwrap();
        fs::remove_file(node.settings.cdi_folder.join(&other)).unwrap();
        node.scan();
        until(|| node.claim_specs().contains(&other)).await;
    }
    assert!(node.claim_specs().contains(&mig_specs[0]), "{:?}", node.claim_specs());
    recover(&driver);
    let kubelet = node.kubelet().await;
    assert_eq!(start(&kubelet, &claim).await.unwrap(), [format!("{KIND}=MIG-made-1")]);
    end(&kubelet, &claim).await;
    assert_eq!((instances(&driver).len(), node.claim_specs().len()), (0, 1));
}

/// The destroyed device was in the place of the claim's, or in a part of it.
#[tokio::test]
async fn device_destroyed_after_last_scan_blocks_no_claim() {
    for destroyed in [SLOT, MigSlot { profile_id: 19, placement: MigPlacement { start: 2, size: 1 } }] {
        let (mut node, driver) = node();
        // The previous process destroyed the device after the last scan.
        set_instances(&driver, vec![instance("MIG-of-an-ended-claim", destroyed)]);
        driver.lock().unwrap().instances.clear();
        node.scan();
        let claim = node.claim("a", &[("gpus", DEVICE)]);
        let kubelet = node.serve().await;
        assert_eq!(start(&kubelet, &claim).await.unwrap(), [format!("{KIND}=MIG-made-1")]);
    }
}

#[tokio::test]
async fn unreadable_checkpoint_keeps_device_until_unprepare() {
    let Prepared { mut node, driver, kubelet, claim } = prepared().await;
    node.halt(&kubelet).await;
    node.edit_checkpoint("a", |text| text.replace("\"version\": 1", "\"version\": 7"));
    node.settings.sweep = Duration::from_millis(1);
    node.serve_again(&kubelet).await;
    assert_refused(&kubelet, &node.claim("b", &[("gpus", DEVICE)]), &["is prepared for the claim ml/claim-a"]).await;
    let reads = node.reads("a");
    until(|| node.reads("a") > reads + 2).await;
    assert_eq!((instances(&driver).len(), node.checkpoints()), (1, vec!["a.json".to_owned()]));
    end(&kubelet, &claim).await;
    assert_nothing_left(&node, &driver);
}

#[tokio::test]
async fn claim_over_another_claims_device_is_refused() {
    let Prepared { node, driver, kubelet, .. } = prepared().await;
    for device in [DEVICE, "gpu-0-mig-1g20gb-15-2", "gpu-0-mig-7g80gb-0-0"] {
        let over = node.claim("b", &[("gpus", device)]);
        assert_refused(&kubelet, &over, &["is prepared for the claim ml/claim-a"]).await;
    }
    let both = node.claim("c", &[("gpus", OTHER), ("gpus", "gpu-0-mig-1g10gb-me-20-0")]);
    assert_refused(&kubelet, &both, &["shares hardware with another device of the same claim"]).await;
    assert_eq!(instances(&driver).len(), 1);
}

#[tokio::test]
async fn made_device_is_destroyed_with_the_setting_off() {
    let Prepared { mut node, driver, kubelet, claim } = prepared().await;
    node.halt(&kubelet).await;
    node.settings.makes_mig = false;
    let kubelet = node.serve().await;
    assert_eq!(start(&kubelet, &claim).await.unwrap(), [format!("{KIND}=MIG-made-1")]);
    end(&kubelet, &claim).await;
    assert_nothing_left(&node, &driver);
}

#[tokio::test]
async fn nothing_is_made_without_setting_or_boot_id() {
    for (makes_mig, boot, words) in
        [(false, Some("this boot"), "there is no device"), (true, None, "the boot ID is unknown")]
    {
        let (mut node, driver) = node();
        (node.settings.makes_mig, node.settings.boot) = (makes_mig, boot.map(str::to_owned));
        let kubelet = node.serve().await;
        assert_refused(&kubelet, &node.claim("a", &[("gpus", DEVICE)]), &[words]).await;
        assert_eq!((orders(&driver).len(), node.checkpoints().len()), (0, 0), "{words}");
    }
}

/// The driver refuses every order of a pod that lacks the rights for MIG.
#[tokio::test]
async fn undestroyable_device_is_left_once_dra_is_off() {
    let Prepared { mut node, driver, kubelet, .. } = prepared().await;
    node.halt(&kubelet).await;
    node.apply(Event::Planned(Box::default()));
    node.kubelet_lists(&[]);
    (node.settings.read_claim, node.settings.serves) = (None, false);
    set_behaviour(&driver, Behaviour::InUse);
    node.start();
    node.log.wait(&["cleanup of a finished claim is incomplete", DEVICE]).await;
    until(|| node.checkpoints().is_empty()).await;
    assert_eq!(instances(&driver).len(), 1, "the device is gone");
}
