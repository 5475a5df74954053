//! The exporter of spans: to an OpenTelemetry collector, by OTLP over gRPC.
//!
//! It is here and not in `linkwise`, which would map and compile it without need. Spans are sent in batches; what a
//! collector does not take is lost, counted and logged once. Nobody waits for it.

use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use linkwise::once::Once;
use linkwise::quote::one_line;
use linkwise::runtime::{Span, TracesSide};
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_otlp::{SpanExporter as OtlpExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{IdGenerator, RandomIdGenerator, SpanData, SpanEvents, SpanExporter, SpanLinks};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

/// How long spans are collected before they are sent: those of one admission go together.
const COLLECT: Duration = Duration::from_secs(1);

/// Spans that are sent at once.
const BATCH: usize = 256;

/// How long a collector may take.
const DEADLINE: Duration = Duration::from_secs(10);

/// How long the last batch may take when the program ends.
const LAST: Duration = Duration::from_millis(300);

/// Spans by what became of them.
type Exported = Family<[(&'static str, &'static str); 1], Counter>;

/// What exports spans.
pub(crate) fn client(
    side: TracesSide,
    registry: &mut Registry,
    shutdown: CancellationToken,
) -> BoxFuture<'static, anyhow::Result<()>> {
    let exported = Exported::default();
    registry.register("trace_spans", "Spans of admissions, by whether the collector took them", exported.clone());
    export(side, exported, shutdown).boxed()
}

async fn export(side: TracesSide, exported: Exported, shutdown: CancellationToken) -> anyhow::Result<()> {
    let TracesSide { endpoint, node, mut spans } = side;
    let exporter = OtlpExporter::builder().with_tonic().with_endpoint(&endpoint).with_timeout(DEADLINE).build();
    let mut exporter = match exporter {
        Ok(exporter) => exporter,
        // A variable of the exporter's own is wrong: no reason to serve no GPUs.
        Err(error) => {
            let error = one_line(&error.to_string());
            tracing::error!(endpoint, error, "no spans: the exporter cannot be made");
            shutdown.cancelled().await;
            return Ok(());
        }
    };
    let node = node.map(|node| KeyValue::new("k8s.node.name", node));
    let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
    let resource = Resource::builder().with_service_name("linkwise").with_attribute(version).with_attributes(node);
    exporter.set_resource(&resource.build());
    let mut failing = Once::new();
    let mut ends = false;
    while !ends {
        let mut batch = Vec::new();
        tokio::select! {
            count = spans.recv_many(&mut batch, BATCH) => if count == 0 { break },
            () = shutdown.cancelled() => ends = true,
        }
        if !ends {
            ends = tokio::time::timeout(COLLECT, shutdown.cancelled()).await.is_ok();
        }
        while batch.len() < BATCH
            && let Ok(span) = spans.try_recv()
        {
            batch.push(span);
        }
        if batch.is_empty() {
            continue;
        }
        let count = u64::try_from(batch.len()).unwrap_or(u64::MAX);
        let sent = exporter.export(batch.into_iter().map(data).collect());
        let result = tokio::time::timeout(if ends { LAST } else { DEADLINE }, sent).await;
        let failure = match result {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(one_line(&error.to_string())),
            Err(_) => Some("no answer in time".to_owned()),
        };
        let outcome = if failure.is_some() { "failed" } else { "sent" };
        exported.get_or_create(&[("outcome", outcome)]).inc_by(count);
        match failure {
            Some(error) if failing.is_news(()) => tracing::warn!(endpoint, error, "collector of traces takes no spans"),
            Some(_) => {}
            None => drop(failing.clear()),
        }
    }
    Ok(())
}

/// A span as the exporter takes it. Without a caller's context it begins a trace.
fn data(span: Span) -> SpanData {
    let Span { name, began, ended, parent, error, attributes } = span;
    let ids = RandomIdGenerator::default();
    let (trace, parent) = parent.as_deref().and_then(context).unwrap_or((ids.new_trace_id(), SpanId::INVALID));
    let attributes = attributes.into_iter().map(|(key, value)| KeyValue::new(key, value));
    SpanData {
        span_context: SpanContext::new(trace, ids.new_span_id(), TraceFlags::SAMPLED, false, TraceState::NONE),
        parent_span_id: parent,
        parent_span_is_remote: parent != SpanId::INVALID,
        span_kind: SpanKind::Server,
        name: name.into(),
        start_time: began,
        end_time: ended,
        attributes: attributes.collect(),
        dropped_attributes_count: 0,
        events: SpanEvents::default(),
        links: SpanLinks::default(),
        status: error.map_or(Status::Unset, Status::error),
        instrumentation_scope: InstrumentationScope::builder("linkwise").build(),
    }
}

/// Trace and span of a `traceparent`: `00-<trace>-<span>-<flags>` in hexadecimal digits.
fn context(parent: &str) -> Option<(TraceId, SpanId)> {
    let parts: Vec<&str> = parent.trim().split('-').collect();
    let [version, trace, span, _flags, ..] = parts.as_slice() else { return None };
    let is_hex = |text: &str, length| text.len() == length && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !is_hex(version, 2) || *version == "ff" || !is_hex(trace, 32) || !is_hex(span, 16) {
        return None;
    }
    let (trace, span) = (TraceId::from_hex(trace).ok()?, SpanId::from_hex(span).ok()?);
    (trace != TraceId::INVALID && span != SpanId::INVALID).then_some((trace, span))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callers_context_is_taken_or_none() {
        let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let (trace, span) = context(parent).unwrap();
        assert_eq!(trace.to_string(), "0af7651916cd43dd8448eb211c80319c");
        assert_eq!(span.to_string(), "b7ad6b7169203331");
        for wrong in [
            "",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-+af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319é-b7ad6b7169203331-01",
        ] {
            assert_eq!(context(wrong), None, "{wrong}");
        }
    }
}
