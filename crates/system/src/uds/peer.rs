//! The users that may connect to a socket of ours, and the process that did.

use std::collections::BTreeSet;
use std::io;

use tokio::net::UnixStream;

const ROOT: u32 = 0;

/// The users that may connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Callers {
    /// Set if root and linkwise's own user may connect.
    usual: bool,
    uids: BTreeSet<u32>,
}

impl Default for Callers {
    fn default() -> Self {
        Self::and([])
    }
}

impl Callers {
    /// Allows root, linkwise's own user and these.
    pub fn and(uids: impl IntoIterator<Item = u32>) -> Self {
        Self { usual: true, uids: uids.into_iter().collect() }
    }

    /// Allows only these; not even root.
    pub fn only(uids: impl IntoIterator<Item = u32>) -> Self {
        Self { usual: false, uids: uids.into_iter().collect() }
    }

    /// Returns true if a process of user `own` serves a caller of user `uid`.
    pub fn admit(&self, uid: u32, own: u32) -> bool {
        self.uids.contains(&uid) || (self.usual && (uid == ROOT || uid == own))
    }
}

/// The process at the other end of a Unix socket, as the kernel reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its user.
    pub uid: u32,
    /// Its pid; 0 for a process outside our PID namespace, such as the kubelet seen from a container.
    pub pid: Option<i32>,
}

impl Peer {
    /// The process that connected; on a connection that we opened, the process that listens.
    pub(super) fn of(stream: &UnixStream) -> io::Result<Self> {
        let cred = stream.peer_cred()?;
        Ok(Self { uid: cred.uid(), pid: cred.pid() })
    }

    /// Returns true if both may be one process; an unknown pid matches any.
    pub fn may_be(&self, other: &Self) -> bool {
        self.uid == other.uid && (self.pid == other.pid || self.pid.is_none() || other.pid.is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_own_user_and_named_users_may_call() {
        let usual = Callers::default();
        assert!(usual.admit(0, 1000) && usual.admit(1000, 1000));
        assert!(!usual.admit(1001, 1000) && !usual.admit(u32::MAX, 0) && !usual.admit(1000, 0));
        let more = Callers::and([7, 65_534]);
        assert!([0, 7, 1000, 65_534].iter().all(|uid| more.admit(*uid, 1000)) && !more.admit(8, 1000));
        let strict = Callers::only([7]);
        assert!(strict.admit(7, 1000) && !strict.admit(0, 1000) && !strict.admit(1000, 1000) && !strict.admit(0, 0));
    }

    #[test]
    fn another_process_or_user_is_not_the_listener() {
        let peer = |uid, pid| Peer { uid, pid };
        assert!(peer(0, Some(7)).may_be(&peer(0, Some(7))) && peer(0, Some(0)).may_be(&peer(0, Some(0))));
        assert!(peer(0, None).may_be(&peer(0, Some(7))) && peer(0, Some(7)).may_be(&peer(0, None)));
        assert!(!peer(0, Some(7)).may_be(&peer(0, Some(8))) && !peer(0, Some(7)).may_be(&peer(1, Some(7))));
    }
}
