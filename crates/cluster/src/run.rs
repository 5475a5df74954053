//! `linkwise run` with what only this program has: DRA's slices and claims, events about pods.
//!
//! A composition root, as `labels`: the program is `linkwise`'s own.

use std::process::ExitCode;

use linkwise::config::{Command, RunArgs};
use linkwise::dra::Client;
use linkwise::runtime::{ApiClients, DraSide, EventsClient};

use crate::access::Access;
use crate::metrics::ApiMetrics;
use crate::server::Pace;
use crate::{dra, events};

/// Serves the node until a signal ends it. Without an API server what is left of DRA is finished.
pub fn run(mut args: Box<RunArgs>) -> ExitCode {
    // The client's own lines about failures, which are logged here once.
    args.log.log = format!("kube_client=off,{}", args.log.log);
    let clients = ApiClients { dra: Some(DraSide::new(None)), ..ApiClients::default() };
    let Ok(access) = Access::of(&args.api) else { return linkwise::run(Command::Run(args), clients) };
    let metrics = ApiMetrics::default();
    let dra = dra::client(access.clone(), Pace::DEFAULT, metrics.clone());
    let dra: &Client = &dra;
    let events = events::client(access, Pace::DEFAULT, metrics);
    let events: &EventsClient = &events;
    let clients = ApiClients { dra: Some(DraSide::new(Some(dra))), events: Some(events), ..clients };
    linkwise::run(Command::Run(args), clients)
}
