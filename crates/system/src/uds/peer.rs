//! The users that may connect to a socket of ours, and the process that did.

use std::io;

use tokio::net::UnixStream;

const ROOT: u32 = 0;

/// The users that may connect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Callers {
    only: Option<u32>,
}

impl Callers {
    /// Allows this user only, not even root: for tests, which cannot call as another user.
    pub fn only(uid: u32) -> Self {
        Self { only: Some(uid) }
    }

    /// Returns true if a process of user `own` serves user `uid`: root and its own user, or the one user of `only`.
    pub fn admits(self, uid: u32, own: u32) -> bool {
        self.only.map_or(uid == ROOT || uid == own, |only| uid == only)
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
    fn root_and_own_user_may_call() {
        let usual = Callers::default();
        assert!(usual.admits(0, 1000) && usual.admits(1000, 1000));
        assert!(!usual.admits(1001, 1000) && !usual.admits(u32::MAX, 0) && !usual.admits(1000, 0));
        let strict = Callers::only(7);
        assert!(
            strict.admits(7, 1000) && !strict.admits(0, 1000) && !strict.admits(1000, 1000) && !strict.admits(0, 0)
        );
    }

    #[test]
    fn another_process_or_user_is_not_the_listener() {
        let peer = |uid, pid| Peer { uid, pid };
        assert!(peer(0, Some(7)).may_be(&peer(0, Some(7))) && peer(0, Some(0)).may_be(&peer(0, Some(0))));
        assert!(peer(0, None).may_be(&peer(0, Some(7))) && peer(0, Some(7)).may_be(&peer(0, None)));
        assert!(!peer(0, Some(7)).may_be(&peer(0, Some(8))) && !peer(0, Some(7)).may_be(&peer(1, Some(7))));
    }
}
