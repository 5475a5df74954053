//! The node's page, `GET /` on the metrics port: `page.html` filled with a [`NodeView`] and the picture of the machine.
//!
//! A function of its arguments, the pods' letters among them. `views` makes the views, and renders pages on a thread of
//! its own. The page is one document: it contains its style sheet and its script, and the header that `security_policy`
//! makes has a browser load nothing from elsewhere. The template engine passes each value through `Escaper`.

mod marks;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::sync::LazyLock;

use askama::Template;
use axum::body::Bytes;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use sha2::{Digest, Sha256};

use linkwise_core::publish::placement::{Allocation, Shortfall};
use linkwise_core::publish::view::{GpuView, NodeView, ResourceView, gpu_names, percent};
use linkwise_core::state::Availability;
use linkwise_core::topology::{Gpu, NodeObservation, NodeTopology};
use linkwise_core::words::{self, gigabytes};
use linkwise_host::picture::{self, Picture, harmless};
use marks::{Holders, PodName, PodNumber};

pub use marks::PodNumbers;

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// The share of the best, in percent, below which a bar is drawn as a warning.
const LOW_PERCENT: u64 = 75;

/// A page that is ready to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// Its entity tag, quotes included: a hash of the page.
    tag: HeaderValue,
    html: Bytes,
}

impl Page {
    /// Renders a view, with the machine of the last scan; `numbers` gives pods their letters and colours, and keeps
    /// those of pods that stay.
    pub fn render(view: &NodeView, machine: (&NodeObservation, &NodeTopology), numbers: &mut PodNumbers) -> Self {
        numbers.follow(view.held());
        let html = Bytes::from(Document::new(view, machine, numbers).render().unwrap_or_default());
        let hash: String = Sha256::digest(&html).iter().take(12).map(|byte| format!("{byte:02x}")).collect();
        // Hexadecimal digits are valid in a header.
        let tag = HeaderValue::from_str(&format!("\"{hash}\"")).unwrap_or(HeaderValue::from_static("\"\""));
        Self { tag, html }
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
        let [style, script] = [STYLE, SCRIPT].map(|text| STANDARD.encode(Sha256::digest(text)));
        let policy = format!(
            "default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'; connect-src 'self'; \
             base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        );
        HeaderValue::from_str(&policy).unwrap_or(HeaderValue::from_static("default-src 'none'"))
    });
    POLICY.clone()
}

/// Makes text harmless in HTML, as content or inside a quoted attribute. Control characters, and those that change the
/// direction of writing, are replaced.
#[derive(Clone, Copy)]
struct Escaper;

impl askama::filters::Escaper for Escaper {
    fn write_escaped_str<W: Write>(&self, mut to: W, text: &str) -> fmt::Result {
        text.chars().map(harmless).try_for_each(|letter| match letter {
            '&' => to.write_str("&amp;"),
            '<' => to.write_str("&lt;"),
            '>' => to.write_str("&gt;"),
            '"' => to.write_str("&quot;"),
            '\'' => to.write_str("&#39;"),
            letter => to.write_char(letter),
        })
    }
}

/// The template's values.
#[derive(Template)]
#[template(path = "page.html")]
struct Document<'a> {
    view: &'a NodeView,
    /// The models of the GPUs: `8 × NVIDIA H100 80GB HBM3`.
    models: String,
    /// The picture as SVG, with its text escaped; empty without a GPU.
    picture: String,
    holders: Holders<'a>,
}

impl<'a> Document<'a> {
    fn new(view: &'a NodeView, machine: (&NodeObservation, &NodeTopology), numbers: &'a PodNumbers) -> Self {
        let (observed, topology) = machine;
        let (models, holders) = (models(topology.gpus()), Holders::of(view, numbers));
        let picture = match topology.gpus() {
            [] => String::new(),
            gpus => {
                let marks = gpus.iter().enumerate().map(|(place, gpu)| (place, holders.mark(view, gpu.uuid.as_str())));
                let name = format!("The machine: {models}. What it shows is in the tables too.");
                picture::element(&Picture::of_node(observed, topology, &marks.collect()), &name)
            }
        };
        Self { view, models, picture, holders }
    }

    fn name(&self) -> &str {
        self.view.node.as_deref().unwrap_or("linkwise")
    }

