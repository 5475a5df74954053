//! Promised against measured: the bus bandwidth of an all-reduce by NCCL's model, what nccl-tests measured, and the
//! likeliest cause of a difference.
//!
//! Pure: `linkwise expect` and `linkwise verify` call it with a topology and a text. It uses `topology` and
//! `allocation`. docs/bandwidth.md has the published results that the model was compared with.

mod comparison;
mod decimal;
mod expectation;
mod report;

pub use comparison::{Cause, Comparison, MatchError, Verdict};
pub use decimal::gb_per_s;
pub use expectation::{Calibration, Expectation, MODEL};
pub use report::{NcclReport, RankDevice, ReportError, Row, Run, Transports};
