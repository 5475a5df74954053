//! The writer of ResourceSlices: its writes, their rate, faults, and other writers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use linkwise_api_server_box::{Answer, Fault, Gates, ResourceType};
use linkwise_cluster::{Pace, SliceWriter, StoredPool};
use linkwise_core::publish::dra::slice::Pool;
use linkwise_core::publish::dra::{Attribute, SliceDevice, Taint, TaintEffect};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::cluster::support::{Cluster, PACE, Running, until};

const DRIVER: &str = "gpu.nvidia.com";

/// A pace at which a fight with another writer pauses repairs for longer than a test lasts.
const PATIENT: Pace = Pace { repair: Duration::from_secs(3600), longest: Duration::from_secs(3600), ..PACE };

pub struct Writing {
    pool: watch::Sender<Option<Arc<Pool>>>,
    stored: watch::Receiver<StoredPool>,
    /// True while the kubelet has the DRA plugin registered.
    registered: watch::Sender<bool>,
    pub running: Running,
}

pub fn write(cluster: &Cluster, pace: Pace) -> Writing {
    let (pool, wanted) = watch::channel(None);
    let (report, stored) = watch::channel(StoredPool::default());
    let registered = watch::Sender::new(true);
    let writer = SliceWriter::new(cluster.client(pace), "n".to_owned(), registered.subscribe(), report);
    let follow = cluster.client(pace);
    let running = Running::of(|shutdown| writer.run(follow, wanted, shutdown));
    Writing { pool, stored, registered, running }
}

/// A cluster that has only its node, and a writer.
pub async fn writing(pace: Pace) -> (Cluster, Writing) {
    let cluster = Cluster::of_node().await;
    let writing = write(&cluster, pace);
    (cluster, writing)
}

fn devices(count: usize) -> Vec<SliceDevice> {
    let device = |index: usize| SliceDevice {
        name: format!("gpu-{index}"),
        attributes: [("type".to_owned(), Attribute::String("gpu".into()))].into(),
        ..SliceDevice::default()
    };
    (0..count).map(device).collect()
}

fn pool(devices: Vec<SliceDevice>) -> Arc<Pool> {
    Arc::new(Pool::new("n", devices))
}

fn tainted(count: usize, sick: usize) -> Arc<Pool> {
    let mut devices = devices(count);
    let key = "gpu.nvidia.com/xid".to_owned();
    devices[sick].taints = vec![Taint { key, value: "79".into(), effect: TaintEffect::NoSchedule }];
    pool(devices)
}

/// A pool with a number, the attribute `round` of its first device, by which tests tell pools apart.
fn round(count: usize, round: i64) -> Arc<Pool> {
    let mut devices = devices(count);
    devices[0].attributes.insert("round".into(), Attribute::Int(round));
    pool(devices)
}

impl Writing {
    pub fn want(&self, pool: Arc<Pool>) {
        self.pool.send_replace(Some(pool));
    }

    pub async fn wait_report(&mut self, condition: impl Fn(&StoredPool) -> bool) -> StoredPool {
        let report = tokio::time::timeout(Duration::from_secs(60), self.stored.wait_for(condition)).await;
        report.unwrap_or_else(|_| panic!("the condition is not met in time")).unwrap().clone()
    }

    /// Wants a pool, and waits until the server has it.
    async fn store(&mut self, cluster: &Cluster, pool: Arc<Pool>) {
        let names: Vec<Value> = pool.devices.iter().map(|device| json!(device.name)).collect();
        let round = pool.devices.first().map(|device| json!(device.attributes.get("round")));
        self.want(pool);
        until(|| {
            let slices = cluster.slices();
            let mut devices = slices.iter().filter_map(|it| it["spec"]["devices"].as_array()).flatten();
            devices.clone().map(|device| &device["name"]).eq(&names)
                && devices.next().is_none_or(|device| Some(&device["attributes"]["round"]) == round.as_ref())
        })
        .await;
        self.wait_report(|stored| stored.is_current).await;
    }
}