    /// The node's state in one or two words, and its CSS class.
    fn verdict(&self) -> (&'static str, &'static str) {
        match (self.view.unready.is_empty(), self.view.gpus.is_empty()) {
            (false, _) => ("Not ready", "bad"),
            (true, true) => ("No GPU", "plain"),
            (true, false) => ("Ready", "good"),
        }
    }

    fn count(&self, availability: Availability) -> usize {
        self.view.gpus.iter().filter(|gpu| gpu.availability == availability).count()
    }

    fn count_or_unknown(&self, availability: Availability) -> String {
        match self.view.allocations {
            Some(_) => self.count(availability).to_string(),
            None => "unknown".to_owned(),
        }
    }

    /// The number of unhealthy GPUs, held or not.
    fn unhealthy(&self) -> usize {
        self.view.gpus.iter().filter(|gpu| !gpu.healthy).count()
    }

    fn held_unhealthy(&self) -> String {
        let unhealthy = self.unhealthy();
        match unhealthy.saturating_sub(self.count(Availability::Unhealthy)) {
            0 => String::new(),
            held if held == unhealthy => "held".to_owned(),
            held => format!("{held} of them held"),
        }
    }

    /// The number of held GPUs without a named pod: the kubelet does not list their pod yet, or not any more.
    fn unlisted(&self) -> usize {
        let held = self.view.gpus.iter().filter(|gpu| gpu.availability == Availability::Held);
        held.filter(|gpu| self.holders.of_gpu(&gpu.uuid).is_empty()).count()
    }

    fn holders_in_words(&self) -> String {
        let pods = match self.holders.pods() {
            0 => String::new(),
            pods => format!("by {}", words::count(pods, "pod")),
        };
        match (self.unlisted(), pods.is_empty()) {
            (0, _) => pods,
            (unlisted, true) => format!("{unlisted} by no listed pod"),
            (unlisted, false) => format!("{pods}, {unlisted} by no listed pod"),
        }
    }

    /// The text that a screen reader speaks when it changes.
    fn spoken(&self) -> String {
        let mut text = format!("{}. {}: ", self.verdict().0, words::count(self.view.gpus.len(), "GPU"));
        if self.view.allocations.is_some() {
            let holders = self.holders_in_words();
            let space = if holders.is_empty() { "" } else { " " };
            let [held, free] = [Availability::Held, Availability::Free].map(|one| self.count(one));
            text += &format!("{held} held{space}{holders}, {free} free");
        } else {
            text += "holders unknown";
        }
        if self.count(Availability::Mig) > 0 {
            text += &format!(", {} free in MIG mode", self.count(Availability::Mig));
        }
        if self.count(Availability::Cordoned) > 0 {
            text += &format!(", {} cordoned", self.count(Availability::Cordoned));
        }
        text + &format!(", {} unhealthy.", self.unhealthy())
    }

    fn is_anything_wrong(&self) -> bool {
        let view = self.view;
        let is_node_fine = view.unready.is_empty() && !view.driver_released && view.allocations.is_some();
        !(is_node_fine && self.sick().is_empty() && self.gone().is_empty())
    }

    /// The GPUs that are unhealthy, or have a reason that does not make them unhealthy.
    fn sick(&self) -> Vec<&GpuView> {
        self.view.gpus.iter().filter(|gpu| !gpu.healthy || !gpu.reasons.is_empty()).collect()
    }

    /// The pods that hold a GPU which this machine does not show any more, each with the GPU's UUID.
    fn gone(&self) -> Vec<(&str, &str)> {
        let held = |held: &'a Allocation| held.all_gpus().map(|uuid| (held.pod.as_str(), uuid));
        self.view.held().iter().flat_map(held).filter(|(_, uuid)| self.view.gpu(uuid).is_none()).collect()
    }

    /// The pods of the legend.
    fn pods(&self) -> Vec<(PodNumber, &PodName)> {
        let mut pods: Vec<_> = self.view.gpus.iter().flat_map(|gpu| self.holders.of_gpu(&gpu.uuid)).collect();
        pods.sort();
        pods.dedup();
        pods
    }

