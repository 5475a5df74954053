//! MIG devices made for claims: made, refused, destroyed, and what is left where the plugin is killed between.

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

use super::node::{Answer, KIND, Node, States, end, is_refused, name, pod, restarted, start, state, until};

/// GPU 0 in MIG mode, without instances.
const MACHINE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/lab/fake-nvml/machines/mig-on-demand.yaml");

/// 2g.20gb from memory slice 2.
const DEVICE: &str = "gpu-0-mig-2g20gb-14-2";
const SLOT: MigSlot = MigSlot { profile_id: 14, placement: MigPlacement { start: 2, size: 2 } };

/// 1g.10gb from memory slice 0, which is apart from it.
const OTHER: &str = "gpu-0-mig-1g10gb-19-0";
const APART: MigSlot = MigSlot { profile_id: 19, placement: MigPlacement { start: 0, size: 1 } };

/// What the driver does with the next order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Mood {
    #[default]
    Obeys,
    /// It makes nothing, with a code.
    Refuses,
    /// The device is in use.
    InUse,
    /// The GPU is lost: the driver has no instances of it, and scans keep what they saw last.
    Keeps,
    /// It never answers, before it does anything.
    HangsBefore,
    /// It never answers, after it did what was ordered; no scan follows.
    HangsAfter,
    /// It never answers, after it did what was ordered and a scan found that.
    HangsSeen,
    /// It does not even answer a question.
    Silent,
    /// It obeys, and no scan follows.
    Late,
    /// The agent dies, after it did what was ordered.
    Dies,
}

/// A driver: its instances, and what was ordered.
struct Driver {
    instances: Vec<MigDeviceObservation>,
    orders: Vec<MigOrder>,
    mood: Mood,
    made: u32,
    done: u64,
    /// Orders that are never answered.
    held: Vec<MigRequest>,
    state: States,
}

type Shared = Arc<Mutex<Driver>>;