fn writes(cluster: &Cluster) -> usize {
    ["POST", "PUT", "DELETE", "PATCH"].iter().map(|method| cluster.count(method, "")).sum()
}

/// Waits until the writer has listed the slices more than `times` times from now on.
async fn wait_lists(cluster: &Cluster, times: usize) {
    let before = cluster.count("GET", "resourceslices");
    until(|| cluster.count("GET", "resourceslices") > before + times).await;
}

/// Checks that the writer lists the slices again and writes nothing.
async fn assert_writes_nothing(cluster: &Cluster) {
    let before = writes(cluster);
    wait_lists(cluster, 3).await;
    assert_eq!(writes(cluster), before);
}

#[tokio::test]
async fn slices_follow_the_pool() {
    let (cluster, mut writing) = writing(PACE).await;
    writing.store(&cluster, pool(devices(2))).await;
    let stored = cluster.slices();
    let node = &cluster.server.object(&ResourceType::NODES.key(None, "n")).unwrap()["metadata"]["uid"];
    let owner = json!([{"apiVersion": "v1", "kind": "Node", "name": "n", "uid": node, "controller": true}]);
    assert_eq!(stored[0]["metadata"]["ownerReferences"], owner);
    assert_eq!(stored[0]["spec"]["pool"], json!({"name": "n/gpu", "generation": 1, "resourceSliceCount": 1}));
    let name = stored[0]["metadata"]["name"].as_str().unwrap();
    assert!(name.starts_with("00000-gpu.nvidia.com-n-"), "{name}");
    writing.store(&cluster, pool(devices(1))).await;
    assert_eq!(cluster.slices()[0]["spec"]["pool"]["generation"], 1, "a change of one slice changed the generation");
    writing.store(&cluster, pool(devices(130))).await;
    let generations: Vec<Value> = cluster.slices().iter().map(|it| it["spec"]["pool"]["generation"].clone()).collect();
    assert_eq!(generations, [json!(2), json!(2), json!(2)]);
    writing.store(&cluster, pool(Vec::new())).await;
    assert_eq!(cluster.slices().len(), 1, "an empty pool needs exactly one slice");
    let report = writing.stored.borrow().clone();
    assert_eq!((report.slices, report.generation, report.trouble), (1, 3, None));
    writing.running.end().await;
    assert_eq!(
        (cluster.slices().len(), cluster.count("GET", "nodes/n")),
        (1, 2),
        "the slice went, or the Node was not read twice"
    );
}

#[tokio::test]
async fn nothing_is_written_without_a_pool_or_a_change() {
    let cluster = Cluster::of_node().await;
    for start in 0..3 {
        // Watches end at once, so the writer lists the slices again and again.
        let mut writing = write(&cluster, Pace { watch: Duration::ZERO, ..PACE });
        wait_lists(&cluster, 2).await;
        assert_eq!(writes(&cluster), usize::from(start > 0), "a writer without a pool wrote");
        writing.store(&cluster, tainted(2, 1)).await;
        wait_lists(&cluster, 4).await;
        writing.running.end().await;
    }
    assert_eq!(writes(&cluster), 1, "a stored pool was written again");
}

#[tokio::test]
async fn wiped_slices_are_written_again() {
    let (cluster, mut writing) = writing(PACE).await;
    writing.store(&cluster, pool(devices(130))).await;
    // A kubelet does this when no driver with the name was connected for 30 s.
    cluster.server.wipe_slices("n", Some(DRIVER));
    until(|| cluster.slices().len() == 3).await;
    writing.wait_report(|stored| stored.is_current).await;
    // The Node is deleted with its slices and created again. The new slices belong to the new Node.
    cluster.server.remove(&ResourceType::NODES.key(None, "n"));
    cluster.label_node("n", json!({}));
    cluster.server.wipe_slices("n", None);
    let uid = cluster.server.object(&ResourceType::NODES.key(None, "n")).unwrap()["metadata"]["uid"].clone();
    until(|| cluster.slices().len() == 3).await;
    assert!(cluster.slices().iter().all(|slice| slice["metadata"]["ownerReferences"][0]["uid"] == uid));
}

