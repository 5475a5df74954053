//! Control daemons for GPUs of claims, which the plugin orders by a file under the MPS root.

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

/// The GPUs of the machine, by index.
fn gpu(index: usize) -> GpuUuid {
    linkwise_host::machines::load(MACHINE).unwrap().observed.gpus[index].uuid.clone()
}

fn order(gpus: &[usize], thread_percentage: u32, exclusive: bool) -> MpsOrder {
    let gpus = gpus.iter().map(|index| MpsOrderGpu { gpu: gpu(*index), mib: exclusive.then_some(2048) }).collect();
    MpsOrder { gpus, thread_percentage, exclusive }
}

/// Writes what the plugin would: the GPUs that DRA has, and the daemons for claims.
fn put(node: &Node, dra: &[usize], orders: &[MpsOrder]) -> Vec<ResourceName> {
    let daemons = orders.iter().map(|order| (order.name().unwrap(), order.clone())).collect();
    let gpus = dra.iter().map(|index| gpu(*index)).collect();
    Orders { gpus, daemons, ..Orders::default() }.write(node.layout()).unwrap();
    orders.iter().map(|order| order.name().unwrap()).collect()
}

fn file(node: &Node) -> std::path::PathBuf {
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
    let names = put(&node, &[1, 4, 6], &[whole.clone(), part.clone()]);
    let mut daemon = Daemon::start(&node);
    until(|| ready(&node, &whole).is_ok() && ready(&node, &part).is_ok()).await;
    assert_eq!((node.kept(&names[0], "threads"), node.kept(&names[1], "threads")), ("30.0".into(), "50.0".into()));
    assert_eq!((node.kept(&names[0], "memory-1"), node.kept(&names[1], "memory-0")), ("2048".into(), "".into()));
    let shown = format!("CUDA_VISIBLE_DEVICES={},{}", gpu(1), gpu(4));
    assert!(node.kept(&names[0], "environment").contains(&shown));
    // A GPU of which some claims have shares without MPS stays open.
    let exclusive = BTreeSet::from([gpu(1), gpu(4)]);
    assert_eq!(exclusive_gpus(node.layout()).unwrap(), exclusive);
    // Another order leaves those that stay alone.
    let (first, second) = (node.pid(&names[0]), node.pid(&names[1]));
    let third = order(&[7], 100, true);
    put(&node, &[1, 4, 6, 7], &[whole.clone(), third.clone()]);
    until(|| ready(&node, &third).is_ok() && !runs(second)).await;
    assert_eq!((node.pid(&names[0]), ready(&node, &whole)), (first, Ok(())));
    assert!(ready(&node, &part).unwrap_err().contains("does not serve"));
    put(&node, &[], &[]);
    daemon.logged("linkwise orders no MPS daemon on this node, waiting").await;
    until(|| !runs(first) && node.exclusive().is_empty()).await;
    assert_eq!(node.modes("DEFAULT").len(), 3);
    assert!(!file(&node).exists());
}

#[tokio::test]
#[cfg_attr(not(may_mount), ignore = "no right to mount here (root, CAP_SYS_ADMIN)")]
async fn orders_that_are_wrong_change_nothing() {
    let node = Node::new();
    let good = order(&[1], 30, true);
    let [name] = &put(&node, &[1], std::slice::from_ref(&good))[..] else { panic!() };
    let mut daemon = Daemon::start(&node);
    until(|| ready(&node, &good).is_ok()).await;
    let (pid, text) = (node.pid(name), fs::read_to_string(file(&node)).unwrap());
    let one = gpu(1).to_string();
    let empty = r#"{"version":1,"gpus":[],"daemons":[{"gpus":[],"threadPercentage":1,"exclusive":true}]}"#;
    for (wrong, words) in [
        ("{".to_owned(), "EOF"),
        (text.replace("\"version\": 1", "\"version\": 2"), "its version is 2; this linkwise reads 1"),
        (text.replace(": 30", ": 0"), "an order has 0 percent of the threads"),
        (text.replace(": 30", ": 101"), "an order has 101 percent of the threads"),
        (text.replace(": 2048", ": 0"), "an order has a memory limit of 0 MiB"),
        (
            text.replace("\"gpus\": [\n        {", "\"gpus\": [{\"gpu\":\"X\"},{\"gpu\":\"X\"},{"),
            "a GPU is twice in the orders",
        ),
        (text.replace(&one, "../../etc"), "'../../etc' is not a GPU UUID"),
        (empty.to_owned(), "an order names no GPU"),
        ("x".repeat(300 << 10), "longer than 262144 bytes"),
    ] {
        assert_ne!(wrong, text, "{words}");
        fs::write(file(&node), wrong).unwrap();
        let line = daemon.logged("MPS orders unreadable, keeping the previous ones").await;
        assert!(line.contains(words), "{words}: {line}");
        assert_eq!((node.pid(name), ready(&node, &good)), (pid, Ok(())));
    }
    fs::write(file(&node), text).unwrap();
    put(&node, &[], &[]);
    until(|| !runs(pid)).await;
}

