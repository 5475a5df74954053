//! Spans of admissions: made of what the plugins report, for a collector of OpenTelemetry traces.
//!
//! The exporter is in `linkwise-cluster` alone. An admission waits for none of this: spans go through a bounded queue,
//! and where it is full they are lost.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use anyhow::Result;
use futures_util::future::BoxFuture;
use prometheus_client::registry::Registry;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::node::Node;
use crate::dra;
use crate::kubelet::Occurrence;
use crate::state::ResourceName;

/// What may wait to become a span.
const WAITING: usize = 256;

/// Something that took time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// The RPC, such as `Allocate`; or what was done for a claim, such as `prepare claim`.
    pub name: String,
    /// When it began.
    pub began: SystemTime,
    /// When it ended.
    pub ended: SystemTime,
    /// The caller's trace context, as the header `traceparent` (W3C) had it.
    pub parent: Option<String>,
    /// Why it failed.
    pub error: Option<String>,
    /// What it was about.
    pub attributes: Vec<(&'static str, String)>,
}

/// What the exporter is given.
pub struct TracesSide {
    /// The collector, `http://HOST:PORT`.
    pub endpoint: String,
    /// The node's name, where it is known.
    pub node: Option<String>,
    /// The spans.
    pub spans: mpsc::Receiver<Span>,
}

/// Exports spans until it is told to end, and registers its metrics.
pub type TracesClient =
    dyn Fn(TracesSide, &mut Registry, CancellationToken) -> BoxFuture<'static, Result<()>> + Send + Sync;

/// What was reported, and when.
enum Report {
    Plugin(ResourceName, Occurrence, SystemTime),
    Dra(dra::Occurrence, SystemTime),
}

/// Where plugins report for spans. It never waits.
#[derive(Clone)]
pub(super) struct Traces(mpsc::Sender<Report>);

impl Traces {
    /// The device plugin of a resource did something.
    pub fn plugin(&self, resource: &ResourceName, occurrence: &Occurrence) {
        let is_of_an_admission = match occurrence {
            Occurrence::Rpc { method, .. } => {
                matches!(method.as_str(), "GetPreferredAllocation" | "Allocate" | "PreStartContainer")
            }
            Occurrence::Chosen { .. } | Occurrence::Allocated(_) => true,
            _ => false,
        };
        if is_of_an_admission {
            // Full: the collector takes them more slowly.
            let _ = self.0.try_send(Report::Plugin(resource.clone(), occurrence.clone(), SystemTime::now()));
        }
    }

    /// The DRA plugin did something.
    pub fn dra(&self, occurrence: &dra::Occurrence) {
        let is_of_an_admission = match occurrence {
            dra::Occurrence::Rpc { method, .. } => {
                matches!(method.as_str(), "NodePrepareResources" | "NodeUnprepareResources")
            }
            dra::Occurrence::Prepared { .. } | dra::Occurrence::Unprepared { .. } => true,
            _ => false,
        };
        if is_of_an_admission {
            let _ = self.0.try_send(Report::Dra(occurrence.clone(), SystemTime::now()));
        }
    }
}

/// Has the spans of a node exported. Before its plugins begin.
pub(super) fn spawn_in(node: &mut Node, endpoint: String, name: Option<String>, client: &TracesClient) {
    let (reports, reported) = mpsc::channel(WAITING);
    let (sender, spans) = mpsc::channel(WAITING);
    let side = TracesSide { endpoint, node: name.filter(|name| !name.is_empty()), spans };
    let shutdown = node.shutdown();
    let exporter = node.metrics().register(|registry| client(side, registry, shutdown));
    node.trace_to(Traces(reports));
    node.spawn("traces", make_spans(reported, sender));
    node.spawn_until_done("traces' exporter", exporter);
}

/// Makes spans of reports, as long as there are any.
async fn make_spans(mut reported: mpsc::Receiver<Report>, spans: mpsc::Sender<Span>) -> Result<()> {
    let mut maker = SpanMaker::default();
    while let Some(report) = reported.recv().await {
        if let Some(span) = maker.span(report) {
            let _ = spans.try_send(span);
        }
    }
    Ok(())
}

/// What an RPC of a resource was about, told before the RPC ends: the kubelet admits one container at a time.
#[derive(Default)]
struct SpanMaker(BTreeMap<ResourceName, Vec<(&'static str, String)>>);

impl SpanMaker {
    fn span(&mut self, report: Report) -> Option<Span> {
        match report {
            Report::Plugin(resource, occurrence, ended) => self.of_plugin(resource, occurrence, ended),
            Report::Dra(occurrence, ended) => of_dra(occurrence, ended),
        }
    }

    fn of_plugin(&mut self, resource: ResourceName, occurrence: Occurrence, ended: SystemTime) -> Option<Span> {
        let about = match occurrence {
            Occurrence::Chosen { report, narrowed, elapsed: _ } => {
                vec![("linkwise.choice", report.to_string()), ("linkwise.narrowed", narrowed.to_string())]
            }
            Occurrence::Allocated(Ok(ids)) => vec![("linkwise.devices", ids.join(","))],
            Occurrence::Allocated(Err(why)) => vec![("linkwise.refusal", why)],
            Occurrence::Rpc { method, code, elapsed, parent } => {
                let mut attributes = vec![("linkwise.resource", resource.to_string())];
                attributes.extend(self.0.remove(&resource).unwrap_or_default());
                return Some(Span { attributes, ..of_rpc(method, &code, elapsed, parent, ended) });
            }
            _ => return None,
        };
        self.0.insert(resource, about);
        None
    }
}

fn of_rpc(name: String, code: &str, elapsed: Duration, parent: Option<String>, ended: SystemTime) -> Span {
    let error = (code != "OK").then(|| code.to_owned());
    Span { name, began: before(ended, elapsed), ended, parent, error, attributes: Vec::new() }
}

fn of_dra(occurrence: dra::Occurrence, ended: SystemTime) -> Option<Span> {
    let of_claim = |name: &str, claim: &dyn ToString, error, elapsed| Span {
        name: name.to_owned(),
        began: before(ended, elapsed),
        ended,
        parent: None,
        error,
        attributes: vec![("linkwise.claim", claim.to_string())],
    };
    Some(match occurrence {
        dra::Occurrence::Rpc { method, code, elapsed, parent } => of_rpc(method, &code, elapsed, parent, ended),
        dra::Occurrence::Prepared { claim, result, repeated, elapsed } => {
            let mut span = of_claim("prepare claim", &claim, result.as_ref().err().cloned(), elapsed);
            span.attributes.push(("linkwise.repeated", repeated.to_string()));
            span.attributes.extend(result.ok().map(|devices| ("linkwise.devices", devices.join(","))));
            span
        }
        dra::Occurrence::Unprepared { claim, result, elapsed } => {
            of_claim("unprepare claim", &claim, result.err(), elapsed)
        }
        _ => return None,
    })
}

fn before(moment: SystemTime, elapsed: Duration) -> SystemTime {
    moment.checked_sub(elapsed).unwrap_or(moment)
}
