//! The messages between the NVML agent and its parent: plain values, one JSON text a line, over the Unix socket that
//! the agent inherits as its standard input.
//!
//! Used by `agent` and `child`. This module does no I/O: it turns bytes into messages, and back.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::call::CallError;
use super::scan::{CallFailure, NodeScan};
use linkwise_core::claims::{MigOrder, MigOrderError};
use linkwise_core::quote::excerpt;
use linkwise_core::state::{HealthPoll, Reach};
use linkwise_core::topology::{GpuUuid, MigUuid};

/// The longest line, in bytes, that either side sends. All facts of sixteen GPUs take a hundredth of it.
pub const MAX_LINE: usize = 4 << 20;

/// A message from the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub enum FromAgent {
    /// A call is about to be made. It has returned when the next one is reported, or when one of these messages comes:
    /// [`FromAgent::Ready`], [`FromAgent::Polled`], [`FromAgent::MigDone`], [`FromAgent::Leaving`].
    Calling(Called),
    /// A full scan: one at the start, one whenever the node has changed, and one for each [`ToAgent::Observe`] and
    /// [`ToAgent::Mig`]. Events come only after the first scan. At the start a [`FromAgent::Polled`] follows at once.
    Ready(Box<NodeScan>),
    /// The driver reported an XID.
    Xid {
        /// The physical GPU.
        gpu: GpuUuid,
        /// NVIDIA's XID number.
        code: u64,
        /// The MIG GPU instance of the XID, if NVML names one.
        gpu_instance: Option<u32>,
        /// The MIG compute instance of the XID, if NVML names one.
        compute_instance: Option<u32>,
    },
    /// An uncorrectable (double-bit) ECC error.
    DoubleBitEcc {
        /// The physical GPU.
        gpu: GpuUuid,
    },
    /// A poll of every GPU, in one message.
    Polled {
        /// The answers of each GPU.
        gpus: BTreeMap<GpuUuid, HealthPoll>,
        /// The GPUs that NVML counts but that do not report their UUID or PCI address, with the reasons.
        missing: Vec<Missing>,
        /// The number of GPUs whose events do not arrive.
        unheard: u32,
        /// The duration of the current wait for events, in milliseconds; 0 if no thread waits.
        waiting_ms: u64,
    },
    /// The result of an order ([`ToAgent::Mig`]). A [`FromAgent::Ready`] follows.
    MigDone(Result<Vec<MigUuid>, MigOrderError>),
    /// A wait for events failed, or an event cannot be reported. The agent goes on, and waits again.
    Failed(CallFailure),
    /// The agent ends because only another process can reach NVML: the library does not load or initialise, or the
    /// driver is gone or released.
    Leaving(CallError),
}

/// A call, and its GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Called {
    /// The C function, or `dlopen`.
    pub call: String,
    /// The GPU, if the call is about one.
    pub gpu: Option<CalledGpu>,
}

/// A GPU, with the facts known when a call is made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CalledGpu {
    /// NVML's index, and NVML's count of GPUs.
    pub place: Place,
    /// Its UUID, once NVML has reported it.
    pub uuid: Option<GpuUuid>,
}

/// A GPU that could not be polled, because it does not report its UUID or PCI address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Missing {
    /// The GPU; `None` stands for every GPU that was not polled, because NVML could not count the GPUs.
    pub place: Option<Place>,
    /// The outcome of the call that failed.
    pub reach: Reach,
}

/// NVML's name of a GPU before any call about it: an index, which is valid for this number of GPUs only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// The index.
    pub index: u32,
    /// The number of GPUs.
    pub of: u32,
}

impl fmt::Display for Called {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.gpu {
            None => f.write_str(&self.call),
            Some(CalledGpu { uuid: Some(uuid), .. }) => write!(f, "{} of {uuid}", self.call),
            Some(CalledGpu { place, .. }) => write!(f, "{} of GPU {}", self.call, place.index),
        }
    }
}

/// A message to the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ToAgent {
    /// Scan again, and send a [`FromAgent::Ready`].
    Observe,
    /// Poll soon: at once, or a second after the last poll.
    Poll,
    /// Make or destroy a GPU instance, or list MIG devices; send a [`FromAgent::MigDone`]. One order at a time.
    Mig(MigOrder),
}

