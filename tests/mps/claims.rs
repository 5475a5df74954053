//! Tests of control daemons for GPUs of claims, which the plugin orders by a file under the MPS root.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt;

use linkwise_core::claims::{MpsOrder, MpsOrderGpu};
use linkwise_core::publish::MpsShm;
use linkwise_core::state::ResourceName;
use linkwise_core::topology::GpuUuid;
use linkwise_host::mps::{Limits, Marker, Orders, exclusive_gpus, readiness, shm_of_ready};

use crate::cluster::support::until;
use crate::mps::command::{Daemon, MACHINE, wanted};
use crate::mps::node::{Node, runs};
use crate::run::node::signal;

/// The UUID of the machine's GPU with this index.
fn gpu(index: usize) -> GpuUuid {
    linkwise_host::machines::load(MACHINE).unwrap().observed.gpus[index].uuid.clone()
}

fn order(gpus: &[usize], thread_percentage: u32, exclusive: bool) -> MpsOrder {
    let gpus = gpus.iter().map(|index| MpsOrderGpu { gpu: gpu(*index), mib: exclusive.then_some(2048) }).collect();
    MpsOrder { gpus, thread_percentage, exclusive }
}

/// Writes orders as the plugin does: the GPUs that DRA has, and the daemons for claims. Returns the daemons' names.
fn write_orders(node: &Node, dra: &[usize], orders: &[MpsOrder]) -> Vec<ResourceName> {
    let daemons = orders.iter().map(|order| (order.name().unwrap(), order.clone())).collect();
    let gpus = dra.iter().map(|index| gpu(*index)).collect();
    Orders { gpus, daemons, ..Orders::default() }.write(node.layout()).unwrap();
    orders.iter().map(|order| order.name().unwrap()).collect()
}

fn orders_file(node: &Node) -> std::path::PathBuf {
    node.layout().orders_folder().join("orders.json")
}

fn ready(node: &Node, order: &MpsOrder) -> Result<(), String> {
    readiness(node.layout(), &order.name().unwrap(), &Limits::of_order(order)).map_err(|why| why.to_string())
}

#[tokio::test]
#[cfg_attr(not(may_mount), ignore = "no right to mount here (root, CAP_SYS_ADMIN)")]
async fn daemon_of_claims_serves_while_it_is_ordered() {
    let node = Node::new();
    let (whole, part) = (order(&[1, 4], 30, true), order(&[6], 50, false));
    let names = write_orders(&node, &[1, 4, 6], &[whole.clone(), part.clone()]);
    let mut daemon = Daemon::start(&node);
    until(|| ready(&node, &whole).is_ok() && ready(&node, &part).is_ok()).await;
    assert_eq!((node.kept(&names[0], "threads"), node.kept(&names[1], "threads")), ("30.0".into(), "50.0".into()));
    assert_eq!((node.kept(&names[0], "memory-1"), node.kept(&names[1], "memory-0")), ("2048".into(), "".into()));
    let shown = format!("CUDA_VISIBLE_DEVICES={},{}", gpu(1), gpu(4));
    assert!(node.kept(&names[0], "environment").contains(&shown));
    // GPU 6 is not exclusive, because claims may have shares of it without MPS.
    let exclusive = BTreeSet::from([gpu(1), gpu(4)]);
    assert_eq!(exclusive_gpus(node.layout()).unwrap(), exclusive);
    // New orders do not disturb the daemons that stay.
    let (first, second) = (node.pid(&names[0]), node.pid(&names[1]));
    let third = order(&[7], 100, true);
    write_orders(&node, &[1, 4, 6, 7], &[whole.clone(), third.clone()]);
    until(|| ready(&node, &third).is_ok() && !runs(second)).await;
    assert_eq!((node.pid(&names[0]), ready(&node, &whole)), (first, Ok(())));
    assert!(ready(&node, &part).unwrap_err().contains("does not serve"));
    write_orders(&node, &[], &[]);
    daemon.logged("linkwise orders no MPS daemon on this node, waiting").await;
    until(|| !runs(first) && node.exclusive().is_empty()).await;
    assert_eq!(node.modes("DEFAULT").len(), 3);
    assert!(!orders_file(&node).exists());
}

