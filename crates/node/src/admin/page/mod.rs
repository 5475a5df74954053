//! The node's page, `GET /` on the metrics port: the holders of GPUs, the faults, the GPUs that a request would get
//! now, and the reasons for the last choices.
//!
//! A function of [`View`]: the same view gives the same page. The node makes views, and renders them apart from
//! admissions. The page is one document without parts from elsewhere: it contains its one style sheet and its one
//! script, and with the header [`security_policy`] a browser loads nothing else. All text from outside goes through
//! `html`, which escapes it.

mod holders;
mod html;
mod sections;
#[cfg(test)]
mod tests;
mod words;

use std::sync::{Arc, LazyLock};

use axum::body::Bytes;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};

use super::state::State;
use html::Html;
use linkwise_core::allocation::AllocationReport;
use linkwise_core::topology::{NodeObservation, NodeTopology};

pub use holders::Slots;

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// The content of the page.
#[derive(Clone, Debug)]
pub struct View {
    /// The node's name, if it is known.
    pub node: Option<String>,
    /// The state, as `GET /state` of the admin socket shows it.
    pub state: State,
    /// The answer of /readyz.
    pub ready: Result<String, Vec<String>>,
    /// The last choices, the latest first.
    pub choices: Vec<Choice>,
    /// The observation of the last scan.
    pub observed: Arc<NodeObservation>,
    /// The graph.
    pub topology: Arc<NodeTopology>,
}

impl View {
    /// Returns true if the kubelet has reported the holders.
    fn knows_holders(&self) -> bool {
        self.state.allocations.is_some()
    }

    /// The known allocations.
    fn allocations(&self) -> &[super::AllocationState] {
        self.state.allocations.as_deref().unwrap_or_default()
    }
}

/// One answer to a kubelet's GetPreferredAllocation.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The time in seconds since 1970.
    pub at: u64,
    /// The resource.
    pub resource: String,
    /// The reasons for these GPUs.
    pub report: Arc<AllocationReport>,
    /// Set if the kubelet did not offer some devices that were free.
    pub narrowed: bool,
}

/// A page that is ready to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// Its entity tag, quotes included: a hash of the page.
    tag: HeaderValue,
    html: Bytes,
}

impl Page {
    /// Renders a view; `slots` gives pods their letters and colours, and keeps those of pods that stay.
    pub fn render(view: &View, slots: &mut Slots) -> Self {
        slots.follow(view.allocations());
        let mut html = Html::default();
        document(&mut html, view, slots);
        let html = Bytes::from(html.into_string());
        let mut tag: String = Sha256::digest(&html).iter().take(12).map(|byte| format!("{byte:02x}")).collect();
        tag = format!("\"{tag}\"");
        // Hexadecimal digits are valid in a header.
        Self { tag: HeaderValue::from_str(&tag).unwrap_or(HeaderValue::from_static("\"\"")), html }
    }

    /// The answer to a request: the page, or "not modified" if the caller has it already.
    pub(super) fn answer(&self, request: &HeaderMap) -> Response {
        let headers = [
            (header::ETAG, self.tag.clone()),
            (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
            (header::CONTENT_SECURITY_POLICY, security_policy()),
            (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
            (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        ];
        if request.get(header::IF_NONE_MATCH) == Some(&self.tag) {
            return (StatusCode::NOT_MODIFIED, headers).into_response();
        }
        let kind = [(header::CONTENT_TYPE, "text/html; charset=utf-8")];
        (headers, kind, self.html.clone()).into_response()
    }
}

/// The page's rights in a browser: run its script, apply its style, and ask this server; load nothing from elsewhere.
fn security_policy() -> HeaderValue {
    static POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
        let policy = format!(
            "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; connect-src 'self'; base-uri 'none'; \
             form-action 'none'; frame-ancestors 'none'",
            base64(&Sha256::digest(STYLE)),
            base64(&Sha256::digest(SCRIPT)),
        );
        HeaderValue::from_str(&policy).unwrap_or(HeaderValue::from_static("default-src 'none'"))
    });
    POLICY.clone()
}

/// Base64 with padding (RFC 4648, section 4).
fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let bits = (0..3).fold(0_usize, |bits, at| bits << 8 | usize::from(chunk.get(at).copied().unwrap_or(0)));
        for (number, shift) in [18, 12, 6, 0].into_iter().enumerate() {
            let letter = LETTERS.get(bits >> shift & 63).copied().map_or('=', char::from);
            text.push(if number <= chunk.len() { letter } else { '=' });
        }
    }
    text
}

fn document(html: &mut Html, view: &View, slots: &Slots) {
    let node = view.node.as_deref();
    html.raw("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n")
        .raw("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>")
        .text(sections::verdict(view).0)
        .raw(" · ")
        .text(node.unwrap_or("linkwise"))
        .raw("</title>\n<noscript><meta http-equiv=\"refresh\" content=\"5\"></noscript>\n<style>")
        .raw(STYLE)
        .raw(
            "</style>\n</head>\n<body>\n<a class=\"skip\" href=\"#holders\">Skip to who holds what</a>\n<header>\n<h1>",
        )
        .text(node.unwrap_or("linkwise"))
        .raw(" <span>");
    html.text(&sections::models(view))
        .raw("</span></h1>\n<p class=\"fresh\" id=\"fresh\">as of when it was loaded</p>\n");
    let gpus = holders::Gpus::of(view, slots);
    html.raw("<p class=\"hidden\" id=\"said\" role=\"status\">").text(&sections::spoken(view, &gpus));
    html.raw("</p>\n</header>\n<main>\n");
    sections::tiles(html, view, &gpus);
    sections::alerts(html, view, &gpus);
    sections::machine(html, view, &gpus);
    html.raw("<div class=\"column\">\n");
    sections::outlook(html, view);
    sections::readiness(html, view);
    sections::choices(html, view, &gpus);
    html.raw("</div>\n");
    sections::holders(html, view, &gpus);
    sections::all_gpus(html, view, &gpus);
    html.raw("</main>\n<footer><span>linkwise ").text(&view.state.version);
    html.raw("</span><a href=\"metrics\">metrics</a><a href=\"readyz\">readiness</a><a href=\"livez\">liveness</a>");
    html.raw("</footer>\n");
    html.raw("<script>").raw(SCRIPT).raw("</script>\n</body>\n</html>\n");
}
