//! A takeover between two linkwise of which each takes the other for a newer one: a relay between them adds a word that
//! nobody knows before each word, and a key to it. The lock goes through the relay too.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use linkwise_kubelet_box::Connections;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

use super::node::{GPU, until};
use super::takeover::{admits, machine, of_pod, owner, stage};

/// How often each side has answered that it does not know a word: the owner, the standby.
type Answers = Arc<[AtomicUsize; 2]>;

/// Passes on what comes from one side until its end, as a newer version would say it.
fn relay(from: &UnixStream, to: &UnixStream, answers: &AtomicUsize) {
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [0; 1 << 16];
        let received = recvmsg(from, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC);
        let Some(text) = received.ok().map(|received| &bytes[..received.bytes]).filter(|text| !text.is_empty()) else {
            break;
        };
        let files = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(files) => Some(files.collect::<Vec<OwnedFd>>()),
            _ => None,
        });
        let unknown = b"{\"word\":\"unknown\"}\n";
        answers.fetch_add(text.windows(unknown.len()).filter(|part| part == unknown).count(), Ordering::SeqCst);
        // An answer is not to be answered, and a word may come right behind one. A record may come in several pieces.
        let mut word = text;
        while let Some(behind) = word.strip_prefix(unknown) {
            word = behind;
        }
        let answered = &text[..text.len() - word.len()];
        let newer = match word.strip_prefix(b"{") {
            Some(rest) => [answered, b"{\"word\":\"dance\",\"steps\":[1,2]}\n{\"tomorrow\":{\"a\":1},", rest].concat(),
            None => text.to_vec(),
        };
        let files = files.unwrap_or_default();
        let passed: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(passed.is_empty() || control.push(SendAncillaryMessage::ScmRights(&passed)));
        let mut rest = newer.as_slice();
        while !rest.is_empty() {
            let Ok(sent) = sendmsg(to, &[IoSlice::new(rest)], &mut control, SendFlags::NOSIGNAL) else { return };
            control.clear();
            rest = &rest[sent..];
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

/// The state folder of a standby, in which the owner of another folder is reached through a relay.
fn folder_behind_a_relay(folder: PathBuf, owners: &Path) -> (PathBuf, Answers) {
    std::fs::create_dir(&folder).unwrap();
    symlink(owners.join("owner.lock"), folder.join("owner.lock")).unwrap();
    let listener = UnixListener::bind(folder.join("takeover.sock")).unwrap();
    let (answers, owners) = (Answers::default(), owners.join("takeover.sock"));
    let counted = Arc::clone(&answers);
    thread::spawn(move || {
        for standby in listener.incoming() {
            let standby = standby.unwrap();
            let owner = UnixStream::connect(&owners).unwrap();
            let (owner_too, standby_too) = (owner.try_clone().unwrap(), standby.try_clone().unwrap());
            let (of_owner, of_standby) = (Arc::clone(&counted), Arc::clone(&counted));
            thread::spawn(move || relay(&owner, &standby, &of_owner[0]));
            thread::spawn(move || relay(&standby_too, &owner_too, &of_standby[1]));
        }
    });
    (folder, answers)
}

#[tokio::test]
async fn words_of_a_newer_version_are_answered_and_no_more() {
    let setup = machine();
    let (owner, kubelet) = owner(&setup, Connections::ByResource).await;
    let owners = setup.kubelet_socket.with_file_name("linkwise");
    let (folder, answers) = folder_behind_a_relay(setup.at("behind"), &owners);
    let standby = of_pod(&setup, "second", &["--state-dir", folder.to_str().unwrap()]);
    stage(&standby, "Owning").await;
    owner.said("another linkwise has taken over this node").await;
    admits(&kubelet, "pod").await;
    assert!(kubelet.gaps(GPU).is_empty() && kubelet.violations().is_empty());
    // The relay counts on threads of its own.
    until(async || {
        let answers = answers.each_ref().map(|count| count.load(Ordering::SeqCst));
        let both = answers.iter().all(|answers| *answers > 0);
        if both { Ok(()) } else { Err(format!("both sides heard what they do not know: {answers:?}")) }
    })
    .await;
}
