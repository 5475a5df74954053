//! The messages of a takeover: a JSON object a line, over a Unix socket that root and linkwise's own user may use. The
//! lock travels with the message that hands it over.
//!
//! Either side may be older or newer: keys and messages that a version does not know are skipped.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};
use tokio::io::Interest;
use tokio::net::UnixStream;

/// The longest line, in bytes; a health record has 1 MiB at most.
const MAX_LINE: usize = 2 << 20;

/// A message of one side to the other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "word", rename_all = "kebab-case")]
pub enum Message {
    /// A standby that could serve asks to take over.
    TakeOver(StandbyInfo),
    /// A standby that sees no GPU asks for the place of an owner that has no driver either.
    TakePlace(StandbyInfo),
    /// The owner will hand over, and waits for [`Self::Joined`].
    Agreed,
    /// The owner keeps its place, because it has the driver. Version 0.1.0 also sends `refused`, when it refuses for
    /// the moment.
    #[serde(alias = "refused")]
    KeepPlace,
    /// The kubelet calls the standby's DRA plugin, or the standby no longer waits for that.
    Joined,
    /// The owner's health record. The lock comes with it; the owner writes no file any more.
    Record {
        /// The health record, of this version or another; null without one.
        #[serde(default)]
        record: serde_json::Value,
        /// The owner's last scan, if there is one, for a standby that takes its place; otherwise null.
        #[serde(default, skip_serializing_if = "serde_json::Value::is_null")]
        seen: serde_json::Value,
        /// True if NVML has been unavailable to the owner for the grace period.
        #[serde(default)]
        away: bool,
    },
    /// Every plugin of the standby is registered: the owner may end its own. The owner hangs up when they have ended.
    Serving,
    /// The owner takes the node back: the standby stops serving.
    Back,
    /// The plugins of an owner of version 0.1.0 have ended. That owner waits for [`Self::Done`].
    Ended,
    /// The answer to [`Self::Ended`].
    Done,
    /// A message that this version does not know.
    #[serde(other, skip_serializing)]
    Other,
}

/// The standby that wants to take over.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StandbyInfo {
    pub version: String,
    /// The UID of its pod.
    pub pod: String,
    /// Always true, so that an owner of version 0.1.0 waits for [`Message::Joined`].
    pub joins: bool,
}

/// A connection between a standby and the owner.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    /// The received bytes that are not a whole line yet.
    buffer: Vec<u8>,
    /// The received lock, until the line with which it came is whole.
    passed: Option<OwnedFd>,
}

impl Connection {
    pub fn new(stream: UnixStream) -> Self {
        Self { stream, buffer: Vec::new(), passed: None }
    }

    /// Sends a message, and the lock with it if there is one. Fails if the other process has gone.
    pub async fn send(&self, message: &Message, lock: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let mut text = serde_json::to_vec(message)?;
        text.push(b'\n');
        let (mut rest, mut lock) = (text.as_slice(), lock);
        while !rest.is_empty() {
            let sent = self.stream.async_io(Interest::WRITABLE, || send(&self.stream, rest, lock)).await?;
            lock = None;
            rest = rest.get(sent..).unwrap_or_default();
        }
        Ok(())
    }

    /// Waits for the next message that this version knows, and the lock that came with it. Cancel-safe. Fails with
    /// `UnexpectedEof` if the other process has closed or ended, with `InvalidData` for a line that is not a message,
    /// or is too long.
    pub async fn next(&mut self) -> io::Result<(Message, Option<OwnedFd>)> {
        loop {
            while let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                let message = serde_json::from_slice(&line);
                match message.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))? {
                    Message::Other => {}
                    message => return Ok((message, self.passed.take())),
                }
            }
            if self.buffer.len() > MAX_LINE {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "the line is too long"));
            }
            let (stream, buffer, passed) = (&self.stream, &mut self.buffer, &mut self.passed);
            stream.async_io(Interest::READABLE, || receive(stream, buffer, passed)).await?;
        }
    }
}

fn send(stream: &UnixStream, bytes: &[u8], lock: Option<BorrowedFd<'_>>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let passed = lock.as_slice();
    if !passed.is_empty() && !control.push(SendAncillaryMessage::ScmRights(passed)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?)
}

