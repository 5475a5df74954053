//! The parts of the page. Each has an id and `data-part`: the page's script replaces the parts that changed.

use std::collections::{BTreeMap, BTreeSet};

use super::holders::{Gpus, PodName, Slot, pod_of};
use super::html::Html;
use super::words::{gpus as gpu_names, percent, rate, shortfall, time, why};
use super::{Choice, View};
use crate::admin::state::{AllocationState, GpuState, OutlookState};
use linkwise_core::state::Availability;
use linkwise_core::words::count;
use linkwise_host::picture::Picture;

/// A share of the best below which a bar is drawn as a warning, in hundredths.
const LOW: u64 = 75;

/// The node's state in two words, and the style in which they are drawn.
pub(super) fn verdict(view: &View) -> (&'static str, &'static str) {
    match &view.ready {
        Err(_) => ("Not ready", "bad"),
        Ok(_) if view.state.gpus.is_empty() => ("No GPU", "plain"),
        Ok(_) => ("Ready", "good"),
    }
}

/// The models of the GPUs: `8 × NVIDIA H100 80GB HBM3`.
pub(super) fn models(view: &View) -> String {
    let mut models: BTreeMap<&str, usize> = BTreeMap::new();
    for gpu in view.topology.gpus() {
        *models.entry(gpu.model.as_deref().unwrap_or("GPU of unknown model")).or_default() += 1;
    }
    models.into_iter().map(|(model, gpus)| format!("{gpus} × {model}")).collect::<Vec<_>>().join(", ")
}

/// The number of GPUs of each availability, and their pods.
struct Counts {
    gpus: BTreeMap<Availability, usize>,
    /// The GPUs that get no new pod, held or not.
    unhealthy: usize,
    pods: usize,
    /// The held GPUs without a named pod: the kubelet does not list their pod yet, or not any more.
    unlisted: usize,
}

impl Counts {
    fn of(view: &View, gpus: &Gpus<'_>) -> Self {
        let mut counts = BTreeMap::new();
        for gpu in &view.state.gpus {
            *counts.entry(gpu.availability).or_default() += 1;
        }
        let is_unlisted =
            |gpu: &&GpuState| gpu.availability == Availability::Held && gpus.holders(&gpu.uuid).is_empty();
        let pods: BTreeSet<PodName> = view.allocations().iter().map(pod_of).collect();
        Self {
            gpus: counts,
            unhealthy: view.state.gpus.iter().filter(|gpu| !gpu.healthy).count(),
            pods: pods.len(),
            unlisted: view.state.gpus.iter().filter(is_unlisted).count(),
        }
    }

    fn get(&self, availability: Availability) -> usize {
        self.gpus.get(&availability).copied().unwrap_or_default()
    }

    fn all(&self) -> usize {
        self.gpus.values().sum()
    }

    fn held_unhealthy(&self) -> usize {
        self.unhealthy.saturating_sub(self.get(Availability::Unhealthy))
    }

    /// The kinds of holders, in words.
    fn holders(&self) -> String {
        let pods = if self.pods > 0 { format!("by {}", count(self.pods, "pod")) } else { String::new() };
        match (self.unlisted, pods.is_empty()) {
            (0, _) => pods,
            (unlisted, true) => format!("{unlisted} by no listed pod"),
            (unlisted, false) => format!("{pods}, {unlisted} by no listed pod"),
        }
    }
}

/// The text that a screen reader speaks when it changes.
pub(super) fn spoken(view: &View, gpus: &Gpus<'_>) -> String {
    let counts = Counts::of(view, gpus);
    let mut said = format!("{}. {}: ", verdict(view).0, count(counts.all(), "GPU"));
    if view.knows_holders() {
        let holders = counts.holders();
        let space = if holders.is_empty() { "" } else { " " };
        let [held, free] = [Availability::Held, Availability::Free].map(|one| counts.get(one));
        said += &format!("{held} held{space}{holders}, {free} free");
    } else {
        said += "holders unknown";
    }
    if counts.get(Availability::Mig) > 0 {
        said += &format!(", {} free in MIG mode", counts.get(Availability::Mig));
    }
    said + &format!(", {} unhealthy.", counts.unhealthy)
}

