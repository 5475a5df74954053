//! The state folder's lock, if the disk hangs or the folder cannot be locked at first: there are never two owners, and
//! linkwise serves or stands by once the disk answers.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::node::{GPU, KUBELETS, Setup, fifo, machine, ready, wait_registered};
use crate::upgrade::fleet::{GPUS, World, wait_stage};

/// The most bytes of the lock's file that linkwise reads: a pipe that gives this many has answered.
const MAX_CONTENT: usize = 1 << 16;

fn state_folder(setup: &Setup) -> PathBuf {
    setup.kubelet_socket.with_file_name("linkwise")
}

/// Makes the lock's file a pipe, so that reading it hangs.
fn hang(folder: &Path) -> PathBuf {
    let pipe = folder.join("owner.lock");
    fifo(&pipe);
    pipe
}

/// Answers the read that hangs, with bytes that name no owner.
fn answer(pipe: &Path) {
    OpenOptions::new().read(true).write(true).open(pipe).unwrap().write_all(&[b'-'; MAX_CONTENT]).unwrap();
}

#[tokio::test]
async fn hung_disk_is_waited_for_and_makes_no_second_owner() {
    let world = World::new(KUBELETS[0]);
    let pipe = hang(&state_folder(&world.setup));
    let kubelet = &world.kubelet;
    let first = world.spawn("first");
    first.said("the state folder does not answer").await;
    ready(first.up().await, 503, "").await;
    assert!(!kubelet.state().resources.contains_key(GPU), "linkwise serves before it has the lock");
    answer(&pipe);
    wait_stage(&first, "Owning").await;
    wait_registered(kubelet, 1, GPUS.len()).await;
    // The second waits for the disk too, learns that the lock is held, and takes over.
    let second = world.spawn("second");
    second.said("the state folder does not answer").await;
    ready(second.up().await, 503, "").await;
    answer(&pipe);
    second.said("another linkwise serves this node: standing by").await;
    answer(&pipe);
    first.said("another linkwise has taken over this node").await;
    world.admit("after").await.unwrap();
}

#[tokio::test]
async fn owner_without_a_lock_takes_it_later() {
    let setup = Setup::with(&machine(&GPUS));
    let folder = state_folder(&setup);
    // A file in the folder's place keeps linkwise from making the folder.
    std::fs::create_dir_all(folder.parent().unwrap()).unwrap();
    File::create(&folder).unwrap();
    let world = World::of(setup, KUBELETS[0]);
    let kubelet = &world.kubelet;
    let first = world.spawn("first");
    first.said("cannot lock the state folder").await;
    wait_registered(kubelet, 1, GPUS.len()).await;
    // Now there is a folder, in which another process has the lock.
    let other = folder.with_file_name("other");
    std::fs::create_dir(&other).unwrap();
    let lock = File::create(other.join("owner.lock")).unwrap();
    lock.try_lock().unwrap();
    std::fs::remove_file(&folder).unwrap();
    std::fs::rename(&other, &folder).unwrap();
    first.said("another linkwise has the lock").await;
    ready(first.up().await, 503, "").await;
    kubelet.wait(|state| state.resources[GPU].open_streams == 0).await.unwrap();
    drop(lock);
    wait_registered(kubelet, 2, GPUS.len()).await;
    let _second = world.spawn("second");
    first.said("another linkwise has taken over this node").await;
}