    /// The allocations, in the order of their pods' numbers.
    fn rows(&self) -> Vec<(PodNumber, &Allocation)> {
        let mut rows: Vec<_> = self.view.held().iter().map(|held| (self.holders.number(held), held)).collect();
        rows.sort_by_key(|(number, _)| *number);
        rows
    }

    /// The UUID and the name (NVML's index, or `gone`) of each GPU, and true if it is healthy.
    fn cells<'b, T: AsRef<str> + ?Sized + 'b>(
        &self,
        uuids: impl Iterator<Item = &'b T>,
    ) -> Vec<(&'b str, String, bool)> {
        let cell = |uuid: &'b str| match self.view.gpu(uuid) {
            Some(gpu) => (uuid, gpu.index.to_string(), gpu.healthy),
            None => (uuid, "gone".to_owned(), false),
        };
        uuids.map(|uuid| cell(uuid.as_ref())).collect()
    }

    fn text_without_holders(&self) -> &'static str {
        match (&self.view.allocations, self.unlisted()) {
            (None, _) => "The kubelet has not reported holders yet.",
            (Some(_), 0) => "No pod holds a GPU.",
            (Some(_), _) => "The kubelet lists no pod with a GPU, or has not answered for 5 minutes.",
        }
    }

    fn held_by(&self, gpu: &GpuView) -> String {
        let pods: Vec<&str> = self.holders.of_gpu(&gpu.uuid).iter().map(|(_, (_, pod))| pod.as_str()).collect();
        match gpu.availability {
            _ if !pods.is_empty() => pods.join(", "),
            Availability::Held => "no listed pod".to_owned(),
            Availability::Unknown => "unknown".to_owned(),
            Availability::Withheld => "not offered".to_owned(),
            Availability::Free | Availability::Mig | Availability::Unhealthy | Availability::Cordoned => "–".to_owned(),
        }
    }

    /// GPUs by NVML's indices: `GPUs 0-3, 6`.
    fn names(&self, uuids: &[linkwise_core::topology::GpuUuid]) -> String {
        gpu_names(uuids.iter().filter_map(|uuid| Some(self.view.gpu(uuid.as_str())?.index)))
    }
}

/// The values that need no view.
impl Document<'_> {
    fn percent(value: &Option<u64>, best: &Option<u64>) -> Option<u64> {
        percent(*value, *best)
    }

    fn rate(mbps: &u64) -> String {
        format!("{} GB/s", gigabytes(*mbps))
    }

    fn is_low(percent: &u64) -> bool {
        *percent < LOW_PERCENT
    }

    fn devices(resource: &ResourceView) -> String {
        let ResourceView { phase, healthy, unhealthy, .. } = resource;
        let not = if *unhealthy > 0 { format!(", {unhealthy} not") } else { String::new() };
        format!("{phase}, {} healthy{not}", words::count(*healthy, "device"))
    }

    /// Seconds since 1970 as HTML's `datetime`; a number that is not a valid time stays a number.
    fn datetime(seconds: &u64) -> String {
        let time = i64::try_from(*seconds).ok().and_then(|seconds| Timestamp::from_second(seconds).ok());
        time.map_or_else(|| seconds.to_string(), |time| time.to_string())
    }

    /// Seconds since 1970 for a person: `2026-11-23 00:41:22 UTC`.
    fn time(seconds: &u64) -> String {
        Self::datetime(seconds).replace('T', " ").replace('Z', " UTC")
    }

    /// The reason why a container has less than the machine's best.
    fn shortfall(why: &Shortfall) -> &'static str {
        match why {
            Shortfall::Narrowed => "the kubelet narrowed the choice",
            Shortfall::Scheduler => "the scheduler chose",
            Shortfall::Fragmented => "other pods held better GPUs",
            Shortfall::Sick => "better GPUs were unhealthy",
            Shortfall::Unknown => "unknown",
        }
    }
}

fn models(gpus: &[Gpu]) -> String {
    let mut models: BTreeMap<&str, usize> = BTreeMap::new();
    for gpu in gpus {
        *models.entry(gpu.model.as_deref().unwrap_or("GPU of unknown model")).or_default() += 1;
    }
    models.into_iter().map(|(model, gpus)| format!("{gpus} × {model}")).collect::<Vec<_>>().join(", ")
}