#[tokio::test]
#[cfg_attr(not(may_mount), ignore = "no right to mount here (root, CAP_SYS_ADMIN)")]
async fn invalid_orders_change_nothing() {
    let node = Node::new();
    let good = order(&[1], 30, true);
    let [name] = &write_orders(&node, &[1], std::slice::from_ref(&good))[..] else { panic!() };
    let mut daemon = Daemon::start(&node);
    until(|| ready(&node, &good).is_ok()).await;
    let (pid, text) = (node.pid(name), fs::read_to_string(orders_file(&node)).unwrap());
    let one = gpu(1).to_string();
    let twice = r#""gpus": [{"gpu":"X"},{"gpu":"X"},{"#;
    let empty = r#"{"version":1,"gpus":[],"daemons":[{"gpus":[],"threadPercentage":1,"exclusive":true}]}"#;
    for (wrong, problem) in [
        ("{".to_owned(), "EOF"),
        (text.replace("\"version\": 1", "\"version\": 2"), "its version is 2; this linkwise reads 1"),
        (text.replace(": 30", ": 0"), "an order has 0 percent of the threads"),
        (text.replace(": 30", ": 101"), "an order has 101 percent of the threads"),
        (text.replace(": 2048", ": 0"), "an order has a memory limit of 0 MiB"),
        (text.replace("\"gpus\": [\n        {", twice), "a GPU is twice in the orders"),
        (text.replace(&one, "../../etc"), "'../../etc' is not a GPU UUID"),
        (empty.to_owned(), "an order names no GPU"),
        ("x".repeat(300 << 10), "longer than 262144 bytes"),
    ] {
        assert_ne!(wrong, text, "{problem}");
        fs::write(orders_file(&node), wrong).unwrap();
        let line = daemon.logged("MPS orders unreadable, keeping the previous ones").await;
        assert!(line.contains(problem), "{problem}: {line}");
        assert_eq!((node.pid(name), ready(&node, &good)), (pid, Ok(())));
    }
    fs::write(orders_file(&node), text).unwrap();
    write_orders(&node, &[], &[]);
    until(|| !runs(pid)).await;
}

#[tokio::test]
#[cfg_attr(not(may_mount), ignore = "no right to mount here (root, CAP_SYS_ADMIN)")]
async fn gpu_shared_by_a_resource_gets_no_daemon_of_claims() {
    let (node, all, own) = (Node::new(), ResourceName::gpu(), order(&[0, 5], 100, true));
    let resources: BTreeMap<ResourceName, Limits> = [(all.clone(), wanted(4))].into();
    let daemons = [(own.name().unwrap(), own.clone())].into();
    Orders { daemons, resources, ..Orders::default() }.write(node.layout()).unwrap();
    let mut daemon = Daemon::start(&node);
    let line = daemon.logged("nvidia.com/gpu shares its GPU by MPS").await;
    assert!(line.contains(&format!("dra.linkwise.dev/{}", gpu(0))), "{line}");
    until(|| readiness(node.layout(), &all, &wanted(4)).is_ok()).await;
    assert!(ready(&node, &own).is_err());
    // Once the resource is gone, the claim gets its daemon.
    write_orders(&node, &[0, 5], std::slice::from_ref(&own));
    until(|| ready(&node, &own).is_ok()).await;
}

#[tokio::test]
#[cfg_attr(not(may_mount), ignore = "no right to mount here (root, CAP_SYS_ADMIN)")]
async fn next_process_cleans_up_after_a_killed_one() {
    let node = Node::new();
    let (ends, stays) = (order(&[1], 30, true), order(&[2], 30, true));
    let names = write_orders(&node, &[1, 2], &[ends.clone(), stays.clone()]);
    let mut daemon = Daemon::start(&node);
    until(|| ready(&node, &ends).is_ok() && ready(&node, &stays).is_ok()).await;
    daemon.kill().await;
    assert!(ready(&node, &stays).unwrap_err().contains("is gone and left"));
    // The claim of GPU 1 ends meanwhile. That GPU has no order now, but is still exclusive.
    write_orders(&node, &[1, 2], std::slice::from_ref(&stays));
    assert_eq!(node.exclusive().len(), 2);
    let orphan = node.pid(&names[1]);
    let _daemon = Daemon::start(&node);
    until(|| ready(&node, &stays).is_ok() && !runs(orphan)).await;
    assert_eq!((node.modes("DEFAULT"), node.exclusive()), (vec![gpu(1).to_string()], vec![gpu(2).to_string()]));
}

/// The device number of a daemon's shared memory. Asserts that host and daemon see the same one.
fn shm(node: &Node, name: &ResourceName) -> u64 {
    let number = fs::metadata(node.layout().own_shm(name)).unwrap().dev();
    assert_eq!(node.kept(name, "shm"), number.to_string());
    number
}

