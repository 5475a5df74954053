//! The messages between the NVML agent and its parent: plain values, one JSON text a line, over the Unix socket that
//! the agent inherits as its standard input.
//!
//! Used by `agent` and `child`. No I/O happens here: bytes in, messages out, and back.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::call::CallError;
use super::scan::{CallFailure, NodeScan};
use crate::claims::{MigOrder, MigOrderError};
use crate::quote::excerpt;
use crate::state::{HealthPoll, Reach};
use crate::topology::{GpuUuid, MigUuid};

/// The longest line, in bytes, that either side accepts. Sixteen GPUs with all that can be said
/// of them take a hundredth of it.
pub const MAX_LINE: usize = 4 << 20;

/// From the child.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub enum FromAgent {
    /// A call is about to be made; it has returned when the next one is told, or a message of another round's end:
    /// [`FromAgent::Ready`], [`FromAgent::Polled`], [`FromAgent::MigDone`], [`FromAgent::Leaving`].
    Calling(Called),
    /// A full scan: once at the start, after which events follow, whenever the node has changed, and for each
    /// [`ToAgent::Observe`]. At the start a [`FromAgent::Polled`] follows at once.
    Ready(Box<NodeScan>),
    /// The driver reported an XID.
    Xid {
        /// The physical GPU.
        gpu: GpuUuid,
        /// NVIDIA's XID number.
        code: u64,
        /// The MIG GPU instance it is about, where NVML names one.
        gpu_instance: Option<u32>,
        /// The MIG compute instance it is about, where NVML names one.
        compute_instance: Option<u32>,
    },
    /// An uncorrectable (double-bit) ECC error.
    DoubleBitEcc {
        /// The physical GPU.
        gpu: GpuUuid,
    },
    /// A round of cheap calls to every GPU: one message, and the sign that the child lives.
    Polled {
        /// What each GPU said.
        gpus: BTreeMap<GpuUuid, HealthPoll>,
        /// The GPUs that NVML counts and that do not say who or where they are, and why.
        missing: Vec<Missing>,
        /// How many GPUs are not heard though they have events: their registration failed, or they are lost.
        unheard: u32,
        /// For how long the present wait for events has lasted, in milliseconds; 0 where nobody waits.
        waiting_ms: u64,
    },
    /// How an order ended ([`ToAgent::Mig`]): with the MIG device that was made, or none after a destruction. A
    /// [`FromAgent::Ready`] follows.
    MigDone(Result<Option<MigUuid>, MigOrderError>),
    /// A call of the thread that waits for events failed. The agent goes on, and tries again.
    Failed(CallFailure),
    /// The agent ends because only another process can reach NVML: the library does not load or initialise, or the driver
    /// has gone.
    Leaving(CallError),
}

/// A call, and the GPU it is about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Called {
    /// The C function, or `dlopen`.
    pub call: String,
    /// The GPU, for a call that is about one.
    pub gpu: Option<CalledGpu>,
}

/// A GPU, as far as it is known when a call is made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CalledGpu {
    /// NVML's index, and how many GPUs NVML counts.
    pub place: Place,
    /// Its UUID, once NVML has said it.
    pub uuid: Option<GpuUuid>,
}

/// A GPU that could not be asked, for it does not say who or where it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Missing {
    /// Which one; `None` where the GPUs could not even be counted: all that were not asked.
    pub place: Option<Place>,
    /// How the call for its name ended.
    pub reach: Reach,
}

/// NVML's name of a GPU before it is touched: an index, which means something for this number of GPUs only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// The index.
    pub index: u32,
    /// Of how many.
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

/// To the child.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ToAgent {
    /// Look again, and send a [`FromAgent::Ready`].
    Observe,
    /// Go a round soon: at once, or a second after the last one.
    Poll,
    /// Make or destroy a GPU instance, and send a [`FromAgent::MigDone`]. One order at a time.
    Mig(MigOrder),
}