impl Driver {
    fn obey(&mut self, order: &MigOrder) -> Result<Vec<MigUuid>, MigOrderError> {
        let failed = |why: &str, may_exist| Err(MigOrderError { why: why.to_owned(), may_exist });
        match &order.task {
            MigTask::List => Ok(self.instances.iter().map(|instance| instance.uuid.clone()).collect()),
            MigTask::Make(slot) => {
                let is_taken = |instance: &MigDeviceObservation| {
                    instance.placement.is_some_and(|place| place.overlaps(slot.placement))
                };
                if self.mood == Mood::Refuses || self.instances.iter().any(is_taken) {
                    let why = "nvmlDeviceCreateGpuInstanceWithPlacement: NVML_ERROR_INSUFFICIENT_RESOURCES (23)";
                    return failed(why, false);
                }
                self.made += 1;
                let made = instance(&format!("MIG-made-{}", self.made), *slot);
                self.instances.push(made.clone());
                Ok(vec![made.uuid])
            }
            MigTask::Destroy(..) if self.mood == Mood::InUse => {
                failed("nvmlGpuInstanceDestroy: NVML_ERROR_IN_USE (19)", true)
            }
            MigTask::Destroy(..) if self.mood == Mood::Keeps => Ok(Vec::new()),
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

    /// Does what is ordered, and numbers it.
    fn carry_out(&mut self, order: &MigOrder) -> Result<MigDone, MigOrderError> {
        let devices = self.obey(order)?;
        self.done += 1;
        Ok(MigDone { devices, number: self.done })
    }

    /// What a scan finds.
    fn scan(&self) {
        let mut observed = machines::load(MACHINE).unwrap().observed;
        observed.gpus[0].mig.as_mut().unwrap().devices = self.instances.clone();
        observed.mig_orders = self.done;
        let before = NodeState::clone(&self.state.borrow());
        let after = before.apply(Event::Observed(Box::new(observed)), Duration::from_secs(1)).0;
        self.state.send_replace(Arc::new(after));
    }
}

/// A MIG device that has all of an instance.
fn instance(uuid: &str, slot: MigSlot) -> MigDeviceObservation {
    let machine = machines::load(MACHINE).unwrap().observed;
    let mig = machine.gpus[0].mig.clone().unwrap();
    let kind = mig.profiles.iter().find(|profile| profile.id == slot.profile_id).unwrap();
    MigDeviceObservation {
        index: slot.placement.start,
        uuid: uuid.parse().unwrap(),
        gpu_instance: 1 + slot.placement.start,
        compute_instance: 0,
        gpu_slices: kind.gpu_slices,
        compute_slices: kind.gpu_slices,
        memory_mib: kind.memory_mib,
        profile_id: Some(slot.profile_id),
        placement: Some(slot.placement),
        extension: Some(MigExtension::of_profile(kind.number)),
        engines: Some(kind.engines),
        capabilities: Some(MigCapabilities {
            gpu_instance: 10 + slot.placement.start,
            compute_instance: 20 + slot.placement.start,
        }),
    }
}

/// A node with such a driver, its plugin not started.
fn node() -> (Node, Shared) {
    let mut node = Node::new();
    node.state.send_replace(Arc::new(state(MACHINE)));
    node.settings.makes_mig = true;
    let (mig, mut requests) = mpsc::channel::<MigRequest>(16);
    node.settings.mig = Some(mig);
    let (instances, orders, held) = Default::default();
    let driver = Driver { instances, orders, mood: Mood::Obeys, made: 0, done: 0, held, state: node.state.clone() };
    let driver = Arc::new(Mutex::new(driver));
    let (shared, cdi, snapshot) = (Arc::clone(&driver), node.cdi.clone(), node.state.subscribe());
    tokio::spawn(async move {
        while let Some(request) = requests.recv().await {
            let mut driver = shared.lock().unwrap();
            driver.orders.push(request.order.clone());
            let mood = if request.order.task == MigTask::List && ![Mood::Silent, Mood::Late].contains(&driver.mood) {
                Mood::Obeys
            } else {
                driver.mood
            };
            if matches!(mood, Mood::HangsBefore | Mood::Silent) {
                driver.held.push(request);
                continue;
            }
            let result = driver.carry_out(&request.order);
            if matches!(mood, Mood::HangsAfter | Mood::Dies) {
                if mood == Mood::HangsAfter {
                    driver.held.push(request);
                }
                continue;
            }
            if mood != Mood::Late {
                driver.scan();
            }
            // As the agent's other task does.
            cdi.send_replace(Some(Arc::new(super::node::cdi_devices(&snapshot.borrow()))));
            if mood == Mood::HangsSeen {
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

/// The driver has these instances from now on, and a scan finds them.
fn finds(driver: &Shared, instances: Vec<MigDeviceObservation>) {
    let mut driver = driver.lock().unwrap();
    driver.instances = instances;
    driver.scan();
}

/// The driver answers again, and none of the orders before.
fn obeys(driver: &Shared) {
    let mut driver = driver.lock().unwrap();
    driver.mood = Mood::Obeys;
    driver.held.clear();
}

/// Checks that nothing is left of any claim.
fn is_over(node: &Node, driver: &Shared) {
    assert_eq!((instances(driver).len(), node.checkpoints().len()), (0, 0));
}

fn instances(driver: &Shared) -> Vec<String> {
    driver.lock().unwrap().instances.iter().map(|instance| instance.uuid.to_string()).collect()
}

/// The orders but the questions for the devices that there are.
fn orders(driver: &Shared) -> Vec<MigTask> {
    let driver = driver.lock().unwrap();
    driver.orders.iter().map(|order| order.task.clone()).filter(|task| *task != MigTask::List).collect()
}

fn set(driver: &Shared, mood: Mood) {
    driver.lock().unwrap().mood = mood;
}

/// A pod of the claim is started, and the plugin killed in the middle of the order.
async fn killed_in(node: &mut Node, driver: &Shared, mood: Mood) {
    set(driver, mood);
    let kubelet = node.serve().await;
    node.claim("a", &[("gpus", DEVICE)]);
    let starting = tokio::spawn({
        let claim = pod(&name("a"));
        async move {
            let _ = kubelet.start_pod(&claim).await;
            kubelet.stop().await;
        }
    });
    until(|| !orders(driver).is_empty() && (mood != Mood::HangsSeen || !driver.lock().unwrap().held.is_empty())).await;
    node.kill().await;
    starting.abort();
    let _ = starting.await;
    obeys(driver);
}

#[tokio::test]
async fn mig_device_is_made_and_destroyed() {
    let (mut node, driver) = node();
    let kubelet = node.serve().await;
    let claim = node.claim("a", &[("gpus", DEVICE), ("gpus", OTHER)]);
    let devices = start(&kubelet, &claim).await.unwrap();
    assert_eq!(devices, [format!("{KIND}=MIG-made-1"), format!("{KIND}=MIG-made-2")]);
    assert_eq!(instances(&driver), ["MIG-made-1", "MIG-made-2"]);
    let text = node.kept("a");
    assert!(text.contains("\"Completed\"") && text.contains("\"profileId\": 14"), "{text}");
    end(&kubelet, &claim).await;
    is_over(&node, &driver);
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
    set(&driver, Mood::Refuses);
    let kubelet = node.serve().await;
    let claim = node.claim("a", &[("gpus", DEVICE)]);
    let parts = [DEVICE, "profile 14, memory slices from 2", "NVML_ERROR_INSUFFICIENT_RESOURCES (23)"];
    is_refused(&kubelet, &claim, &parts).await;
    assert_eq!((node.checkpoints().len(), instances(&driver).len()), (0, 0));
    // What was not made is not destroyed: it may be somebody else's.
    assert!(orders(&driver).iter().all(|task| *task == MigTask::Make(SLOT)), "{:?}", orders(&driver));
    set(&driver, Mood::Obeys);
    assert_eq!(start(&kubelet, &claim).await.unwrap(), [format!("{KIND}=MIG-made-1")]);
}

#[tokio::test]
async fn first_device_is_destroyed_if_the_second_is_refused() {
    let (mut node, driver) = node();
    // An instance that no scan has found yet is in the way of the second.
    let hidden = instance("MIG-hidden", APART);
    let kubelet = node.serve().await;
    let before = node.given(&kubelet, "before", &[("gpus", DEVICE)]).await;
    end(&kubelet, &before).await;
    driver.lock().unwrap().instances.push(hidden);
    let claim = node.claim("a", &[("gpus", DEVICE), ("gpus", OTHER)]);
    is_refused(&kubelet, &claim, &[OTHER, "INSUFFICIENT_RESOURCES"]).await;
    assert_eq!((instances(&driver), node.checkpoints().len()), (vec!["MIG-hidden".to_owned()], 0));
}

#[tokio::test]
async fn device_in_use_stays_until_unprepare_succeeds() {
    let Prepared { node, driver, kubelet, claim } = prepared().await;
    set(&driver, Mood::InUse);
    let error = format!("{:?}", kubelet.stop_pod(&pod(&claim).pod).await.unwrap_err());
    assert!(error.contains(DEVICE) && error.contains("NVML_ERROR_IN_USE (19)"), "{error}");
    assert_eq!((instances(&driver).len(), node.checkpoints().len()), (1, 1));
    // Nobody else gets it meanwhile.
    let other = node.claim("b", &[("gpus", "gpu-0-mig-1g10gb-19-3")]);
    is_refused(&kubelet, &other, &["is prepared for the claim ml/claim-a"]).await;
    set(&driver, Mood::Obeys);
    end(&kubelet, &claim).await;
    is_over(&node, &driver);
}

#[tokio::test]
async fn plugin_killed_while_making_makes_one_device() {
    for mood in [Mood::HangsBefore, Mood::HangsAfter, Mood::HangsSeen] {
        let (mut node, driver) = node();
        killed_in(&mut node, &driver, mood).await;
        let kubelet = node.serve().await;
        let claim = name("a");
        let devices = start(&kubelet, &claim).await.unwrap();
        let made = instances(&driver);
        assert_eq!(devices, [format!("{KIND}={}", made[0])], "{mood:?}");
        assert_eq!(made.len(), 1, "{mood:?}");
        end(&kubelet, &claim).await;
        is_over(&node, &driver);
    }
}

#[tokio::test]
async fn half_made_device_is_destroyed_at_the_next_start() {
    for mood in [Mood::HangsAfter, Mood::HangsSeen] {
        let (mut node, driver) = node();
        killed_in(&mut node, &driver, mood).await;
        assert_eq!(instances(&driver).len(), 1, "{mood:?}");
        // The API server is away, and no kubelet asks.
        node.set("a", Answer::Failed);
        node.start();
        until(|| instances(&driver).is_empty() && node.checkpoints().is_empty()).await;
    }
}

/// Its pod may run: then it was prepared before a reboot.
#[tokio::test]
async fn begun_claim_is_prepared_after_dra_is_off() {
    let (mut node, driver) = node();
    killed_in(&mut node, &driver, Mood::HangsAfter).await;
    node.settings.serves = false;
    let kubelet = node.serve().await;
    let devices = start(&kubelet, &name("a")).await.unwrap();
    assert_eq!(devices, instances(&driver).iter().map(|uuid| format!("{KIND}={uuid}")).collect::<Vec<_>>());
    end(&kubelet, &name("a")).await;
    is_over(&node, &driver);
}

#[tokio::test]
async fn device_is_destroyed_after_a_kill_in_unprepare() {
    for mood in [Mood::HangsBefore, Mood::HangsAfter, Mood::HangsSeen] {
        let Prepared { mut node, driver, kubelet, claim } = prepared().await;
        set(&driver, mood);
        let ending = tokio::spawn(async move {
            let _ = kubelet.stop_pod(&pod(&name("a")).pod).await;
            kubelet.stop().await;
        });
        until(|| !driver.lock().unwrap().held.is_empty()).await;
        node.kill().await;
        ending.abort();
        let _ = ending.await;
        obeys(&driver);
        let kubelet = node.serve().await;
        // It learns of the claim by starting its pod; whether that works is all the same.
        let _ = kubelet.start_pod(&pod(&claim)).await;
        end(&kubelet, &claim).await;
        is_over(&node, &driver);
    }
}

#[tokio::test]
async fn agent_death_during_an_order_leaves_nothing() {
    let (mut node, driver) = node();
    let kubelet = node.serve().await;
    let claim = node.claim("a", &[("gpus", DEVICE)]);
    set(&driver, Mood::Dies);
    is_refused(&kubelet, &claim, &["ended before it answered"]).await;
    // The order to destroy it was lost too: it is repeated before anything else is tried.
    set(&driver, Mood::Obeys);
    let devices = start(&kubelet, &claim).await.unwrap();
    assert_eq!(devices, [format!("{KIND}={}", instances(&driver)[0])]);
    assert_eq!(instances(&driver).len(), 1);
}

#[tokio::test]
async fn device_is_made_again_after_a_reboot() {
    let Prepared { mut node, driver, kubelet, claim } = prepared().await;
    node.crash(&kubelet).await;
    // Instances do not outlive it.
    finds(&driver, Vec::new());
    node.settings.boot = Some("the next boot".to_owned());
    let kubelet = node.serve().await;
    assert_eq!(start(&kubelet, &claim).await.unwrap(), [format!("{KIND}=MIG-made-2")]);
    end(&kubelet, &claim).await;
    is_over(&node, &driver);
}

#[tokio::test]
async fn refusal_after_a_reboot_leaves_no_begun_claim() {
    let Prepared { mut node, driver, kubelet, claim } = prepared().await;
    node.crash(&kubelet).await;
    finds(&driver, Vec::new());
    node.settings.boot = Some("the next boot".to_owned());
    set(&driver, Mood::Refuses);
    let kubelet = node.serve().await;
    is_refused(&kubelet, &claim, &["NVML_ERROR_INSUFFICIENT_RESOURCES"]).await;
    node.crash(&kubelet).await;
    finds(&driver, vec![instance("MIG-of-an-administrator", SLOT)]);
    node.delete("a");
    node.settings.sweep = Duration::from_millis(1);
    node.start();
    until(|| node.checkpoints().is_empty()).await;
    assert_eq!(instances(&driver), ["MIG-of-an-administrator"]);
}

#[tokio::test]
async fn device_of_a_lost_gpu_is_unprepared() {
    let Prepared { node, driver, kubelet, claim } = prepared().await;
    set(&driver, Mood::Keeps);
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
    // An administrator made the same after the reboot, and a driver may give it the same name.
    finds(&driver, vec![instance("MIG-made-1", SLOT)]);
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
    finds(&driver, vec![instance("MIG-of-admin", SLOT)]);
    node.scan();
    let kubelet = node.serve().await;
    // It is a device as ever.
    let claim = node.claim("a", &[("gpus", DEVICE)]);
    assert_eq!(start(&kubelet, &claim).await.unwrap(), [format!("{KIND}=MIG-of-admin")]);
    // And none is made over it.
    let over = node.claim("b", &[("gpus", "gpu-0-mig-3g40gb-9-0")]);
    is_refused(&kubelet, &over, &["MIG-of-admin is in its place"]).await;
    end(&kubelet, &claim).await;
    assert_eq!((instances(&driver), orders(&driver)), (vec!["MIG-of-admin".to_owned()], Vec::new()));
}

#[tokio::test]
async fn remade_device_gives_its_claim_no_old_nodes() {
    let (mut node, driver) = node();
    let make = |uuid: &str, node: &Node| {
        finds(&driver, vec![instance(uuid, SLOT)]);
        node.scan();
    };
    make("MIG-of-admin", &node);
    let kubelet = node.serve().await;
    let claim = node.claim("a", &[("gpus", DEVICE)]);
    assert_eq!(start(&kubelet, &claim).await.unwrap(), [format!("{KIND}=MIG-of-admin")]);
    // Destroyed under the claim, which the driver allows while no process uses it. Its nodes may be another device's.
    finds(&driver, Vec::new());
    node.scan();
    until(|| node.claim_specs().is_empty()).await;
    make("MIG-made-again", &node);
    restarted(&kubelet).await;
    assert_eq!(start(&kubelet, &claim).await.unwrap(), [format!("{KIND}=MIG-made-again")]);
}

#[tokio::test]
async fn device_made_after_the_last_scan_keeps_its_spec() {
    let Prepared { mut node, driver, kubelet, claim } = prepared().await;
    let (of_claim, whole) = (node.claim_specs(), node.claim("b", &[("gpus", "gpu-1")]));
    start(&kubelet, &whole).await.unwrap();
    node.crash(&kubelet).await;
    // The process that takes over scanned the GPUs before the claim's device was made.
    let made = std::mem::take(&mut driver.lock().unwrap().instances);
    driver.lock().unwrap().scan();
    driver.lock().unwrap().instances = made;
    set(&driver, Mood::Silent);
    node.start();
    until(|| driver.lock().unwrap().orders.last().is_some_and(|order| order.task == MigTask::List)).await;
    // When the other claim's spec is back for the second time, all specs have been renewed once.
    for _ in 0..2 {
        let other = node.claim_specs().into_iter().find(|name| !of_claim.contains(name)).unwrap();
        fs::remove_file(node.settings.cdi_folder.join(&other)).unwrap();
        node.scan();
        until(|| node.claim_specs().contains(&other)).await;
    }
    assert!(node.claim_specs().contains(&of_claim[0]), "{:?}", node.claim_specs());
    obeys(&driver);
    let kubelet = node.kubelet().await;
    assert_eq!(start(&kubelet, &claim).await.unwrap(), [format!("{KIND}=MIG-made-1")]);
    end(&kubelet, &claim).await;
    assert_eq!((instances(&driver).len(), node.claim_specs().len()), (0, 1));
}

/// In its place, and in a part of it.
#[tokio::test]
async fn device_destroyed_after_last_scan_blocks_no_claim() {
    for there in [SLOT, MigSlot { profile_id: 19, placement: MigPlacement { start: 2, size: 1 } }] {
        let (mut node, driver) = node();
        // The process before destroyed it, and the last scan is older than that.
        finds(&driver, vec![instance("MIG-of-an-ended-claim", there)]);
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
    node.rewrite("a", |text| text.replace("\"version\": 1", "\"version\": 7"));
    node.settings.sweep = Duration::from_millis(1);
    node.serve_again(&kubelet).await;
    is_refused(&kubelet, &node.claim("b", &[("gpus", DEVICE)]), &["is prepared for the claim ml/claim-a"]).await;
    let reads = node.reads("a");
    until(|| node.reads("a") > reads + 2).await;
    assert_eq!((instances(&driver).len(), node.checkpoints()), (1, vec!["a.json".to_owned()]));
    end(&kubelet, &claim).await;
    is_over(&node, &driver);
}

#[tokio::test]
async fn claim_over_another_claims_device_is_refused() {
    let Prepared { node, driver, kubelet, .. } = prepared().await;
    for device in [DEVICE, "gpu-0-mig-1g20gb-15-2", "gpu-0-mig-7g80gb-0-0"] {
        let over = node.claim("b", &[("gpus", device)]);
        is_refused(&kubelet, &over, &["is prepared for the claim ml/claim-a"]).await;
    }
    // Within a claim too.
    let both = node.claim("c", &[("gpus", OTHER), ("gpus", "gpu-0-mig-1g10gb-me-20-0")]);
    is_refused(&kubelet, &both, &["shares hardware with another device of the same claim"]).await;
    assert_eq!(instances(&driver).len(), 1);
}

#[tokio::test]
async fn disabled_setting_still_destroys_made_devices() {
    let Prepared { mut node, driver, kubelet, claim } = prepared().await;
    node.halt(&kubelet).await;
    node.settings.makes_mig = false;
    let kubelet = node.serve().await;
    assert_eq!(start(&kubelet, &claim).await.unwrap(), [format!("{KIND}=MIG-made-1")]);
    end(&kubelet, &claim).await;
    is_over(&node, &driver);
}

#[tokio::test]
async fn nothing_is_made_without_setting_or_boot_name() {
    for (makes_mig, boot, words) in
        [(false, Some("this boot"), "there is no device"), (true, None, "the boot ID is unknown")]
    {
        let (mut node, driver) = node();
        (node.settings.makes_mig, node.settings.boot) = (makes_mig, boot.map(str::to_owned));
        let kubelet = node.serve().await;
        is_refused(&kubelet, &node.claim("a", &[("gpus", DEVICE)]), &[words]).await;
        assert_eq!((orders(&driver).len(), node.checkpoints().len()), (0, 0), "{words}");
    }
}

/// In a pod without the rights for MIG the driver refuses every order.
#[tokio::test]
async fn undestroyable_device_is_left_once_dra_is_off() {
    let Prepared { mut node, driver, kubelet, .. } = prepared().await;
    node.halt(&kubelet).await;
    node.apply(Event::Planned(Box::default()));
    node.listed(&[]);
    (node.settings.read_claim, node.settings.serves) = (None, false);
    set(&driver, Mood::InUse);
    node.start();
    node.log.has(&["cleanup of a finished claim is incomplete", DEVICE]).await;
    until(|| node.checkpoints().is_empty()).await;
    assert_eq!(instances(&driver).len(), 1, "it is an administrator's from now on");
}