/// The node in numbers.
pub(super) fn tiles(html: &mut Html, view: &View, gpus: &Gpus<'_>) {
    let counts = Counts::of(view, gpus);
    let (words, look) = verdict(view);
    let known = |availability| match view.knows_holders() {
        true => counts.get(availability).to_string(),
        false => "unknown".to_owned(),
    };
    html.raw("<dl class=\"part tiles\" id=\"tiles\" data-part>");
    html.raw("<div class=\"tile ").raw(look).raw("\"><dt>Node</dt><dd class=\"words\">").text(words).raw("</dd></div>");
    tile(html, "GPUs", (&counts.all().to_string(), ""), "");
    tile(html, "Held", (&known(Availability::Held), &counts.holders()), "");
    tile(html, "Free", (&known(Availability::Free), ""), "");
    if counts.get(Availability::Mig) > 0 {
        tile(html, "Free in MIG mode", (&known(Availability::Mig), ""), "");
    }
    let held = match counts.held_unhealthy() {
        0 => String::new(),
        held if held == counts.unhealthy => "held".to_owned(),
        held => format!("{held} of them held"),
    };
    let look = if counts.unhealthy > 0 { "bad" } else { "" };
    tile(html, "Unhealthy", (&counts.unhealthy.to_string(), &held), look);
    html.raw("</dl>\n");
}

fn tile(html: &mut Html, name: &'static str, (value, more): (&str, &str), look: &'static str) {
    html.raw("<div class=\"tile ").raw(look).raw("\"><dt>").raw(name).raw("</dt><dd>").text(value);
    if !more.is_empty() {
        html.raw(" <small>").text(more).raw("</small>");
    }
    html.raw("</dd></div>");
}

/// The faults, the worst first: unready parts, unhealthy GPUs with the remedies, and warnings of the scan.
pub(super) fn alerts(html: &mut Html, view: &View, gpus: &Gpus<'_>) {
    let sick = view.state.gpus.iter().filter(|gpu| !gpu.healthy || !gpu.reasons.is_empty());
    let held = view.allocations().iter().flat_map(|held| held.gpus.iter().map(move |gpu| (&held.pod, gpu)));
    let gone: Vec<_> = held.filter(|(_, gpu)| gpus.index(gpu).is_none()).collect();
    html.raw("<div class=\"part\" id=\"alerts\" data-part");
    let unready = view.ready.as_ref().err().map(Vec::as_slice).unwrap_or_default();
    let released = view.state.driver_released;
    if unready.is_empty() && sick.clone().next().is_none() && gone.is_empty() && !released && view.knows_holders() {
        html.raw(" hidden></div>\n");
        return;
    }
    html.raw("><h2 class=\"hidden\">What is wrong</h2><ul class=\"alerts\">");
    html.each(unready, |html, line| {
        html.raw("<li class=\"alert\"><strong>Not ready</strong> · ").text(line).raw("</li>");
    });
    if released {
        html.raw(
            "<li class=\"alert warn\"><strong>Driver released</strong> · An operator released the NVIDIA driver; ",
        );
        html.raw("nothing is read from the GPUs until <code>linkwise admin resume</code>.</li>");
    }
    html.each(sick, sick_gpu);
    html.each(gone, |html, (pod, gpu)| {
        html.raw("<li class=\"alert\"><strong>GPU gone</strong> · Pod <b>")
            .text(pod)
            .raw("</b> holds <code>")
            .text(gpu);
        html.raw("</code>, which this machine does not show any more.</li>");
    });
    if !view.knows_holders() && !view.state.gpus.is_empty() {
        html.raw(
            "<li class=\"alert warn\"><strong>Holders unknown</strong> · The kubelet has not said which pods hold ",
        );
        html.raw("which GPUs: its PodResources socket does not answer.</li>");
    }
    html.raw("</ul></div>\n");
}

fn sick_gpu(html: &mut Html, gpu: &GpuState) {
    // The reasons of a healthy GPU do not count.
    html.raw(if gpu.healthy { "<li class=\"alert warn\">" } else { "<li class=\"alert\">" });
    html.raw("<strong>GPU ")
        .number(gpu.index)
        .raw("</strong> <span class=\"mono soft\">")
        .text(&gpu.pci)
        .raw("</span>");
    html.each(&gpu.reasons, |html, reason| {
        html.raw("<div><b>").text(&reason.reason).raw("</b> · ");
        moment(html, reason.since);
        html.raw("<br>Ends with: ").text(&reason.ends_with).raw("</div>");
    });
    if gpu.reasons.is_empty() {
        html.raw(" is unhealthy");
    }
    html.raw("</li>");
}