#[tokio::test]
#[cfg_attr(not(may_mount), ignore = "no right to mount here (root, CAP_SYS_ADMIN)")]
async fn claims_gpu_that_a_resource_shares_gets_no_daemon() {
    let (node, all, own) = (Node::new(), ResourceName::gpu(), order(&[0, 5], 100, true));
    let resources: BTreeMap<ResourceName, Limits> = [(all.clone(), wanted(4))].into();
    let daemons = [(own.name().unwrap(), own.clone())].into();
    Orders { daemons, resources, ..Orders::default() }.write(node.layout()).unwrap();
    let mut daemon = Daemon::start(&node);
    let line = daemon.logged("nvidia.com/gpu shares its GPU by MPS").await;
    assert!(line.contains(&format!("dra.linkwise.dev/{}", gpu(0))), "{line}");
    until(|| readiness(node.layout(), &all, &wanted(4)).is_ok()).await;
    assert!(ready(&node, &own).is_err());
    // The resource is gone: the claim gets its daemon.
    put(&node, &[0, 5], std::slice::from_ref(&own));
    until(|| ready(&node, &own).is_ok()).await;
}

#[tokio::test]
#[cfg_attr(not(may_mount), ignore = "no right to mount here (root, CAP_SYS_ADMIN)")]
async fn killed_process_leaves_nothing_that_the_next_does_not_end() {
    let node = Node::new();
    let (gone, stays) = (order(&[1], 30, true), order(&[2], 30, true));
    let names = put(&node, &[1, 2], &[gone.clone(), stays.clone()]);
    let mut daemon = Daemon::start(&node);
    until(|| ready(&node, &gone).is_ok() && ready(&node, &stays).is_ok()).await;
    daemon.kill().await;
    assert!(ready(&node, &stays).unwrap_err().contains("is gone and left"));
    // The claim of the one ends meanwhile. Its GPU, which nothing serves, is still exclusive.
    put(&node, &[1, 2], std::slice::from_ref(&stays));
    assert_eq!(node.exclusive().len(), 2);
    let orphan = node.pid(&names[1]);
    let _daemon = Daemon::start(&node);
    until(|| ready(&node, &stays).is_ok() && !runs(orphan)).await;
    assert_eq!((node.modes("DEFAULT"), node.exclusive()), (vec![gpu(1).to_string()], vec![gpu(2).to_string()]));
}

/// The device numbers of a daemon's shared memory: as the host has it, and as the daemon has it.
fn shm(node: &Node, name: &ResourceName) -> (u64, u64) {
    (fs::metadata(node.layout().own_shm(name)).unwrap().dev(), node.kept(name, "shm").parse().unwrap())
}