fn receive(stream: &UnixStream, buffer: &mut Vec<u8>, passed: &mut Option<OwnedFd>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; 4096];
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(stream, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(files) = message {
            *passed = files.last().or(passed.take());
        }
    }
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    buffer.extend_from_slice(bytes.get(..received.bytes).unwrap_or_default());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::takeover::lock::Lock;
    use std::os::fd::AsFd;

    fn pair() -> (Connection, Connection) {
        let (owner, standby) = UnixStream::pair().unwrap();
        (Connection::new(owner), Connection::new(standby))
    }

    #[tokio::test]
    async fn lock_travels_with_the_record() {
        let folder = tempfile::tempdir().unwrap();
        let lock = Lock::try_take(folder.path()).unwrap().unwrap();
        let (owner, mut standby) = pair();
        // Longer than one read.
        let record = Message::Record { record: "x".repeat(100_000).into(), seen: serde_json::Value::Null, away: false };
        let (sent, received) = tokio::join!(owner.send(&record, Some(lock.as_fd())), standby.next());
        sent.unwrap();
        let (received, passed) = received.unwrap();
        assert_eq!(received, record);
        drop((lock, owner));
        assert!(Lock::try_take(folder.path()).unwrap().is_none());
        drop(Lock::passed(passed.unwrap()));
        assert!(Lock::try_take(folder.path()).unwrap().is_some());
        assert_eq!(standby.next().await.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[tokio::test]
    async fn unknown_messages_and_keys_are_skipped() {
        let (mut older, newer) = pair();
        for line in ["{\"word\":\"dance\",\"how\":[1]}\n", "{\"word\":\"take-over\",\"x\":1}\n"] {
            send(&newer.stream, line.as_bytes(), None).unwrap();
        }
        let (message, _) = older.next().await.unwrap();
        assert_eq!(message, Message::TakeOver(StandbyInfo::default()));
    }

    /// The messages that version 0.1.0 sends and knows.
    #[test]
    fn messages_are_those_of_0_1_0() {
        let standby = StandbyInfo { version: "0.1.0".to_owned(), pod: "a".to_owned(), joins: true };
        let record = Message::Record { record: serde_json::Value::Null, seen: serde_json::Value::Null, away: false };
        for (text, message) in [
            (r#"{"word":"take-over","version":"0.1.0","pod":"a","joins":true}"#, Message::TakeOver(standby.clone())),
            (r#"{"word":"take-place","version":"0.1.0","pod":"a","joins":true}"#, Message::TakePlace(standby)),
            (r#"{"word":"agreed"}"#, Message::Agreed),
            (r#"{"word":"keep-place"}"#, Message::KeepPlace),
            (r#"{"word":"joined"}"#, Message::Joined),
            (r#"{"word":"record","record":null,"away":false}"#, record),
            (r#"{"word":"serving"}"#, Message::Serving),
            (r#"{"word":"back"}"#, Message::Back),
            (r#"{"word":"done"}"#, Message::Done),
        ] {
            assert_eq!(serde_json::to_string(&message).unwrap(), text);
            assert_eq!(serde_json::from_str::<Message>(text).unwrap(), message);
        }
        for (text, message) in [
            (r#"{"word":"refused","why":"a moment ago"}"#, Message::KeepPlace),
            (r#"{"word":"back","why":"no answer in time"}"#, Message::Back),
            (r#"{"word":"ended"}"#, Message::Ended),
            (r#"{"word":"failed","why":"x"}"#, Message::Other),
            (r#"{"word":"stand-by"}"#, Message::Other),
            (r#"{"word":"unknown"}"#, Message::Other),
        ] {
            assert_eq!(serde_json::from_str::<Message>(text).unwrap(), message);
        }
    }

    #[tokio::test]
    async fn invalid_message_ends_the_connection() {
        for line in ["\n", "[]\n", "{}\n", "{\"word\":1}\n", "\u{0}\n"] {
            let (mut owner, standby) = pair();
            send(&standby.stream, line.as_bytes(), None).unwrap();
            assert_eq!(owner.next().await.unwrap_err().kind(), io::ErrorKind::InvalidData, "{line:?}");
        }
    }
}