#[tokio::test]
async fn slices_of_other_nodes_and_drivers_are_left_alone() {
    let cluster = Cluster::of_node().await;
    cluster.server.ignore_field_selectors();
    let others = [("a", "m", DRIVER), ("b", "n", "dra.net")].map(|(name, node, driver)| {
        let pool = json!({"name": "n/gpu", "generation": 7, "resourceSliceCount": 1});
        let spec = json!({"driver": driver, "nodeName": node, "pool": pool, "devices": []});
        let key = ResourceType::RESOURCE_SLICES.key(None, name);
        cluster.server.put("other", &key, json!({ "spec": spec }));
        key
    });
    let mut writing = write(&cluster, PACE);
    // The writer sees the slices of others in its list.
    writing.want(pool(devices(2)));
    assert_eq!(writing.wait_report(|stored| stored.is_current).await.slices, 1);
    let stored = cluster.slices();
    let mut names = stored.iter().filter_map(|slice| slice["metadata"]["name"].as_str());
    let ours = ResourceType::RESOURCE_SLICES.key(None, names.find(|name| name.starts_with("00000-")).unwrap());
    // It sees them in its watch, before an event of its own slice.
    for key in &others {
        cluster.server.edit("other", key, |slice| slice["spec"]["devices"] = json!([{"name": "gpu-0"}]));
    }
    cluster.server.edit("kubectl", &ours, |slice| slice["spec"]["devices"] = json!([]));
    let has = |count| cluster.server.object(&ours).unwrap()["spec"]["devices"].as_array().unwrap().len() == count;
    until(|| has(2)).await;
    // It sees them in the list after a conflict.
    cluster.server.fail(Fault::of("PUT", "resourceslices", 1, Answer::Refusal(409, "conflict", None)));
    writing.want(pool(devices(3)));
    until(|| has(3)).await;
    let report = writing.wait_report(|stored| stored.is_current).await;
    assert_eq!((report.slices, report.generation), (1, 1));
    assert_eq!((cluster.slices().len(), cluster.count("DELETE", "")), (3, 0));
}

#[tokio::test]
async fn kubelet_restarts_do_not_pause_repairs() {
    let (cluster, mut writing) = writing(PATIENT).await;
    for (count, stored) in [(2, 1), (130, 3)] {
        writing.store(&cluster, pool(devices(count))).await;
        for _ in 0..12 {
            cluster.server.wipe_slices("n", None);
            until(|| cluster.slices().len() == stored).await;
            writing.wait_report(|stored| stored.is_current).await;
        }
    }
}

#[tokio::test]
async fn fight_pauses_repairs_until_the_pool_changes() {
    let (cluster, mut writing) = writing(Pace { watch: Duration::ZERO, ..PATIENT }).await;
    writing.store(&cluster, pool(devices(2))).await;
    let key = ResourceType::RESOURCE_SLICES.key(None, cluster.slices()[0]["metadata"]["name"].as_str().unwrap());
    let good = cluster.slices()[0]["spec"]["devices"].clone();
    let edit = || cluster.server.edit("other", &key, |slice| slice["spec"]["devices"][0]["name"] = json!("theirs"));
    for _ in 0..3 {
        edit();
        until(|| cluster.slices()[0]["spec"]["devices"] == good).await;
        writing.wait_report(|stored| stored.is_current).await;
    }
    let before = writes(&cluster);
    edit();
    writing.wait_report(|stored| !stored.is_current).await;
    wait_lists(&cluster, 1).await;
    assert_eq!(writes(&cluster), before, "the fourth repair in a row did not wait");
    writing.store(&cluster, tainted(2, 1)).await;
    assert_eq!(cluster.slices()[0]["spec"]["devices"][1]["taints"][0]["value"], "79");
    assert_eq!(writes(&cluster), before + 1);
    writing.running.end().await;
}

