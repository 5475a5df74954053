//! A `libnvidia-ml.so.1` of our own: NVML's C functions over a machine read from a YAML file.
//!
//! Built as a shared library, it replaces the driver's library for the real nvml-wrapper in tests. Built as a Rust
//! library, it gives those tests [`Control`] and [`library_path`]. It knows nothing of linkwise: both share only the
//! machine file.
//!
//! Environment of the process that loads it:
//!
//! | variable | meaning |
//! | --- | --- |
//! | `FAKE_NVML_MACHINE` | the machine file; without it nvmlInit fails and says so on stderr |
//! | `FAKE_NVML_FAIL` | `gpu:function:code,...`: calls that fail from the start (`*`: every GPU) |
//! | `FAKE_NVML_CONTROL` | the path of the control socket; each process adds `.` and its id |
//!
//! The control socket takes one command a line and answers `ok` or `error ...`; a GPU is named
//! by index, UUID or `*`:
//!
//! | command | meaning |
//! | --- | --- |
//! | `xid GPU CODE [GI [CI]]` | an XID event, optionally of a GPU and compute instance |
//! | `ecc GPU` | a double-bit ECC event |
//! | `lost GPU`, `back GPU` | every call on the GPU answers NVML_ERROR_GPU_IS_LOST, or no longer |
//! | `fall GPU` | the same for the life of each process that runs; in later ones its handle is NVML_ERROR_UNKNOWN |
//! | `reset GPU` | ends `fall`, `recovery`, `rows` and `uncorrectable`; refused while any process has the library loaded |
//! | `revive GPU` | a reset from outside, also while processes run. None of them sees it |
//! | `fail GPU FUNCTION CODE`, `unfail GPU FUNCTION` | the function answers the code, or no longer |
//! | `hang [GPU] FUNCTION`, `unhang [GPU] FUNCTION` | the call blocks, until it is released |
//! | `hold GPU FUNCTION`, `unhold GPU FUNCTION` | the same, and every other call waits for it |
//! | `crash` | the process aborts now |
//! | `crash [GPU] FUNCTION`, `uncrash [GPU] FUNCTION` | the process aborts in that call |
//! | `init CODE` | `fail * nvmlInit_v2 CODE`, which 0 ends |
//! | `recovery GPU ACTION` | the driver's recovery action, NVML's numbers |
//! | `mig GPU LAYOUT` | the MIG layout from now on: what a machine file has under `mig`, as YAML on one line |
//! | `rows GPU PENDING FAILED` | the row remapping, each `true` or `false` |
//! | `uncorrectable GPU N` | volatile uncorrectable ECC errors in all |
//! | `link GPU LINK STATE` | an NVLink's state: `up`, `down`, `sleep`, or `absent`: NVML does not know it |
//! | `links GPU STATE` | the same of all NVLinks that end at the GPU, at both ends |
//! | `link-fields no`, `link-fields yes` | an older driver: the state of a link is no field, as for each GPU before Hopper |
//! | `fabric GPU STATE STATUS [MASK]` | the fabric's state, status and health mask, NVML's numbers |
//! | `remove GPU`, `add GPU` | the GPU is not counted any more, or is again |
//! | `driver VERSION` | the driver's version |
//! | `storm GPU CODE N` | N XID events at once |
//! | `loss-ends-waits` | from now on a wait for events fails with 15 while a GPU of its set is lost |
//! | `leak N` | from now on N MiB leak a second, whatever calls do |
//! | `runtime` | a language's runtime starts: it maps 1 GiB, uses 8 MiB, and aborts where it gets no memory or thread |
//! | `calls FUNCTION N` | no change: the answer comes once the function was called N times more |
//! | `blocked FUNCTION` | no change: the answer comes once a call of the function is blocked by `hang` or `hold` |
//!
//! A machine's faults outlast the process that looked at it: every command except events, `calls`, `blocked` and the
//! plain `crash` is kept in `<control socket>.journal` and holds for the next process.

mod client;
mod command;
mod control;
mod exports;
mod machine;
mod memory;
mod state;

pub use client::{Control, library_path};
