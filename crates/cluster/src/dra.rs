//! What DRA has at an API server: the writer of slices, and the reader of claims.

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join};
use linkwise::dra::ApiSide;
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

use crate::access::Access;
use crate::claims::ClaimReader;
use crate::metrics::ApiMetrics;
use crate::server::{ApiServer, Pace};
use crate::slices::{SliceSettings, SliceWriter};

/// What writes slices and reads claims at an API server.
pub(crate) fn client(
    access: Access,
    pace: Pace,
    metrics: ApiMetrics,
) -> impl Fn(ApiSide, &mut Registry, CancellationToken) -> BoxFuture<'static, anyhow::Result<()>> + Send + Sync {
    move |side, registry, shutdown| {
        metrics.register_in(registry);
        let server = || ApiServer::new(access.clone(), pace, metrics.clone());
        let ApiSide { node, driver, asks_version, pool, stored, claims } = side;
        let writer = SliceWriter::new(server(), SliceSettings { node, driver, asks_version });
        let writing = writer.run(server(), pool, stored, shutdown.clone());
        let reading = ClaimReader::new(server()).run(claims, shutdown);
        join(writing, reading).map(|_| Ok(())).boxed()
    }
}