/// Writes a time, which the script puts into words.
fn moment(html: &mut Html, seconds: u64) {
    let (written, machine) = time(seconds);
    html.raw("<time datetime=\"").text(&machine).raw("\" data-at=\"").number(seconds).raw("\">").text(&written);
    html.raw("</time>");
}

/// Ends a section that has only a sentence to show.
fn says(html: &mut Html, sentence: &str) {
    html.raw("<p class=\"soft\">").text(sentence).raw("</p></section>\n");
}

/// The patterns of pods, defined once.
const PATTERNS: &str = "<svg id=\"patterns\" aria-hidden=\"true\"><defs>\
<pattern id=\"p0\" width=\"8\" height=\"8\" patternUnits=\"userSpaceOnUse\">\
<path d=\"M-2 2l4-4M0 8l8-8M6 10l4-4\"/></pattern>\
<pattern id=\"p1\" width=\"8\" height=\"8\" patternUnits=\"userSpaceOnUse\">\
<circle cx=\"4\" cy=\"4\" r=\"1.8\"/></pattern>\
<pattern id=\"p2\" width=\"8\" height=\"8\" patternUnits=\"userSpaceOnUse\">\
<path d=\"M-2 6l4 4M0 0l8 8M6-2l4 4\"/></pattern>\
<pattern id=\"p3\" width=\"8\" height=\"8\" patternUnits=\"userSpaceOnUse\">\
<path d=\"M0 4h8\"/></pattern>\
</defs></svg>";

/// Writes the picture and the legend of its colours.
pub(super) fn machine(html: &mut Html, view: &View, gpus: &Gpus<'_>) {
    html.raw(PATTERNS)
        .raw("\n<section class=\"part wide card\" id=\"machine\" data-part aria-labelledby=\"machine-name\">");
    html.raw("<h2 id=\"machine-name\">The machine</h2>");
    if view.topology.gpus().is_empty() {
        return says(html, view.state.idle.as_deref().unwrap_or("No GPU has been seen yet."));
    }
    html.raw("<div class=\"scroll\" id=\"picture\" tabindex=\"0\" role=\"region\" ");
    html.raw("aria-label=\"The picture, which may scroll\">");
    let picture = Picture::of_node(&view.observed, &view.topology, &gpus.marks(view));
    html.picture(&picture, &format!("The machine: {}. What it shows is in the tables too.", models(view)));
    html.raw("</div><ul class=\"legend\" aria-label=\"Colours in the picture\">");
    let pods: BTreeSet<(Slot, &PodName)> = gpus.states.keys().flat_map(|uuid| gpus.holders(uuid)).collect();
    html.each(pods, |html, (slot, (namespace, pod))| {
        html.raw("<li>");
        chip(html, slot);
        html.raw("<span title=\"").text(namespace).raw("/").text(pod).raw("\">").text(pod).raw("</span></li>");
    });
    html.raw(
        "<li><svg class=\"chip free\" viewBox=\"0 0 30 24\" aria-hidden=\"true\"><rect x=\"1\" y=\"1\" width=\"28\" ",
    );
    html.raw("height=\"22\" rx=\"5\"/></svg><span>free</span></li>");
    if view.state.gpus.iter().any(|gpu| !gpu.healthy) {
        html.raw("<li><svg class=\"chip sick\" viewBox=\"0 0 30 24\" aria-hidden=\"true\">");
        html.raw("<rect x=\"2\" y=\"2\" width=\"26\" height=\"20\" rx=\"5\"/></svg><span>unhealthy</span></li>");
    }
    html.raw("</ul></section>\n");
}

/// Writes a pod's letters in its colour and pattern.
fn chip(html: &mut Html, slot: Slot) {
    html.raw("<svg class=\"chip c")
        .number(slot.colour())
        .raw("\" viewBox=\"0 0 30 24\" role=\"img\" aria-label=\"pod ");
    html.text(&slot.letters()).raw("\"><rect x=\"1\" y=\"1\" width=\"28\" height=\"22\" rx=\"5\"/>");
    html.raw("<rect class=\"pattern\" x=\"1\" y=\"1\" width=\"28\" height=\"22\" rx=\"5\"/>");
    html.raw("<text x=\"15\" y=\"17\">").text(&slot.letters()).raw("</text></svg>");
}