#[tokio::test]
async fn write_whose_answer_is_lost_leaves_no_trouble() {
    let (cluster, mut writing) = writing(Pace { request: Duration::from_secs(1), ..PACE }).await;
    writing.store(&cluster, round(2, 1)).await;
    cluster.server.fail(Fault::of("PUT", "resourceslices", 1, Answer::Lost));
    writing.want(round(2, 2));
    writing.wait_report(|stored| stored.trouble.is_some()).await;
    writing.wait_report(|stored| stored.is_current && stored.trouble.is_none()).await;
    assert_eq!(cluster.count("PUT", "resourceslices"), 1, "the slice was written again");
}

#[tokio::test]
async fn each_fault_of_a_write_is_survived() {
    for (answer, outcome) in [
        (Answer::Refusal(403, "no right to resourceslices", None), "forbidden"),
        (Answer::Refusal(409, "conflict", None), "conflict"),
        (Answer::Refusal(410, "gone", None), "expired"),
        (Answer::Refusal(422, "invalid", None), "refused"),
        (Answer::Refusal(429, "too many requests", Some(0)), "throttled"),
        (Answer::Refusal(500, "internal error", None), "server_error"),
        (Answer::Text("nonsense".to_owned()), "malformed"),
        (Answer::Text("{}".to_owned()), "ok"),
        (Answer::Silence, "timeout"),
    ] {
        let (cluster, mut writing) = writing(Pace { request: Duration::from_secs(2), ..PACE }).await;
        for (method, verb, round_now) in [("POST", "create", 1), ("PUT", "update", 2)] {
            cluster.server.fail(Fault::of(method, "resourceslices", 2, answer.clone()));
            writing.store(&cluster, round(2, round_now)).await;
            let counted = cluster.metrics.requests("resourceslices", verb, outcome);
            assert!(counted >= 2, "{verb} {outcome}: {counted}");
        }
        assert_eq!(writing.stored.borrow().trouble, None);
        writing.running.end().await;
    }
}

#[tokio::test]
async fn faults_of_reading_are_survived() {
    let cluster = Cluster::of_node().await;
    for answer in [
        Answer::Refusal(403, "no right", None),
        Answer::Refusal(410, "expired", None),
        Answer::Refusal(500, "internal error", None),
        Answer::Text("[]".to_owned()),
    ] {
        cluster.server.fail(Fault::of("GET", "resourceslices", 2, answer.clone()));
        cluster.server.fail(Fault::of("GET", "nodes/n", 1, answer));
    }
    let mut writing = write(&cluster, PACE);
    writing.store(&cluster, round(2, 1)).await;
    for number in 2..6 {
        cluster.server.expire_watches();
        cluster.server.wipe_slices("n", None);
        writing.store(&cluster, round(2, number)).await;
    }
    writing.running.end().await;
}

#[tokio::test]
async fn server_that_was_away_gets_the_last_pool() {
    let (cluster, mut writing) = writing(PACE).await;
    writing.store(&cluster, round(2, 1)).await;
    cluster.server.go_away().await;
    for number in [2, 3] {
        writing.want(round(2, number));
        let report = writing.wait_report(|stored| stored.trouble.is_some()).await;
        assert!(!report.is_current && report.slices == 1, "{report:?}");
    }
    cluster.server.come_back().await;
    writing.store(&cluster, round(2, 3)).await;
    assert_eq!(cluster.metrics.requests("resourceslices", "update", "ok"), 1, "an outdated pool was written");
    writing.running.end().await;
}

