//! The words of a takeover: a JSON object a line, over a Unix socket that root and our own user may use. The lock
//! travels with the word that hands it over.
//!
//! Both sides may be older or newer: keys and words that a version does not know are skipped.

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

/// The longest line, in bytes: a health record has 1 MiB at most.
const MAX_LINE: usize = 2 << 20;

/// A message of one side to the other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "word", rename_all = "kebab-case")]
pub enum Word {
    /// A standby that could serve asks to take over.
    TakeOver(Asks),
    /// A standby that sees no GPU asks for the place of an owner that has no driver either.
    TakePlace(Asks),
    /// The owner will hand over as soon as the standby's DRA plugin is registered.
    Agreed,
    /// The owner keeps its place, because it has the driver. Version 0.1.0 also says `refused`, for now.
    #[serde(alias = "refused")]
    KeepPlace,
    /// The kubelet calls the standby's DRA plugin.
    Joined,
    /// The owner's record of the GPUs. The lock comes with it; the owner writes no file from now on.
    Record {
        /// The health record, of this version or another; null without one.
        #[serde(default)]
        record: serde_json::Value,
        /// The GPUs as the owner saw them last, for a standby that took its place; null if it saw none.
        #[serde(default, skip_serializing_if = "serde_json::Value::is_null")]
        seen: serde_json::Value,
        /// True if NVML has been unavailable to the owner for the grace period.
        #[serde(default)]
        away: bool,
    },
    /// Every plugin of the standby is registered: the owner may end its own. The owner hangs up when they have ended.
    Serving,
    /// The owner takes back what it gave: the standby stops.
    Back,
    /// The plugins of an owner of version 0.1.0 have ended. It lets go when it hears [`Self::Done`].
    Ended,
    Done,
    /// A word that is not known here.
    #[serde(other, skip_serializing)]
    Other,
}

/// The standby that asks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Asks {
    pub version: String,
    /// The UID of its pod.
    pub pod: String,
    /// True. An owner of version 0.1.0 then waits for [`Word::Joined`].
    pub joins: bool,
}

#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    /// The bytes that have come and are no whole line yet.
    buffer: Vec<u8>,
    /// The lock, before the line that it came with.
    passed: Option<OwnedFd>,
}

impl Connection {
    pub fn new(stream: UnixStream) -> Self {
        Self { stream, buffer: Vec::new(), passed: None }
    }

    /// Sends a word, with the lock where it goes along.
    ///
    /// # Errors
    ///
    /// The operating system's; the other process has gone.
    pub async fn say(&self, word: &Word, lock: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let mut text = serde_json::to_vec(word)?;
        text.push(b'\n');
        let (mut rest, mut lock) = (text.as_slice(), lock);
        while !rest.is_empty() {
            let sent = self.stream.async_io(Interest::WRITABLE, || send(&self.stream, rest, lock)).await?;
            lock = None;
            rest = rest.get(sent..).unwrap_or_default();
        }
        Ok(())
    }

    /// The next word that is known here, and the lock that came with it. Cancel-safe. Fails with `UnexpectedEof` if the
    /// other process has closed or ended, with `InvalidData` for a line that is no word, or too long.
    pub async fn next(&mut self) -> io::Result<(Word, Option<OwnedFd>)> {
        loop {
            while let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                let word = serde_json::from_slice(&line);
                match word.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))? {
                    Word::Other => {}
                    word => return Ok((word, self.passed.take())),
                }
            }
            if self.buffer.len() > MAX_LINE {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a line without an end"));
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
        let (one, other) = UnixStream::pair().unwrap();
        (Connection::new(one), Connection::new(other))
    }

    #[tokio::test]
    async fn lock_travels_with_the_record() {
        let folder = tempfile::tempdir().unwrap();
        let lock = Lock::try_take(folder.path()).unwrap().unwrap();
        let (owner, mut standby) = pair();
        // Longer than one read.
        let word = Word::Record { record: "x".repeat(100_000).into(), seen: serde_json::Value::Null, away: false };
        let (said, heard) = tokio::join!(owner.say(&word, Some(lock.as_fd())), standby.next());
        said.unwrap();
        let (heard, passed) = heard.unwrap();
        assert_eq!(heard, word);
        drop((lock, owner));
        assert!(Lock::try_take(folder.path()).unwrap().is_none());
        drop(Lock::passed(passed.unwrap()));
        assert!(Lock::try_take(folder.path()).unwrap().is_some());
        assert_eq!(standby.next().await.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[tokio::test]
    async fn unknown_words_and_keys_are_skipped() {
        let (mut older, newer) = pair();
        for line in ["{\"word\":\"dance\",\"how\":[1]}\n", "{\"word\":\"take-over\",\"x\":1}\n"] {
            send(&newer.stream, line.as_bytes(), None).unwrap();
        }
        let (word, _) = older.next().await.unwrap();
        assert_eq!(word, Word::TakeOver(Asks::default()));
    }

    /// What version 0.1.0 says and hears.
    #[test]
    fn words_are_those_of_0_1_0() {
        let asks = Asks { version: "0.1.0".to_owned(), pod: "a".to_owned(), joins: true };
        let record = Word::Record { record: serde_json::Value::Null, seen: serde_json::Value::Null, away: false };
        for (text, word) in [
            (r#"{"word":"take-over","version":"0.1.0","pod":"a","joins":true}"#, Word::TakeOver(asks.clone())),
            (r#"{"word":"take-place","version":"0.1.0","pod":"a","joins":true}"#, Word::TakePlace(asks)),
            (r#"{"word":"agreed"}"#, Word::Agreed),
            (r#"{"word":"keep-place"}"#, Word::KeepPlace),
            (r#"{"word":"joined"}"#, Word::Joined),
            (r#"{"word":"record","record":null,"away":false}"#, record),
            (r#"{"word":"serving"}"#, Word::Serving),
            (r#"{"word":"back"}"#, Word::Back),
            (r#"{"word":"done"}"#, Word::Done),
        ] {
            assert_eq!(serde_json::to_string(&word).unwrap(), text);
            assert_eq!(serde_json::from_str::<Word>(text).unwrap(), word);
        }
        for (text, word) in [
            (r#"{"word":"refused","why":"a moment ago"}"#, Word::KeepPlace),
            (r#"{"word":"back","why":"no answer in time"}"#, Word::Back),
            (r#"{"word":"ended"}"#, Word::Ended),
            (r#"{"word":"failed","why":"x"}"#, Word::Other),
            (r#"{"word":"stand-by"}"#, Word::Other),
            (r#"{"word":"unknown"}"#, Word::Other),
        ] {
            assert_eq!(serde_json::from_str::<Word>(text).unwrap(), word);
        }
    }

    #[tokio::test]
    async fn what_is_no_word_ends_the_connection() {
        for line in ["\n", "[]\n", "{}\n", "{\"word\":1}\n", "\u{0}\n"] {
            let (mut one, other) = pair();
            send(&other.stream, line.as_bytes(), None).unwrap();
            assert_eq!(one.next().await.unwrap_err().kind(), io::ErrorKind::InvalidData, "{line:?}");
        }
    }
}