#[tokio::test]
#[cfg_attr(not(may_mount), ignore = "no right to mount here (root, CAP_SYS_ADMIN)")]
async fn each_claim_has_its_own_shared_memory() {
    let node = Node::new();
    let (one, other) = (order(&[1], 30, true), order(&[2], 30, true));
    let names = write_orders(&node, &[1, 2], &[one.clone(), other.clone()]);
    let mut daemon = Daemon::start(&node);
    until(|| ready(&node, &one).is_ok() && ready(&node, &other).is_ok()).await;
    assert_eq!(shm_of_ready(node.layout(), &names[0], &Limits::of_order(&one)), Ok(MpsShm::Own));
    let (first, second) = (shm(&node, &names[0]), shm(&node, &names[1]));
    let common = fs::metadata("/dev/shm").unwrap().dev();
    assert!(first != second && first != common && second != common, "{first} {second} {common}");
    let left = |name: &ResourceName| node.layout().own_shm(name).join("left");
    names.iter().for_each(|name| fs::write(left(name), "by a client").unwrap());
    // A claim's shared memory survives its daemon, and the process that supervises the daemons.
    signal("KILL", node.pid(&names[0]));
    until(|| ready(&node, &one).is_err()).await;
    until(|| ready(&node, &one).is_ok()).await;
    daemon.kill().await;
    // One claim ends meanwhile.
    write_orders(&node, &[1, 2], std::slice::from_ref(&one));
    let _daemon = Daemon::start(&node);
    until(|| ready(&node, &one).is_ok() && !left(&names[1]).exists()).await;
    assert_eq!((shm(&node, &names[0]), left(&names[0]).exists()), (first, true));
    // The next claim gets new shared memory, without files of the previous claim.
    write_orders(&node, &[1, 2], &[]);
    until(|| !left(&names[0]).exists()).await;
    write_orders(&node, &[1, 2], std::slice::from_ref(&one));
    until(|| ready(&node, &one).is_ok()).await;
    let now = shm(&node, &names[0]);
    assert!(now != common && !left(&names[0]).exists(), "{now}");
}

#[tokio::test]
#[cfg_attr(not(may_mount), ignore = "no right to mount here (root, CAP_SYS_ADMIN)")]
async fn shared_memory_invisible_to_the_host_is_refused() {
    let (node, own) = (Node::new(), order(&[1], 30, true));
    write_orders(&node, &[1], std::slice::from_ref(&own));
    let mut daemon = Daemon::in_a_container_without_propagation(&node);
    let line = daemon.logged("MPS daemon failed").await;
    assert!(line.contains("set mountPropagation: Bidirectional"), "{line}");
    let why = || ready(&node, &own).unwrap_err();
    until(|| why().contains("the host would not see the mount")).await;
    write_orders(&node, &[], &[]);
    until(|| why() == "the MPS daemon does not serve").await;
}

#[tokio::test]
async fn older_releases_daemon_has_common_shared_memory() {
    let (node, own) = (Node::new(), order(&[1], 30, true));
    let (name, limits) = (own.name().unwrap(), Limits::of_order(&own));
    fs::create_dir_all(node.layout().resource(&name)).unwrap();
    let older = Limits { own_shm: false, ..limits.clone() };
    let _marker = Marker::set(&node.layout().marker(&name), &older).unwrap();
    let written = fs::read_to_string(node.layout().marker(&name)).unwrap();
    assert!(!written.contains("Shm"), "the marker of an older release names shared memory");
    assert_eq!(shm_of_ready(node.layout(), &name, &limits), Ok(MpsShm::Common));
}

#[test]
fn orders_without_an_mps_root_are_an_error() {
    let node = Node::new();
    let nowhere = linkwise_host::mps::Layout::new(node.layout().root().join("nowhere"));
    let resources: BTreeMap<ResourceName, Limits> = [(ResourceName::gpu(), wanted(4))].into();
    let orders = Orders { gpus: [gpu(0)].into(), resources, ..Orders::default() };
    assert_eq!(orders.write(&nowhere).unwrap_err().to_string(), "the MPS root is not mounted");
    // Empty orders need no MPS root.
    Orders::default().write(&nowhere).unwrap();
    assert_eq!(Orders::read(&nowhere).unwrap(), Orders::default());
    orders.write(node.layout()).unwrap();
    assert_eq!(Orders::read(node.layout()).unwrap(), orders);
}