/// Writes GPUs by NVML's indices, the unhealthy ones marked.
fn gpu_list<'a>(html: &mut Html, uuids: impl IntoIterator<Item = &'a String>, gpus: &Gpus<'_>) {
    html.raw("<ul class=\"gpus\" aria-label=\"GPUs\">");
    html.each(uuids, |html, uuid| {
        let (index, healthy) = gpus.index(uuid).map_or((None, false), |(index, healthy)| (Some(index), healthy));
        html.raw(if healthy { "<li title=\"" } else { "<li class=\"bad\" title=\"" }).text(uuid).raw("\">");
        match index {
            Some(index) => html.number(index),
            None => html.raw("gone"),
        };
        html.raw(if healthy { "</li>" } else { " ✗<span class=\"hidden\"> unhealthy</span></li>" });
    });
    html.raw("</ul>");
}

/// Writes a share of the best in words, and as a bar.
fn share(html: &mut Html, value: u64, best: Option<u64>) {
    let Some(share) = best.and_then(|best| percent(value, best)) else { return };
    html.number(share).raw(" %<svg class=\"bar");
    html.raw(if share < LOW { " low" } else { "" });
    html.raw(
        "\" viewBox=\"0 0 100 6\" preserveAspectRatio=\"none\" aria-hidden=\"true\"><rect width=\"100\" height=\"6\"/>",
    );
    html.raw("<rect class=\"part-of\" width=\"").number(share).raw("\" height=\"6\"/></svg>");
}

/// Writes the bandwidth of an all-reduce with NVLink SHARP beside that of rings, if there is NVLink SHARP.
fn with_nvls(html: &mut Html, nvls: Option<u64>, rings: u64) -> &mut Html {
    let Some(nvls) = nvls else { return html };
    html.raw("<div class=\"soft\">NVLink SHARP ").text(&rate(nvls));
    html.raw(if nvls > rings { "</div>" } else { ": rings are faster</div>" })
}

/// Writes the GPUs that requests would get now.
pub(super) fn outlook(html: &mut Html, view: &View) {
    html.raw("<section class=\"card\" id=\"outlook\" data-part aria-labelledby=\"outlook-name\">");
    html.raw("<h2 id=\"outlook-name\">What a request would get now</h2>");
    let Some(outlooks) = &view.state.outlook else {
        return says(html, "Not known while the kubelet does not say who holds what.");
    };
    if outlooks.is_empty() {
        return says(html, "No GPU, no answer.");
    }
    let indices: BTreeMap<&str, u32> = view.state.gpus.iter().map(|gpu| (gpu.uuid.as_str(), gpu.index)).collect();
    html.raw("<ul class=\"sizes\">");
    html.each(outlooks, |html, outlook| {
        let OutlookState { size, collective, nvls, best, gpus } = outlook;
        html.raw("<li data-size=\"").text(&size.to_string()).raw("\"><b>").text(&count(*size, "GPU")).raw("</b><div>");
        if gpus.is_empty() {
            html.raw("<span class=\"tag warn\">cannot be met</span></div></li>");
            return;
        }
        let named = gpu_names(gpus.iter().filter_map(|uuid| indices.get(uuid.as_str()).copied()));
        html.text(&named);
        if let Some(collective) = collective {
            html.raw(", <span class=\"rate\">").text(&rate(*collective)).raw("</span>");
            with_nvls(html, *nvls, *collective);
            if let Some(share) = best.and_then(|best| percent(*collective, best)) {
                html.raw("<div class=\"soft\">");
                if share == 100 {
                    html.raw("the best there is");
                } else {
                    html.raw("of the machine's best: ");
                    self::share(html, *collective, *best);
                }
                html.raw("</div>");
            }
        }
        html.raw("</div></li>");
    });
    html.raw("</ul></section>\n");
}