#[tokio::test]
#[cfg_attr(not(may_mount), ignore = "no right to mount here (root, CAP_SYS_ADMIN)")]
async fn claims_have_shared_memory_of_their_own() {
    let node = Node::new();
    let (one, other) = (order(&[1], 30, true), order(&[2], 30, true));
    let names = put(&node, &[1, 2], &[one.clone(), other.clone()]);
    let mut daemon = Daemon::start(&node);
    until(|| ready(&node, &one).is_ok() && ready(&node, &other).is_ok()).await;
    assert_eq!(shm_of_ready(node.layout(), &names[0], &Limits::of_order(&one)), Ok(MpsShm::Own));
    let (first, second) = (shm(&node, &names[0]), shm(&node, &names[1]));
    let common = fs::metadata("/dev/shm").unwrap().dev();
    assert!(first.0 == first.1 && second.0 == second.1, "{first:?} {second:?}");
    assert!(first != second && first.0 != common && second.0 != common, "{first:?} {second:?} {common}");
    let left = |name: &ResourceName| node.layout().own_shm(name).join("left");
    names.iter().for_each(|name| fs::write(left(name), "by a client").unwrap());
    // Containers of a claim find it again after a daemon and after the daemons' process.
    signal("KILL", node.pid(&names[0]));
    until(|| ready(&node, &one).is_err()).await;
    until(|| ready(&node, &one).is_ok()).await;
    daemon.kill().await;
    // One claim ends meanwhile.
    put(&node, &[1, 2], std::slice::from_ref(&one));
    let _daemon = Daemon::start(&node);
    until(|| ready(&node, &one).is_ok() && !left(&names[1]).exists()).await;
    assert_eq!((shm(&node, &names[0]), left(&names[0]).exists()), (first, true));
    // The next claim gets another one, and finds nothing of the last.
    put(&node, &[1, 2], &[]);
    until(|| !left(&names[0]).exists()).await;
    put(&node, &[1, 2], std::slice::from_ref(&one));
    until(|| ready(&node, &one).is_ok()).await;
    let now = shm(&node, &names[0]);
    assert!(now.0 == now.1 && now.0 != common && !left(&names[0]).exists(), "{now:?}");
}

#[tokio::test]
#[cfg_attr(not(may_mount), ignore = "no right to mount here (root, CAP_SYS_ADMIN)")]
async fn shared_memory_that_the_host_would_not_see_is_refused() {
    let (node, own) = (Node::new(), order(&[1], 30, true));
    put(&node, &[1], std::slice::from_ref(&own));
    let mut daemon = Daemon::in_a_container_without_propagation(&node);
    let line = daemon.logged("MPS daemon failed").await;
    assert!(line.contains("set mountPropagation: Bidirectional"), "{line}");
    let why = || ready(&node, &own).unwrap_err();
    until(|| why().contains("the host would not see the mount")).await;
    put(&node, &[], &[]);
    until(|| why() == "the MPS daemon does not serve").await;
}

#[tokio::test]
async fn daemon_of_an_older_release_has_the_shared_memory_of_all() {
    let (node, own) = (Node::new(), order(&[1], 30, true));
    let (name, limits) = (own.name().unwrap(), Limits::of_order(&own));
    fs::create_dir_all(node.layout().resource(&name)).unwrap();
    let older = Limits { own_shm: false, ..limits.clone() };
    let _marker = Marker::set(&node.layout().marker(&name), &older).unwrap();
    assert!(
        !fs::read_to_string(node.layout().marker(&name)).unwrap().contains("Shm"),
        "as the older release writes it"
    );
    assert_eq!(shm_of_ready(node.layout(), &name, &limits), Ok(MpsShm::Common));
}

#[test]
fn orders_without_an_mps_root_are_an_error() {
    let node = Node::new();
    let nowhere = linkwise_host::mps::Layout::new(node.layout().root().join("nowhere"));
    let resources: BTreeMap<ResourceName, Limits> = [(ResourceName::gpu(), wanted(4))].into();
    let orders = Orders { gpus: [gpu(0)].into(), resources, ..Orders::default() };
    assert_eq!(orders.write(&nowhere).unwrap_err().to_string(), "the MPS root is not mounted");
    // Nothing to order takes none.
    Orders::default().write(&nowhere).unwrap();
    assert_eq!(Orders::read(&nowhere).unwrap(), Orders::default());
    orders.write(node.layout()).unwrap();
    assert_eq!(Orders::read(node.layout()).unwrap(), orders);
}
