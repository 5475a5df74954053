//! `linkwise run` with DRA: what writes the slices and reads the claims for it.
//!
//! A composition root, as `labels`: the program is `linkwise`'s own.

use std::process::ExitCode;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join};
use linkwise::config::{Command, RunArgs};
use linkwise::dra::{ApiSide, Client};
use linkwise::runtime::{ApiClients, DraSide};
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

use crate::access::Access;
use crate::claims::ClaimReader;
use crate::metrics::ApiMetrics;
use crate::server::{ApiServer, Pace};
use crate::slices::{SliceSettings, SliceWriter};

/// Serves the node until a signal ends it. Without an API server there is no DRA, and `linkwise` says so.
pub fn run(mut args: Box<RunArgs>) -> ExitCode {
    // The client's own lines about failures, which are logged here once.
    args.log.log = format!("kube_client=off,{}", args.log.log);
    let Ok(access) = Access::of(&args.api) else { return linkwise::run(Command::Run(args), ApiClients::default()) };
    let client = client(access, Pace::DEFAULT);
    let client: &Client = &client;
    linkwise::run(Command::Run(args), ApiClients { dra: Some(DraSide::new(client)), ..ApiClients::default() })
}

/// What writes slices and reads claims at an API server.
pub(crate) fn client(
    access: Access,
    pace: Pace,
) -> impl Fn(ApiSide, &mut Registry, CancellationToken) -> BoxFuture<'static, anyhow::Result<()>> + Send + Sync {
    move |side, registry, shutdown| {
        let metrics = ApiMetrics::register(registry);
        let server = || ApiServer::new(access.clone(), pace, metrics.clone());
        let ApiSide { node, driver, asks_version, pool, stored, claims } = side;
        let writer = SliceWriter::new(server(), SliceSettings { node, driver, asks_version });
        let writing = writer.run(server(), pool, stored, shutdown.clone());
        let reading = ClaimReader::new(server()).run(claims, shutdown);
        join(writing, reading).map(|_| Ok(())).boxed()
    }
}
