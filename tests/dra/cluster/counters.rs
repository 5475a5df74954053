//! Pools with counters: slices with counters are written first, and no pool lets the scheduler allocate a GPU twice.

use std::sync::Arc;
use std::time::Duration;

use linkwise_api_server_box::{Answer, Fault, Gates, ResourceType};
use linkwise_cluster::Pace;
use linkwise_core::publish::dra::slice::Pool;
use linkwise_core::publish::dra::{Counter, CounterConsumption, CounterSet, ServerVersion, SliceDevice};
use serde_json::Value;

use crate::cluster::support::{Cluster, PACE, until};
use crate::dra::cluster::slices::{write, writing};

const NO_COUNTERS: Gates = Gates { partitionable_devices: false, ..Gates::OFF };

/// A pool of this many devices, which consume one counter if `counted`.
fn pool(count: usize, counted: bool) -> Arc<Pool> {
    let counters = |value: String| [("memory".to_owned(), Counter { value })].into();
    let consumption = CounterConsumption { counter_set: "gpu-0".to_owned(), counters: counters("1".to_owned()) };
    let consumes_counters = if counted { vec![consumption] } else { Vec::new() };
    let device = |number| SliceDevice {
        name: format!("gpu-{number}"),
        consumes_counters: consumes_counters.clone(),
        ..SliceDevice::default()
    };
    let sets = counted.then(|| CounterSet { name: "gpu-0".to_owned(), counters: counters(count.to_string()) });
    let devices = (0..count).map(device).collect();
    Arc::new(Pool { counters: sets.into_iter().collect(), ..Pool::new("n", devices) })
}

/// Returns true if the pool is complete for the scheduler: all slices of the newest generation exist.
fn is_complete(slices: &[Value]) -> bool {
    let newest = slices.iter().map(|slice| slice["spec"]["pool"]["generation"].as_u64()).max().flatten();
    let of_newest: Vec<_> = slices.iter().filter(|it| it["spec"]["pool"]["generation"].as_u64() == newest).collect();
    of_newest.first().is_some_and(|it| it["spec"]["pool"]["resourceSliceCount"] == of_newest.len())
}

/// The number of devices that the scheduler may allocate: none if the pool is incomplete or lacks the counters that
/// devices consume.
fn offered(slices: &[Value]) -> usize {
    let count = |key: &str| -> usize {
        slices.iter().map(|slice| slice.to_string().matches(&format!("\"{key}\"")).count()).sum()
    };
    let is_valid = count("consumesCounters") == 0 || count("sharedCounters") > 0;
    let devices = slices.iter().filter_map(|slice| slice["spec"]["devices"].as_array()).map(Vec::len).sum();
    if is_complete(slices) && is_valid { devices } else { 0 }
}

/// The methods of the writes so far.
fn methods(cluster: &Cluster) -> Vec<String> {
    let requests = cluster.server.requests();
    let writes = requests.iter().filter(|it| it.method != "GET" && it.uri.contains("resourceslices"));
    writes.map(|it| it.method.clone()).collect()
}

#[tokio::test]
async fn counters_are_written_before_devices() {
    let (cluster, mut writing) = writing(Pace { write: Duration::from_millis(50), ..PACE }).await;
    let found = writing.wait_report(|stored| stored.is_read).await;
    assert_eq!(found.version, ServerVersion::parse("1.36.2"));
    let wanted = pool(70, true);
    for round in 0..3 {
        writing.want(Arc::clone(&wanted));
        let report = writing.wait_report(|stored| stored.is_current).await;
        assert_eq!(report.slices, 3, "{round}");
        let written = cluster.slices();
        let created = |slice: &Value| slice["metadata"]["resourceVersion"].as_str().unwrap().parse::<u64>().unwrap();
        assert!(written[0]["spec"]["sharedCounters"].is_array() && written[0]["spec"].get("devices").is_none());
        assert!(created(&written[0]) < created(&written[1]) && created(&written[1]) < created(&written[2]));
        // A kubelet that restarts deletes the slices.
        cluster.server.wipe_slices("n", None);
        until(|| cluster.slices().len() == 3).await;
    }
    assert_eq!(methods(&cluster)[..3], ["POST", "POST", "POST"]);
}

#[tokio::test]
async fn dropped_counters_stop_the_pool() {
    let cluster = Cluster::of_node().await;
    cluster.server.set_gates(NO_COUNTERS);
    let mut writing = write(&cluster, PACE);
    writing.want(pool(70, true));
    let report = writing.wait_report(|stored| stored.drops_counters).await;
    assert!(!report.is_current);
    assert_eq!((cluster.slices().len(), offered(&cluster.slices())), (1, 0), "not only the slice without its counters");
    // The writer does not try again after another list.
    cluster.server.expire_watches();
    let lists = cluster.count("GET", "resourceslices");
    until(|| cluster.count("GET", "resourceslices") > lists).await;
    assert_eq!(methods(&cluster), ["POST"]);
    writing.want(pool(70, false));
    writing.wait_report(|stored| stored.is_current).await;
    assert_eq!(offered(&cluster.slices()), 70);
}

#[tokio::test]
async fn counters_dropped_later_offer_nothing_twice() {
    // The pool has a slice with counters and three with devices.
    for lost in [0, 3] {
        let (cluster, mut writing) = writing(PACE).await;
        writing.want(pool(130, true));
        writing.wait_report(|stored| stored.is_current).await;
        assert_eq!(offered(&cluster.slices()), 130);
        // An upgrade disables the gate: stored slices keep their counters, and a new one loses them.
        cluster.server.set_gates(NO_COUNTERS);
        let name = cluster.slices()[lost]["metadata"]["name"].as_str().unwrap().to_owned();
        cluster.server.remove(&ResourceType::RESOURCE_SLICES.key(None, &name));
        let report = writing.wait_report(|stored| stored.drops_counters).await;
        assert!(!report.is_current);
        assert!(!is_complete(&cluster.slices()), "the pool is complete without counters: {lost}");
        let writes = methods(&cluster);
        assert_eq!(writes[4], if lost == 0 { "POST" } else { "PUT" }, "the slice with counters is not written first");
        writing.want(pool(130, false));
        writing.wait_report(|stored| stored.is_current).await;
        assert_eq!((offered(&cluster.slices()), cluster.slices().len()), (130, 3));
        writing.running.end().await;
    }
}

#[tokio::test]
async fn server_version_is_read_again_with_the_slices() {
    let cluster = Cluster::of_node().await;
    cluster.server.set_version("v1.35.6");
    let mut writing = write(&cluster, PACE);
    writing.wait_report(|stored| stored.version == ServerVersion::parse("1.35.6")).await;
    for text in ["v1.37.0-rc.1", "", "v1.36.3+vendor", "odd"] {
        cluster.server.set_version(text);
        cluster.server.expire_watches();
        writing.wait_report(|stored| stored.version == ServerVersion::parse(text) && stored.is_read).await;
    }
}

#[tokio::test]
async fn unreadable_server_version_delays_the_report() {
    let cluster = Cluster::of_node().await;
    cluster.server.fail(Fault::of("GET", "/version", 2, Answer::Refusal(503, "starting", None)));
    let mut writing = write(&cluster, PACE);
    let report = writing.wait_report(|stored| stored.is_read).await;
    assert_eq!(report.version, ServerVersion::parse("1.36.2"));
}
