//! The devices that machines publish through DRA: golden files for the built-in machines, the API's limits by an
//! independent checker, and the commands `linkwise dra` and `linkwise claim`.

pub mod checker;
mod claims;
mod dcgm;
mod documented;
pub mod exact;
mod fleet;
pub mod golden;
pub mod limits;
pub mod mig;
mod shares;
mod state;