#[tokio::test]
async fn dropped_taints_are_reported_and_not_written_again() {
    let cluster = Cluster::of_node().await;
    cluster.server.set_gates(Gates::OFF);
    let mut writing = write(&cluster, Pace { watch: Duration::ZERO, ..PACE });
    writing.store(&cluster, pool(devices(2))).await;
    assert!(!writing.stored.borrow().drops_taints);
    writing.want(tainted(2, 1));
    let report = writing.wait_report(|stored| stored.drops_taints).await;
    assert!(report.is_current, "{report:?}");
    assert_writes_nothing(&cluster).await;
    // The next process tries to write the taint once.
    writing.running.end().await;
    let (before, mut writing) = (writes(&cluster), write(&cluster, Pace { watch: Duration::ZERO, ..PACE }));
    writing.want(tainted(2, 1));
    writing.wait_report(|stored| stored.drops_taints && stored.is_current).await;
    assert_writes_nothing(&cluster).await;
    assert_eq!(writes(&cluster), before + 1);
}

#[tokio::test]
async fn dropped_sharing_is_reported_and_not_written_again() {
    let (cluster, mut writing) = writing(Pace { watch: Duration::ZERO, ..PACE }).await;
    let mut wanted = Pool::clone(&pool(devices(2)));
    wanted.devices[1].allow_multiple_allocations = true;
    writing.store(&cluster, Arc::new(wanted.clone())).await;
    assert!(!writing.stored.borrow().drops_sharing);
    cluster.server.set_gates(Gates::OFF);
    cluster.server.wipe_slices("n", None);
    let report = writing.wait_report(|stored| stored.drops_sharing && stored.is_current).await;
    assert!(!report.drops_taints, "{report:?}");
    assert!(!cluster.slices()[0].to_string().contains("allowMultipleAllocations"));
    assert_writes_nothing(&cluster).await;
}

#[tokio::test]
async fn taint_that_one_slice_drops_is_reported() {
    let (cluster, mut writing) = writing(PACE).await;
    let mut wanted = Pool::clone(&tainted(130, 129));
    writing.store(&cluster, Arc::new(wanted.clone())).await;
    // The server keeps the stored taint of the last slice, and drops the new one of the first.
    cluster.server.set_gates(Gates::OFF);
    wanted.devices[0].taints = wanted.devices[129].taints.clone();
    wanted.devices[129].attributes.insert("round".into(), Attribute::Int(1));
    writing.want(Arc::new(wanted));
    let report = writing.wait_report(|stored| stored.drops_taints).await;
    assert!(report.is_current, "{report:?}");
    let taints: Vec<usize> = cluster.slices().iter().map(|slice| slice.to_string().matches("xid").count()).collect();
    assert_eq!(taints, [0, 0, 1]);
}

