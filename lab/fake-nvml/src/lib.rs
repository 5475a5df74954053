//! A fake `libnvidia-ml.so.1`: NVML's C functions, answered from a machine file in YAML.
//!
//! As a shared library, it replaces the driver's library in tests, below the real nvml-wrapper. As a Rust library, it
//! gives tests [`Control`] and [`library_path`]. It shares no code with linkwise, only the format of the machine file.
//!
//! Environment variables of the process that loads it:
//!
//! | variable | meaning |
//! | --- | --- |
//! | `FAKE_NVML_MACHINE` | the machine file; without it nvmlInit fails with a message on stderr |
//! | `FAKE_NVML_FAIL` | `gpu:function:code,...`: calls that fail from the start; `*` is every GPU |
//! | `FAKE_NVML_CONTROL` | the path of the control socket; each process appends `.` and its process id |
//!
//! The control socket reads one command a line and answers `ok` or `error ...`. `GPU` is an index, a UUID or `*`:
//!
//! | command | meaning |
//! | --- | --- |
//! | `xid GPU CODE [GI [CI]]` | an XID event, optionally of a GPU instance, or of its compute instance |
//! | `ecc GPU` | a double-bit ECC event |
//! | `lost GPU`, `back GPU` | begins or ends NVML_ERROR_GPU_IS_LOST as the answer of every call on the GPU |
//! | `fall GPU` | as `lost`, until each running process ends; in later processes calls answer NVML_ERROR_UNKNOWN |
//! | `reset GPU` | ends `fall`, `recovery`, `rows` and `uncorrectable`; refused while a process runs |
//! | `revive GPU` | a reset while processes run; only later processes see its effect |
//! | `fail GPU FUNCTION CODE`, `unfail GPU FUNCTION` | begins or ends this code as the answer of the function |
//! | `hang [GPU] FUNCTION`, `unhang [GPU] FUNCTION` | blocks calls of the function, or releases them |
//! | `hold GPU FUNCTION`, `unhold GPU FUNCTION` | as `hang`, and every other call waits for the blocked call |
//! | `crash` | the process aborts now |
//! | `crash [GPU] FUNCTION`, `uncrash [GPU] FUNCTION` | calls of the function abort the process, or no longer |
//! | `init CODE` | the same as `fail * nvmlInit_v2 CODE`; `init 0` ends it |
//! | `recovery GPU ACTION` | the recovery action, as NVML's number |
//! | `mig GPU LAYOUT` | the MIG layout from now on, as under `mig` in a machine file, as YAML on one line |
//! | `rows GPU PENDING FAILED` | the row remapping, each `true` or `false` |
//! | `uncorrectable GPU N` | the count of volatile uncorrectable ECC errors |
//! | `link GPU LINK STATE` | an NVLink's state: `up`, `down`, `sleep`, or `absent` (not supported) |
//! | `links GPU STATE` | the state of all NVLinks of the GPU, at both ends |
//! | `link-fields no`, `link-fields yes` | removes or restores the field of a link's state; older drivers lack it |
//! | `fabric GPU STATE STATUS [MASK]` | the fabric's state, status and health mask, as NVML's numbers |
//! | `remove GPU`, `add GPU` | takes the GPU out of the machine, or puts it back |
//! | `driver VERSION` | the driver's version from now on |
//! | `storm GPU CODE N` | N XID events at the same time |
//! | `loss-ends-waits` | from now on, a wait for events fails with GPU_IS_LOST while a GPU of its set is lost |
//! | `leak N` | from now on, N MiB leak each second, regardless of calls |
//! | `runtime` | starts a language's runtime: it maps 1 GiB, uses 8 MiB, and aborts if memory or a thread is refused |
//! | `calls FUNCTION N` | no change; answers once the function has been called N more times |
//! | `blocked FUNCTION` | no change; answers once `hang` or `hold` blocks a call of the function |
//!
//! The faults of a machine outlast processes. Every command except events, `calls`, `blocked` and the plain `crash` is
//! written to `<control socket>.journal`, and the next process starts with it.

mod client;
mod command;
mod control;
mod exports;
mod machine;
mod memory;
mod state;

pub use client::{Control, library_path};