/// Why bytes are no message, or a message cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum ProtocolError {
    /// The line is too long.
    #[error("a message of more than {MAX_LINE} bytes")]
    TooLong,
    /// The line is no message.
    #[error("'{line}' is no message")]
    Nonsense {
        /// How the line begins.
        line: String,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// The message cannot be written as JSON.
    #[error("cannot write a message")]
    Unwritable(#[source] serde_json::Error),
}

/// A message as its line.
///
/// # Errors
///
/// The message cannot be written, or makes a line that nobody would accept.
pub fn encode(message: &impl Serialize) -> Result<Vec<u8>, ProtocolError> {
    let mut line = serde_json::to_vec(message).map_err(ProtocolError::Unwritable)?;
    line.push(b'\n');
    if line.len() > MAX_LINE { Err(ProtocolError::TooLong) } else { Ok(line) }
}

/// Bytes that came from the agent, cut into messages.
#[derive(Debug, Default)]
pub struct Incoming {
    buffer: Vec<u8>,
    /// How much of the buffer is known to hold no end of line.
    searched: usize,
}

impl Incoming {
    /// Where bytes that have been read are appended. Append no more than a few KiB before taking
    /// the messages out, for the length is checked there.
    pub fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.buffer
    }

    /// The next message, when its line is complete.
    ///
    /// # Errors
    ///
    /// The line is too long or no message; nothing after it can be trusted.
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
            ProtocolError::Nonsense { line, source }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nvml::scan::{GpuScan, MigDeviceScan, MigInstanceScan, MigScan, NvLinkScan};
    use crate::state::{FabricHealth, Reach, RecoveryAction, RowRemapping};
    use crate::topology::{
        AddressingMode, CudaVersion, FabricObservation, MigEngines, MigExtension, MigPlacement, MigProfileObservation,
        PcieLink, TopologyLevel,
    };

    fn every_message() -> Vec<FromAgent> {
        let gpu: GpuUuid = "GPU-1".parse().unwrap();
        let failed = CallError::returned("nvmlDeviceGetName", 999);
        let link = NvLinkScan { active: false, kind: Ok(Some(1)), pci: Err(failed.clone()) };
        let device = "{index: 3, uuid: MIG-1, gpu_instance: 1, compute_instance: 0, gpu_slices: 1, compute_slices: 1, \
                      memory_mib: 1}";
        let device = MigDeviceScan {
            device: serde_saphyr::from_str(device).unwrap(),
            instance: Ok(Some(MigInstanceScan { profile_id: 19, placement: MigPlacement { start: 4, size: 1 } })),
            extension: Ok(Some(MigExtension::Media)),
            capabilities: Ok(None),
        };
        let profile = MigProfileObservation {
            id: 19,
            number: 0,
            gpu_slices: 1,
            memory_mib: 9728,
            instances: 7,
            engines: MigEngines { multiprocessors: 14, ..MigEngines::default() },
            placements: vec![MigPlacement { start: 6, size: 1 }],
        };
        let scan = GpuScan {
            index: 0,
            uuid: gpu.clone(),
            pci: "0000:3b:00.0".parse().unwrap(),
            model: Ok(Some("NVIDIA \"X\"\n".into())),
            minor: Err(failed.clone()),
            compute_capability: Ok(Some("9.0".to_owned().try_into().unwrap())),
            brand: Ok(Some("Nvidia".into())),
            architecture: Err(failed.clone()),
            addressing_mode: Ok(Some(AddressingMode::Ats)),
            memory_mib: Ok(Some(u64::MAX)),
            numa: Ok(None),
            pcie: Ok(Some(PcieLink { mts: 16000, width: 16 })),
            c2c: Err(CallError::unreadable("f", "neither 0 nor 1")),
            display: Ok(Some(true)),
            fabric: Ok(Some(FabricObservation { cluster: "0".into(), clique: 1 })),
            nvlinks: vec![Ok(Some(link)), Ok(None), Err(failed.clone())],
            mig: Ok(Some(MigScan {
                enabled: true,
                devices: Ok(Some([(3, Ok(Some(device)))].into())),
                profiles: Ok(Some(vec![profile])),
            })),
            ancestors: [("GPU-2".parse().unwrap(), Ok(Some(TopologyLevel::HostBridge)))].into(),
        };
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
                driver: Ok(Some("580".into())),
                library: Ok(None),
                path: "libnvidia-ml.so.1".into(),
                cuda: Ok(Some(CudaVersion { major: 13, minor: 0 })),
                count: Some(2),
                gpus: vec![scan],
                failures: vec![failure.clone()],
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
            FromAgent::MigDone(Ok(Some("MIG-1".parse().unwrap()))),
            FromAgent::MigDone(Err(MigOrderError { why: "f: g".into(), may_exist: true })),
            FromAgent::Failed(failure),
            FromAgent::Leaving(failed),
        ]
    }

    #[test]
    fn every_message_survives_the_way_byte_by_byte() {
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
        assert_eq!(incoming.take().unwrap_err().to_string(), "'\"dance\"' is no message");
        let mut incoming = Incoming::default();
        incoming.buffer().resize(MAX_LINE - 1, b'x');
        assert!(matches!(incoming.take(), Ok(None)));
        incoming.buffer().push(b'x');
        assert!(matches!(incoming.take(), Err(ProtocolError::TooLong)));
    }

    #[test]
    fn a_message_that_nobody_would_take_is_not_sent() {
        let failed = FromAgent::Leaving(CallError::unreadable("f", "x".repeat(MAX_LINE)));
        assert!(matches!(encode(&failed), Err(ProtocolError::TooLong)));
    }
}