#[tokio::test]
async fn many_changes_make_at_most_one_write_a_second() {
    let (cluster, mut writing) = writing(Pace { write: Duration::from_secs(1), ..PACE }).await;
    writing.store(&cluster, round(2, -1)).await;
    let (began, before) = (Instant::now(), writes(&cluster));
    for change in 0..1000 {
        writing.want(round(2, change));
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    writing.store(&cluster, round(2, 1000)).await;
    let written = writes(&cluster) - before;
    // Each write begins at least a second after the previous one, the first after the creation of the slice.
    let most = usize::try_from(began.elapsed().as_secs()).unwrap() + 1;
    assert!((1..=most).contains(&written), "{written} of at most {most}");
}

#[tokio::test]
async fn unreadable_node_leaves_slices_without_owner() {
    let cluster = Cluster::of_node().await;
    cluster.server.fail(Fault::of("GET", "nodes/n", usize::MAX, Answer::Refusal(403, "nodes is forbidden", None)));
    let mut writing = write(&cluster, PACE);
    writing.store(&cluster, round(2, 1)).await;
    assert_eq!(cluster.slices()[0]["metadata"]["ownerReferences"], Value::Null);
}

#[tokio::test]
async fn unregistered_plugin_writes_no_slices() {
    let (cluster, mut writing) = writing(PACE).await;
    writing.registered.send_replace(false);
    writing.want(pool(devices(2)));
    writing.wait_report(|stored| stored.is_read && stored.awaits_kubelet).await;
    assert_eq!(writes(&cluster), 0);
    writing.registered.send_replace(true);
    writing.wait_report(|stored| stored.is_current).await;
    // While the kubelet is away, stored slices stay although the wanted pool differs.
    writing.registered.send_replace(false);
    let before = writes(&cluster);
    writing.want(pool(devices(1)));
    writing.wait_report(|stored| !stored.is_current && stored.slices == 1).await;
    // The kubelet deletes slices when the plugin was away for 30 s.
    cluster.server.wipe_slices("n", Some(DRIVER));
    writing.wait_report(|stored| stored.slices == 0 && stored.awaits_kubelet).await;
    assert_eq!(writes(&cluster), before);
    writing.registered.send_replace(true);
    writing.wait_report(|stored| stored.is_current && stored.slices == 1).await;
    writing.running.end().await;
}

#[tokio::test]
async fn version_that_drops_taints_is_known_before_writes() {
    for (version, drops) in [("v1.34.9", true), ("v1.35.6", true), ("v1.36.0", false), ("", false)] {
        let cluster = Cluster::of_node().await;
        cluster.server.set_version(version);
        let mut writing = write(&cluster, PACE);
        let report = writing.wait_report(|stored| stored.is_read).await;
        assert_eq!((report.drops_taints, writes(&cluster)), (drops, 0), "{version}");
        writing.store(&cluster, pool(devices(1))).await;
    }
}

/// A cluster with the overlay's admission policy. Its token belongs to linkwise's pod on the node `n`.
async fn with_policy() -> Cluster {
    let cluster = Cluster::of_node().await;
    for (resource, file) in [
        (ResourceType::VALIDATING_ADMISSION_POLICIES, "admissionpolicy"),
        (ResourceType::VALIDATING_ADMISSION_POLICY_BINDINGS, "admissionpolicybinding"),
    ] {
        let path = format!("{}/manifests/overlays/dra/{file}.yaml", env!("CARGO_MANIFEST_DIR"));
        let object: Value = serde_saphyr::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        cluster.server.create("kubectl", &resource.key(None, "linkwise-dra"), object).unwrap();
    }
    let extra = json!({"authentication.kubernetes.io/node-name": ["n"]});
    let user = json!({"username": "system:serviceaccount:kube-system:linkwise", "extra": extra});
    cluster.server.name_user("first", user);
    cluster
}

#[tokio::test]
async fn policy_lets_linkwise_write_its_own_pool_only() {
    let cluster = with_policy().await;
    let key = |name| ResourceType::RESOURCE_SLICES.key(None, name);
    let slice = |node: &str, driver: &str, pool: &str| {
        let pool = json!({"name": pool, "generation": 99, "resourceSliceCount": 1});
        json!({"spec": {"nodeName": node, "driver": driver, "pool": pool, "devices": []}})
    };
    for (node, driver, pool, why) in [
        ("victim", DRIVER, "victim/gpu", "may not write slices of node 'victim'"),
        ("n", DRIVER, "victim/gpu", "may not write slices of the pool 'victim/gpu'"),
        ("n", DRIVER, "n", "may not write slices of the pool 'n'"),
        ("n", "dra.net", "n/gpu", "may not write slices of the driver 'dra.net'"),
    ] {
        let refused = cluster.server.create_as("first", &key("a"), slice(node, driver, pool)).unwrap_err();
        assert!(refused["message"].as_str().unwrap().contains(why), "{refused}");
    }
    // NVIDIA's driver left another pool on this node.
    cluster.server.put("nvidia", &key("nvidias"), slice("n", DRIVER, "n"));
    let mut writing = write(&cluster, PACE);
    for count in [2, 130, 0] {
        writing.store(&cluster, pool(devices(count))).await;
    }
    assert!(cluster.slices().iter().all(|slice| slice["spec"]["pool"]["name"] == "n/gpu"));
    let mut wanted = Pool::clone(&pool(devices(1)));
    wanted.name = "victim/gpu".to_owned();
    writing.want(Arc::new(wanted));
    let report = writing.wait_report(|stored| stored.trouble.is_some()).await;
    assert!(report.trouble.unwrap().contains("may not write slices of the pool"));
}
