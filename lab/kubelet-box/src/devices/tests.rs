//! The books alone, without sockets and runtime.

use super::*;

const GPU: &str = "nvidia.com/gpu";

fn ids(list: &str) -> Ids {
    list.split_whitespace().map(String::from).collect()
}

/// A device list from `"a b! c"`: `!` marks the unhealthy devices.
fn advertised(devices: &str) -> Vec<wire::Device> {
    let device = |word: &str| wire::Device {
        id: word.trim_end_matches('!').into(),
        health: if word.ends_with('!') { "Unhealthy" } else { "Healthy" }.into(),
        topology: None,
    };
    devices.split_whitespace().map(device).collect()
}

fn connected(devices: &str) -> (Book, ClientId) {
    let mut book = Book::default();
    book.kubelet_started(true);
    let client = connect(&mut book);
    book.list(GPU, advertised(devices));
    (book, client)
}

fn connect(book: &mut Book) -> ClientId {
    connect_at(book, "gpu.sock").unwrap()
}

fn connect_at(book: &mut Book, socket: &str) -> Option<ClientId> {
    let id = book.register_client(GPU, socket);
    let client = Client { id, socket: socket.to_owned() };
    if book.plugin_connected(GPU, &client, wire::DevicePluginOptions::default()).is_err() {
        book.deregister_client(GPU, socket);
        return None;
    }
    book.stream_opened(GPU, id);
    Some(id)
}

/// All steps of a disconnect, without another event between them.
fn disconnect(book: &mut Book, socket: &str, ended: Option<ClientId>) -> Option<(ClientId, Option<StopStamp>)> {
    ended.into_iter().for_each(|ended| book.stream_ended(ended));
    let client = book.client(GPU, socket)?;
    book.deregister_client(GPU, &client.socket);
    Some((client.id, book.plugin_disconnected(GPU, &client.socket, |_| 0)))
}

fn stop(book: &mut Book) -> StopStamp {
    disconnect(book, "gpu.sock", None).unwrap().1.unwrap()
}

fn place(pod: &str) -> Place {
    Place { pod: pod.into(), container: "main".into(), resource: GPU.into() }
}

fn hold(book: &mut Book, pod: &str, devices: &str) {
    let devices = devices.split_whitespace().map(String::from).collect();
    book.commit(place(pod), Allocation { devices, ..Allocation::default() });
}

fn gpu(book: &Book) -> ResourceState {
    book.snapshot().resources[GPU].clone()
}

/// The pods in the checkpoint's text, if the file would be written now.
fn written(book: &mut Book) -> Option<Vec<String>> {
    let text: Value = serde_json::from_str(&book.checkpoint()?).unwrap();
    let entries = text["Data"]["PodDeviceEntries"].as_array().unwrap();
    Some(entries.iter().map(|entry| entry["PodUID"].as_str().unwrap().to_owned()).collect())
}

#[test]
fn checkpoint_keeps_ended_pod_until_holders_listed() {
    let (mut book, _) = connected("a b c");
    hold(&mut book, "one", "a");
    hold(&mut book, "two", "b");
    assert_eq!(written(&mut book).unwrap(), ["one", "two"]);
    book.remove_pod("one");
    assert_eq!(written(&mut book), None, "a pod's end writes nothing");
    book.list(GPU, advertised("a b c"));
    assert_eq!(written(&mut book).unwrap(), ["one", "two"], "the holders have not been listed");
    book.update_allocated();
    assert_eq!(written(&mut book), None, "a list of the holders changes the memory, not the file");
    book.list(GPU, advertised("a b c"));
    assert_eq!(written(&mut book).unwrap(), ["two"]);
    let stamp = stop(&mut book);
    book.remove_pod("two");
    book.update_allocated();
    book.expire(GPU, stamp);
    assert_eq!(written(&mut book).unwrap(), [""; 0], "the removal of the resource writes the file");
}

#[test]
fn resource_without_list_has_no_pool() {
    let mut book = Book::default();
    connect(&mut book);
    assert!(book.pool(GPU).is_none() && book.healthy(GPU).is_none());
    book.list(GPU, advertised(""));
    assert_eq!(book.pool(GPU).unwrap().available, ids(""));
}

