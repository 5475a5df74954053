//! Who may call our sockets: the rule, and who it is that calls.
//!
//! Pure but for [`Peer::of`], which asks the kernel. `connection` applies it to each connection before a byte is read.

use std::collections::BTreeSet;
use std::io;

use tokio::net::UnixStream;

/// Root's uid.
const ROOT: u32 = 0;

/// The uids that may call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Callers {
    /// Root and our own uid may.
    usual: bool,
    uids: BTreeSet<u32>,
}

impl Default for Callers {
    /// Root and our own uid.
    fn default() -> Self {
        Self::and([])
    }
}

impl Callers {
    /// Root, our own uid and these.
    pub fn and(uids: impl IntoIterator<Item = u32>) -> Self {
        Self { usual: true, uids: uids.into_iter().collect() }
    }

    /// These and nobody else, not even root.
    pub fn only(uids: impl IntoIterator<Item = u32>) -> Self {
        Self { usual: false, uids: uids.into_iter().collect() }
    }

    /// Whether a caller with this uid is served by a process that has the uid `own`.
    pub fn admit(&self, uid: u32, own: u32) -> bool {
        self.uids.contains(&uid) || (self.usual && (uid == ROOT || uid == own))
    }
}

/// Who is at the other end of a Unix socket, as the kernel says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Peer {
    pub uid: u32,
    /// 0 for a process that our PID namespace does not have, such as the kubelet seen from a container.
    pub pid: Option<i32>,
}

impl Peer {
    /// The process that connected; of a connection of ours, the process that listens.
    pub fn of(stream: &UnixStream) -> io::Result<Self> {
        let cred = stream.peer_cred()?;
        Ok(Self { uid: cred.uid(), pid: cred.pid() })
    }

    /// Our own uid, by the kernel's word for it.
    pub fn own_uid() -> io::Result<u32> {
        Ok(Self::of(&UnixStream::pair()?.0)?.uid)
    }

    /// Whether both can be one process, as far as the kernel tells.
    pub fn may_be(&self, other: &Self) -> bool {
        self.uid == other.uid && (self.pid == other.pid || self.pid.is_none() || other.pid.is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_ourselves_and_who_was_named_may_call() {
        let usual = Callers::default();
        assert!(usual.admit(0, 1000) && usual.admit(1000, 1000));
        assert!(!usual.admit(1001, 1000) && !usual.admit(u32::MAX, 0) && !usual.admit(1000, 0));
        let more = Callers::and([7, 65_534]);
        assert!([0, 7, 1000, 65_534].iter().all(|uid| more.admit(*uid, 1000)) && !more.admit(8, 1000));
        let strict = Callers::only([7]);
        assert!(strict.admit(7, 1000) && !strict.admit(0, 1000) && !strict.admit(1000, 1000) && !strict.admit(0, 0));
    }

    #[test]
    fn another_process_or_user_is_not_the_one_that_listens() {
        let peer = |uid, pid| Peer { uid, pid };
        assert!(peer(0, Some(7)).may_be(&peer(0, Some(7))) && peer(0, Some(0)).may_be(&peer(0, Some(0))));
        assert!(peer(0, None).may_be(&peer(0, Some(7))) && peer(0, Some(7)).may_be(&peer(0, None)));
        assert!(!peer(0, Some(7)).may_be(&peer(0, Some(8))) && !peer(0, Some(7)).may_be(&peer(1, Some(7))));
    }
}