/// The reason why bytes are not a message, or why a message cannot be written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ProtocolError {
    #[error("the message is longer than {MAX_LINE} bytes")]
    TooLong,
    #[error("'{0}' is not a message")]
    Nonsense(String, #[source] serde_json::Error),
    #[error("cannot encode the message")]
    Unwritable(#[source] serde_json::Error),
}

/// Encodes a message as its line. Fails if the line is longer than [`MAX_LINE`].
pub fn encode(message: &impl Serialize) -> Result<Vec<u8>, ProtocolError> {
    let mut line = serde_json::to_vec(message).map_err(ProtocolError::Unwritable)?;
    line.push(b'\n');
    if line.len() > MAX_LINE { Err(ProtocolError::TooLong) } else { Ok(line) }
}

/// Bytes from the agent, cut into messages.
#[derive(Debug, Default)]
pub struct Incoming {
    buffer: Vec<u8>,
    /// The length of the part of the buffer that has no end of line.
    searched: usize,
}

impl Incoming {
    /// The buffer to which read bytes are appended. Append no more than a few KiB before the next [`Self::take`],
    /// which checks the length.
    pub fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.buffer
    }

    /// Takes the next message out, once its line is complete. After an error the bytes that follow cannot be trusted.
    pub fn take(&mut self) -> Result<Option<FromAgent>, ProtocolError> {
        let unsearched = self.buffer.get(self.searched..).unwrap_or_default();
        let Some(end) = unsearched.iter().position(|byte| *byte == b'\n').map(|at| self.searched + at) else {
            self.searched = self.buffer.len();
            return if self.searched >= MAX_LINE { Err(ProtocolError::TooLong) } else { Ok(None) };
        };
        let line: Vec<u8> = self.buffer.drain(..=end).collect();
        self.searched = 0;
        if line.len() > MAX_LINE {
            return Err(ProtocolError::TooLong);
        }
        serde_json::from_slice(&line).map(Some).map_err(|source| {
            let line = excerpt(String::from_utf8_lossy(&line).trim_end());
            ProtocolError::Nonsense(line, source)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scan::tests::{gpu, node};
    use linkwise_core::state::{FabricHealth, Reach, RecoveryAction, RowRemapping};

    fn every_message() -> Vec<FromAgent> {
        let mut scan = gpu(0, 1, &[2]);
        let gpu = scan.uuid.clone();
        let failed = CallError::returned("nvmlDeviceGetName", 999);
        scan.model = Ok(Some("NVIDIA \"X\"\n".into()));
        scan.minor = Err(failed.clone());
        scan.memory_mib = Ok(Some(u64::MAX));
        scan.c2c = Err(CallError::in_words("f", "neither 0 nor 1"));
        scan.display = Ok(Some(true));
        scan.nvlinks.extend([Ok(None), Err(failed.clone())]);
        let poll = HealthPoll {
            reach: Reach::Failed { call: "f".into(), error: "e".into() },
            recovery_action: Some(RecoveryAction::Other(99)),
            row_remapping: Some(RowRemapping { pending: true, failed: false }),
            uncorrectable_ecc: Some(u64::MAX),
            nvlinks_down: Some(vec![1, 17]),
            fabric: Some(FabricHealth::Failed { status: 999 }),
            on_bus: None,
        };
        let failure = CallFailure { subject: "GPU 1".into(), part: "NVLink 1, 2".into(), error: failed.clone() };
        vec![
            FromAgent::Ready(Box::new(NodeScan {
                library: Ok(None),
                failures: vec![failure.clone()],
                ..node(vec![scan])
            })),
            FromAgent::Xid { gpu: gpu.clone(), code: 79, gpu_instance: Some(1), compute_instance: None },
            FromAgent::DoubleBitEcc { gpu: gpu.clone() },
            FromAgent::Calling(Called {
                call: "f".into(),
                gpu: Some(CalledGpu { place: Place { index: 0, of: 2 }, uuid: Some(gpu.clone()) }),
            }),
            FromAgent::Polled {
                gpus: [(gpu, poll)].into(),
                missing: vec![Missing {
                    place: Some(Place { index: 1, of: 2 }),
                    reach: Reach::Lost { call: "f".into() },
                }],
                unheard: 1,
                waiting_ms: 3,
            },
            FromAgent::MigDone(Ok(vec!["MIG-1".parse().unwrap()])),
            FromAgent::MigDone(Err(MigOrderError { why: "f: g".into(), may_exist: true })),
            FromAgent::Failed(failure),
            FromAgent::Leaving(failed),
        ]
    }

    #[test]
    fn every_message_survives_transfer_byte_by_byte() {
        let sent = every_message();
        let bytes: Vec<u8> = sent.iter().flat_map(|message| encode(message).unwrap()).collect();
        let mut incoming = Incoming::default();
        let mut received = Vec::new();
        for byte in bytes {
            incoming.buffer().push(byte);
            received.extend(incoming.take().unwrap());
        }
        assert_eq!(received, sent);
    }

    #[test]
    fn nonsense_is_named_and_bounded() {
        let mut incoming = Incoming::default();
        let known = FromAgent::DoubleBitEcc { gpu: "GPU-1".parse().unwrap() };
        incoming.buffer().extend(encode(&known).unwrap());
        incoming.buffer().extend(b"\"dance\"\n");
        assert_eq!(incoming.take().unwrap(), Some(known));
        assert_eq!(incoming.take().unwrap_err().to_string(), "'\"dance\"' is not a message");
        let mut incoming = Incoming::default();
        incoming.buffer().resize(MAX_LINE - 1, b'x');
        assert!(matches!(incoming.take(), Ok(None)));
        incoming.buffer().push(b'x');
        assert!(matches!(incoming.take(), Err(ProtocolError::TooLong)));
    }

    #[test]
    fn message_above_the_limit_is_not_encoded() {
        let failed = FromAgent::Leaving(CallError::in_words("f", "x".repeat(MAX_LINE)));
        assert!(matches!(encode(&failed), Err(ProtocolError::TooLong)));
    }
}