pub(super) fn readiness(html: &mut Html, view: &View) {
    html.raw("<section class=\"card\" id=\"readiness\" data-part aria-labelledby=\"readiness-name\">");
    html.raw("<h2 id=\"readiness-name\">Readiness</h2><ul class=\"checks\">");
    if let (Some(idle), true) = (&view.state.idle, view.state.parts.is_empty()) {
        check(html, "GPUs", view.ready.is_ok(), idle, None);
    }
    for (name, resource) in &view.state.resources {
        let devices = match resource.unhealthy {
            0 => format!("{}, {} healthy", resource.phase, count(resource.healthy, "device")),
            sick => format!("{}, {} healthy, {sick} not", resource.phase, count(resource.healthy, "device")),
        };
        check(html, name, resource.phase == "serving", &devices, resource.trouble.as_deref());
    }
    for (name, part) in &view.state.parts {
        check(html, name, part.ready, &part.phase, part.trouble.as_deref());
    }
    html.raw("</ul>");
    if !view.state.warnings.is_empty() {
        html.raw("<details id=\"warnings\"><summary id=\"warnings-summary\">");
        html.text(&count(view.state.warnings.len(), "warning"))
            .raw(" about the hardware</summary><ul class=\"checks\">");
        html.each(&view.state.warnings, |html, warning| {
            html.raw("<li><span class=\"mark no\">!</span><span>").text(warning).raw("</span></li>");
        });
        html.raw("</ul></details>");
    }
    html.raw("</section>\n");
}

fn check(html: &mut Html, name: &str, ready: bool, phase: &str, trouble: Option<&str>) {
    html.raw(if ready {
        "<li><span class=\"mark\" role=\"img\" aria-label=\"ready\">✓</span>"
    } else {
        "<li><span class=\"mark no\" role=\"img\" aria-label=\"not ready\">✗</span>"
    });
    html.raw("<span><b>").text(name).raw("</b> <span class=\"soft\">").text(phase).raw("</span>");
    if let Some(trouble) = trouble {
        html.raw("<br>").text(trouble);
    }
    html.raw("</span></li>");
}

/// Writes a table's cell, with its column's name for narrow screens.
fn cell(html: &mut Html, column: &'static str, write: impl FnOnce(&mut Html)) {
    html.raw("<td role=\"cell\" data-label=\"").raw(column).raw("\"><div>");
    write(html);
    html.raw("</div></td>");
}

