//! The chart `charts/linkwise`, rendered by the real helm (`make tools` brings it; without it these tests say that they are
//! skipped), and the ready examples in `manifests/examples`, read by schemas of our own (`schemas.yaml`).

mod clusters;
mod contract;
mod documented;
mod examples;
mod flat;
mod golden;
pub mod helm;
mod monitoring;
mod privileges;
mod refusals;
mod settings;
mod surge;
mod swap;
