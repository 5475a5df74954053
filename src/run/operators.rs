//! The operators' socket, and the probes' port of a process that has handed the node over.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use futures_util::FutureExt;

use linkwise_core::errors::chain;
use linkwise_core::reported::Reported;
use linkwise_node::admin::{Admin, Answers, Hosts, Local, LocalError, Orders, health};
use linkwise_node::metrics::Metrics;
use linkwise_system::signals::LastSignals;
use linkwise_system::uds::Callers;

/// The time between two attempts to take an admin socket that another process has.
const ADMIN_PAUSE: Duration = Duration::from_millis(100);

/// Binds the admin socket; `None` while another process has it, which may be about to end.
pub(super) fn bind_admin(path: &Path) -> Result<Option<Local>, LocalError> {
    match Local::bind(path, Callers::default()) {
        Err(LocalError::Taken(..)) => Ok(None),
        bound => bound.map(Some),
    }
}

/// Serves operators as soon as no other process has this socket. A socket that cannot be bound does not end the node;
/// it is tried again.
pub(super) async fn serve_operators(path: PathBuf, mut bound: Option<Local>, orders: Orders) -> Result<()> {
    let mut failure = Reported::new();
    if bound.is_none() {
        tracing::warn!(path = %path.display(), "admin socket taken by another process, trying again");
    }
    loop {
        if let Some(local) = bound {
            local.serve(orders).await;
            return Ok(());
        }
        tokio::time::sleep(ADMIN_PAUSE).await;
        bound = bind_admin(&path).unwrap_or_else(|error| {
            let why = chain(&error);
            if failure.begins(why.clone()) {
                tracing::warn!("{why}; trying again");
            }
            None
        });
    }
}

/// Answers probes until a signal comes: another process serves this node.
pub(super) async fn answer_probes(
    metrics: &Metrics,
    (address, hosts): (SocketAddr, Hosts),
    health: Option<u16>,
    last_signals: &mut LastSignals,
) {
    let metrics = metrics.clone();
    let answers = Answers {
        metrics: Arc::new(move || metrics.encode().ok()),
        ready: Arc::new(|| Err(vec!["another linkwise has taken over this node".to_owned()])),
        hosts,
        page: None,
    };
    let probes = async {
        match Admin::bind(address) {
            Ok(admin) => admin.serve(answers).await,
            // Both processes use the host's network, and the other one has the port.
            Err(_) => std::future::pending().await,
        }
    };
    let health = async {
        if let Some(port) = health {
            let _ = health::serve(health::address(port), Arc::new(|| std::future::ready(true).boxed())).await;
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = probes => {}
        () = health => {}
        _ = last_signals.recv() => {}
    }
    tracing::info!("ending, another linkwise serves this node");
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::net::UnixStream;

    use linkwise_core::publish::view::NodeView;
    use linkwise_node::admin::Outcome;
    use tokio::time::timeout;

    #[tokio::test]
    async fn socket_that_cannot_be_bound_for_a_while_ends_no_node() {
        let folder = tempfile::tempdir().unwrap();
        let (run, path) = (folder.path().join("run"), folder.path().join("run/admin.sock"));
        fs::write(&run, "no folder").unwrap();
        assert!(matches!(bind_admin(&path), Err(LocalError::Bind(..))));
        let orders = Orders {
            state: Arc::new(NodeView::default),
            carry_out: Arc::new(|_| Box::pin(async { Outcome::Done(String::new()) })),
        };
        let mut served = Box::pin(serve_operators(path.clone(), None, orders));
        // Some attempts fail.
        timeout(ADMIN_PAUSE * 3, &mut served).await.unwrap_err();
        fs::remove_file(&run).unwrap();
        let bound = async {
            while UnixStream::connect(&path).is_err() {
                tokio::task::yield_now().await;
            }
        };
        let bound = timeout(Duration::from_secs(60), bound);
        tokio::select! {
            ended = &mut served => panic!("{ended:?}"),
            bound = bound => bound.expect("the socket is not bound in time"),
        }
    }
}