/// Begins a table that becomes a list of cards on narrow screens and keeps its roles there.
fn table(html: &mut Html, columns: &[&'static str]) {
    html.raw("<table class=\"rows\" role=\"table\"><thead role=\"rowgroup\"><tr role=\"row\">");
    html.each(columns, |html, column| {
        html.raw("<th role=\"columnheader\" scope=\"col\">").raw(column).raw("</th>");
    });
    html.raw("</tr></thead><tbody role=\"rowgroup\">");
}

/// Writes the holders with their GPUs and the quality of their sets.
pub(super) fn holders(html: &mut Html, view: &View, gpus: &Gpus<'_>) {
    html.raw("<section class=\"part card\" id=\"holders\" data-part tabindex=\"-1\" aria-labelledby=\"holders-name\">");
    html.raw("<h2 id=\"holders-name\">Who holds what</h2>");
    if view.allocations().is_empty() {
        let why = match (view.knows_holders(), Counts::of(view, gpus).unlisted) {
            (false, _) => "The kubelet has not said.",
            (true, 0) => "No pod holds a GPU.",
            (true, _) => "The kubelet lists no pod with a GPU, or has not answered for 5 minutes.",
        };
        return says(html, why);
    }
    table(
        html,
        &["Pod", "Container", "GPUs", "Together", "Of the machine's best", "When admitted", "Why not the best"],
    );
    let mut held: Vec<(Slot, &AllocationState)> =
        view.allocations().iter().map(|held| (gpus.slots.of(&pod_of(held)), held)).collect();
    held.sort_by_key(|(slot, _)| *slot);
    html.each(held, |html, (slot, held)| row(html, slot, held, gpus));
    html.raw("</tbody></table></section>\n");
}

fn row(html: &mut Html, slot: Slot, held: &AllocationState, gpus: &Gpus<'_>) {
    html.raw("<tr role=\"row\"><td role=\"cell\"><div class=\"pod\">");
    chip(html, slot);
    html.raw("<span><b>").text(&held.pod).raw("</b><br><span class=\"soft\">").text(&held.namespace);
    html.raw("</span></span></div></td>");
    cell(html, "Container", |html| {
        html.text(&held.container).raw("<br><span class=\"soft\">").text(&held.resource);
        html.raw(if held.door == "dra" { " (DRA)</span>" } else { "</span>" });
    });
    cell(html, "GPUs", |html| gpu_list(html, &held.gpus, gpus));
    cell(html, "Together", |html| {
        match held.collective {
            Some(collective) => {
                html.raw("<span class=\"rate\">").text(&rate(collective)).raw("</span>");
                with_nvls(html, held.nvls, collective)
            }
            None => html.raw("<span class=\"soft\">–</span>"),
        };
    });
    let collective = held.collective.unwrap_or_default();
    let shared = |html: &mut Html, best: Option<u64>| match (held.collective, best) {
        (Some(_), Some(_)) => share(html, collective, best),
        _ => {
            html.raw("<span class=\"soft\">–</span>");
        }
    };
    cell(html, "Of the machine's best", |html| shared(html, held.best));
    cell(html, "When admitted", |html| shared(html, held.best_at_admission));
    cell(html, "Why not the best", |html| {
        html.each(&held.why, |html, word| {
            html.raw("<span class=\"tag warn\">").text(shortfall(word)).raw("</span>");
        });
    });
    html.raw("</tr>\n");
}

pub(super) fn choices(html: &mut Html, view: &View, gpus: &Gpus<'_>) {
    html.raw("<section class=\"card\" id=\"choices\" data-part aria-labelledby=\"choices-name\">");
    html.raw("<h2 id=\"choices-name\">Last choices</h2>");
    if view.choices.is_empty() {
        return says(html, "The kubelet has not asked yet. It asks only where it has more GPUs than it needs.");
    }
    html.raw("<ol class=\"choices\">");
    html.each(&view.choices, |html, choice| {
        let Choice { at, resource, report, narrowed } = choice;
        html.raw("<li><div class=\"line-up\"><b>").text(&report.size.to_string()).raw(" × ").text(resource);
        html.raw("</b> <span class=\"soft\">of ").text(&report.candidates.to_string()).raw(" →</span> ");
        let uuids: Vec<String> = report.devices.iter().map(|gpu| gpu.uuid.to_string()).collect();
        gpu_list(html, &uuids, gpus);
        moment(html, *at);
        html.raw("</div><p class=\"why\">").text(&why(report, *narrowed)).raw("</p></li>");
    });
    html.raw("</ol></section>\n");
}

/// Writes every GPU with its names.
pub(super) fn all_gpus(html: &mut Html, view: &View, gpus: &Gpus<'_>) {
    html.raw("<section class=\"part card\" id=\"gpus\" data-part aria-label=\"All GPUs\"><details id=\"gpus-table\">");
    html.raw("<summary id=\"gpus-summary\">All GPUs by UUID</summary>");
    table(html, &["GPU", "PCI address", "UUID", "Rail", "Held by", "Health"]);
    html.each(&view.state.gpus, |html, gpu| {
        html.raw("<tr role=\"row\" data-uuid=\"").text(&gpu.uuid).raw("\">");
        cell(html, "GPU", |html| {
            html.number(gpu.index);
        });
        cell(html, "PCI address", |html| {
            html.raw("<code>").text(&gpu.pci).raw("</code>");
        });
        cell(html, "UUID", |html| {
            html.raw("<code>").text(&gpu.uuid).raw("</code>");
        });
        cell(html, "Rail", |html| {
            let known = view.topology.gpus().iter().find(|known| known.uuid.as_str() == gpu.uuid);
            let rail = known.and_then(|known| known.rail);
            html.text(&rail.map_or_else(|| "–".to_owned(), |rail| rail.to_string()));
        });
        cell(html, "Held by", |html| {
            let holders = gpus.holders(&gpu.uuid);
            let names: Vec<&str> = holders.iter().map(|(_, (_, pod))| pod.as_str()).collect();
            let nobody = match gpu.availability {
                Availability::Held => "no listed pod",
                Availability::Unknown => "unknown",
                Availability::Free | Availability::Mig | Availability::Unhealthy => "–",
            };
            html.text(if names.is_empty() { nobody.to_owned() } else { names.join(", ") }.as_str());
        });
        cell(html, "Health", |html| {
            let reasons: Vec<&str> = gpu.reasons.iter().map(|reason| reason.reason.as_str()).collect();
            html.text(if gpu.healthy { "healthy" } else { "unhealthy" });
            if !reasons.is_empty() {
                html.raw(": ").text(&reasons.join(", "));
            }
        });
        html.raw("</tr>\n");
    });
    html.raw("</tbody></table></details></section>\n");
}
