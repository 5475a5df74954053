//! Tests of the chart `charts/linkwise`, rendered by the real helm (`make tools` installs it; tests that run it are
//! ignored without it), and of the ready examples in `manifests/examples`, checked by our own `schemas.yaml`.

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
mod rollout;
mod settings;
mod swap;