#[test]
fn plugin_violations_are_recorded_once() {
    let (mut book, _) = connected("a");
    let long = "x".repeat(64);
    let mut devices = advertised(&format!("a a {} {long}", "y".repeat(63)));
    devices.push(wire::Device { id: "z".into(), health: "healthy".into(), topology: None });
    for _ in 0..2 {
        book.list(GPU, devices.clone());
    }
    let violation = |id: &str, kind| Violation { resource: GPU.to_owned(), id: id.to_owned(), kind };
    let expected = vec![
        violation("a", ViolationKind::DuplicateId),
        violation(&long, ViolationKind::IdTooLong),
        violation("z", ViolationKind::UnknownHealth("healthy".into())),
    ];
    assert_eq!(book.snapshot().violations, expected);
    assert_eq!((gpu(&book).healthy, gpu(&book).unhealthy), (ids(&format!("a {}", "y".repeat(63))), ids("z")));
}

#[test]
fn held_id_may_become_unhealthy_not_vanish() {
    let (mut book, _) = connected("a b");
    hold(&mut book, "pod", "a");
    book.list(GPU, advertised("a! b"));
    assert_eq!(book.snapshot().violations, []);
    book.list(GPU, advertised("b"));
    let gone = |pod: &str, id: &str| Violation {
        resource: GPU.into(),
        id: id.into(),
        kind: ViolationKind::VanishedWhileHeld(place(pod)),
    };
    assert_eq!(book.snapshot().violations, [gone("pod", "a")]);
    book.list(GPU, advertised(""));
    hold(&mut book, "late", "b");
    assert_eq!(book.snapshot().violations, [gone("pod", "a"), gone("late", "b")], "vanished during Allocate");
}

#[test]
fn grace_period_ends_no_newer_registration() {
    let (mut book, _) = connected("a");
    let old = stop(&mut book);
    connect(&mut book);
    book.expire(GPU, old);
    assert!(!gpu(&book).removed);
    let new = stop(&mut book);
    book.expire(GPU, old);
    assert!(!gpu(&book).removed, "a later stop has its own grace period");
    book.expire(GPU, new);
    assert!(gpu(&book).removed);
}

#[test]
fn failed_registration_forgets_previous_connection() {
    let (mut book, old) = connected("a");
    book.register_client(GPU, "new.sock");
    book.deregister_client(GPU, "new.sock");
    assert!(gpu(&book).connected, "the old stream goes on");
    assert!(disconnect(&mut book, "gpu.sock", Some(old)).is_none());
    assert_eq!(gpu(&book).healthy, ids("a"), "as in a kubelet, the end of the stream goes unnoticed");
}

/// The books of a kubelet from 1.37 on, with these sockets connected.
fn by_socket(sockets: &[&str]) -> (Book, Vec<ClientId>) {
    let mut book = Book::new(Connections::BySocket);
    book.kubelet_started(true);
    let clients = sockets.iter().map(|socket| connect_at(&mut book, socket).unwrap()).collect();
    book.list(GPU, advertised("a b"));
    (book, clients)
}

#[test]
fn by_socket_end_of_new_gives_calls_back_to_old() {
    let (mut book, clients) = by_socket(&["old.sock", "new.sock"]);
    assert_eq!(disconnect(&mut book, "new.sock", Some(clients[1])), Some((clients[1], None)));
    assert_eq!(book.endpoint(GPU).unwrap().client, Some(clients[0]));
    assert!(gpu(&book).connected && gpu(&book).healthy == ids("a b"));
}

#[test]
fn registration_within_a_disconnect_is_stopped() {
    let (mut book, old) = connected("a");
    book.stream_ended(old);
    let found = book.client(GPU, "gpu.sock").unwrap();
    book.deregister_client(GPU, &found.socket);
    let new = connect(&mut book);
    book.list(GPU, advertised("a"));
    assert!(book.is_usable(GPU));
    assert!(book.plugin_disconnected(GPU, &found.socket, |_| 0).is_some());
    assert_eq!((gpu(&book).open_streams, gpu(&book).connected, book.is_usable(GPU)), (1, false, false));
    assert_eq!(
        book.client(GPU, "gpu.sock").map(|client| client.id),
        Some(new),
        "the books still know the new connection"
    );
}

#[test]
fn by_resource_end_of_old_stops_new_socket() {
    let (mut book, old) = connected("a");
    let new = connect_at(&mut book, "new.sock").unwrap();
    assert_eq!(disconnect(&mut book, "gpu.sock", Some(old)).map(|(client, _)| client), Some(new));
    assert!(!book.is_usable(GPU) && book.client(GPU, "new.sock").is_none());
    connect(&mut book);
    book.register_client(GPU, "failed.sock");
    book.deregister_client(GPU, "failed.sock");
    assert_eq!(book.client(GPU, "gpu.sock"), None, "a failed registration forgets the connection of another socket");
}
