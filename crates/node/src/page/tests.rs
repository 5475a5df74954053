//! The page of a DGX-1 as a text: escaped names, the browser's rights, and when the page is sent again.

use super::*;
use linkwise_core::publish::placement::Outlook;
use linkwise_core::publish::view::{ChoiceView, PartState, ReasonView};

/// Names with characters that HTML, SVG or a browser interprets.
const HOSTILE: [&str; 5] = [
    "<script>alert(1)</script>",
    "\"><img src=x onerror=alert(1)>",
    "' onmouseover='alert(1)",
    "</title></svg></style><svg onload=alert(1)>",
    "&lt;b&gt;\u{202e}gnp\u{0}",
];

/// A machine and its view.
struct Shown {
    observed: NodeObservation,
    topology: NodeTopology,
    view: NodeView,
}

/// A DGX-1 on which two pods with these names hold GPUs 0 to 3, and GPU 5 is unhealthy for this reason. Other
/// texts, such as the node's name, are equal to the reason.
fn shown(pods: [&str; 2], reason: &str) -> Shown {
    let mut observed = linkwise_host::machines::load("dgx1-v100").unwrap().observed;
    observed.gpus[2].model = Some(reason.to_owned());
    let (topology, _) = NodeTopology::assemble(&observed);
    let uuid = |at: usize| topology.gpus()[at].uuid.clone();
    let allocation = |(pod, gpus): (&str, [usize; 2])| Allocation {
        namespace: pod.to_owned(),
        pod: pod.to_owned(),
        container: pod.to_owned(),
        resource: "nvidia.com/gpu".to_owned(),
        door: "plugin".into(),
        gpus: gpus.map(uuid).into(),
        collective: Some(20_000),
        nvls: Some(35_500),
        best: Some(40_000),
        best_at_admission: Some(20_000),
        why: vec![Shortfall::Fragmented],
        ..Allocation::default()
    };
    let sick =
        ReasonView { reason: reason.to_owned(), kind: "xid".into(), since: 1_700_000_000, ends_with: "a reset".into() };
    let gpus = topology.gpus().iter().enumerate().map(|(at, gpu)| GpuView {
        uuid: gpu.uuid.to_string(),
        index: gpu.index,
        pci: gpu.pci.to_string(),
        model: gpu.model.clone(),
        door: None,
        healthy: at != 5,
        availability: match at {
            0..=3 => Availability::Held,
            5 => Availability::Unhealthy,
            _ => Availability::Free,
        },
        reasons: if at == 5 { vec![sick.clone()] } else { Vec::new() },
        ..GpuView::default()
    });
    let part = PartState { phase: "waiting".into(), ready: false, trouble: Some(reason.to_owned()) };
    let choice = ChoiceView { why: reason.to_owned(), gpus: vec!["GPU-elsewhere".to_owned()], ..ChoiceView::default() };
    let free = vec![uuid(4), uuid(6)];
    let view = NodeView {
        version: "1.2.3".into(),
        node: Some(reason.to_owned()),
        unready: vec![format!("CDI sync: {reason}")],
        parts: [("CDI sync".to_owned(), part)].into(),
        gpus: gpus.collect(),
        allocations: Some(pods.into_iter().zip([[0, 1], [2, 3]]).map(allocation).collect()),
        outlook: Some(vec![
            Outlook { size: 2, collective: Some(20_000), best: Some(40_000), gpus: free, ..Outlook::default() },
            Outlook { size: 8, best: Some(120_000), ..Outlook::default() },
        ]),
        choices: vec![choice],
        problems: vec![reason.to_owned()],
        warnings: vec![reason.to_owned()],
        ..NodeView::default()
    };
    Shown { observed, topology, view }
}

fn page(shown: &Shown, numbers: &mut PodNumbers) -> Page {
    Page::render(&shown.view, (&shown.observed, &shown.topology), numbers)
}

fn text(shown: &Shown) -> String {
    String::from_utf8(page(shown, &mut PodNumbers::default()).html.to_vec()).unwrap()
}

#[test]
fn hostile_names_stay_text() {
    for hostile in HOSTILE {
        let page = text(&shown([hostile, "b"], hostile));
        let ours = page.replace(STYLE, "").replace(SCRIPT, "");
        assert_eq!((ours.matches("<script").count(), ours.matches("</script>").count()), (1, 1), "{hostile}");
        for markup in ["<img", "onerror=alert(1)>", "<svg onload", "\u{202e}", "\u{0}"] {
            assert!(!ours.contains(markup), "{hostile}: {markup}");
        }
        assert_eq!(ours.matches('<').count(), ours.matches('>').count(), "{hostile}");
        let escaped = hostile.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        let escaped = escaped.replace('"', "&quot;").replace('\'', "&#39;").replace(['\u{202e}', '\u{0}'], "\u{fffd}");
        assert!(ours.matches(&escaped).count() >= 10, "{hostile}: not shown as text");
    }
}

#[test]
fn long_names_make_no_endless_page() {
    let long = "x".repeat(253);
    let (short, long) = (text(&shown(["a", "b"], "XID 79")), text(&shown([&long, "b"], "XID 79")));
    assert!(long.len() < short.len() + 253 * 10, "{} to {}", long.len(), short.len());
    assert!(short.len() < 100_000, "{}", short.len());
}

#[test]
fn page_shows_holders_and_problems() {
    let page = text(&shown(["train-a", "train-b"], "XID 79"));
    for words in [
        "<dt>Held</dt><dd>4 <small>by 2 pods</small></dd>",
        "<dt>Free</dt><dd>3</dd>",
        "<dt>Unhealthy</dt><dd>1</dd>",
        "8 GPUs: 4 held by 2 pods, 3 free, 1 unhealthy.",
        "Ends with: a reset",
        "2023-11-14 22:13:20 UTC",
        ">A train-a</text>",
        "20.0 GB/s",
        "NVLink SHARP 35.5 GB/s",
        "50 %",
        "other pods held better GPUs",
        "cannot be met",
    ] {
        assert!(page.contains(words), "{words}");
    }
    let mut unknown = shown(["a", "b"], "XID 79");
    (unknown.view.allocations, unknown.view.outlook) = (None, None);
    let page = text(&unknown);
    assert!(page.contains("<dt>Free</dt><dd>unknown</dd>") && page.contains("PodResources socket does not answer"));
    assert!(!page.contains("cannot be met"), "without holders the outlook is unknown");
}

#[test]
fn gpu_that_is_gone_stays_with_its_pod() {
    let mut held = shown(["train-a", "train-b"], "XID 79");
    held.view.allocations.iter_mut().flatten().for_each(|one| one.gone = ["GPU-lost".to_owned()].into());
    let page = text(&held);
    assert_eq!(page.matches("<li class=\"bad\" title=\"GPU-lost\">gone ✗").count(), 2, "{page}");
    assert!(page.contains("Pod <b>train-b</b> holds <code>GPU-lost</code>"), "{page}");
}

#[tokio::test]
async fn unchanged_page_is_not_sent_again() {
    let mut numbers = PodNumbers::default();
    let first = page(&shown(["a", "b"], "XID 79"), &mut numbers);
    assert_eq!(first, page(&shown(["a", "b"], "XID 79"), &mut numbers), "the same view makes the same page");
    let mut request = HeaderMap::new();
    let answer = first.answer(&request);
    assert_eq!(answer.status(), StatusCode::OK);
    request.insert(header::IF_NONE_MATCH, answer.headers()[header::ETAG].clone());
    assert_eq!(first.answer(&request).status(), StatusCode::NOT_MODIFIED);
    let changed = page(&shown(["a", "c"], "XID 79"), &mut numbers);
    assert_eq!(changed.answer(&request).status(), StatusCode::OK);
}

#[test]
fn times_are_dates_in_utc() {
    for (seconds, written) in [
        (0, "1970-01-01 00:00:00 UTC"),
        (951_782_400, "2000-02-29 00:00:00 UTC"),
        (4_107_542_400, "2100-03-01 00:00:00 UTC"),
        (u64::MAX, "18446744073709551615"),
    ] {
        assert_eq!(Document::time(&seconds), written);
    }
    assert_eq!(Document::datetime(&1_700_000_000), "2023-11-14T22:13:20Z");
}

#[test]
fn policy_names_the_style_and_script_of_the_page() {
    let policy = security_policy();
    let policy = policy.to_str().unwrap();
    assert!(
        policy.starts_with("default-src 'none'") && !policy.contains("unsafe") && !policy.contains('*'),
        "{policy}"
    );
    let page = text(&shown(["a", "b"], "XID 79"));
    for (element, kind) in [("style", "style-src"), ("script", "script-src")] {
        let inside =
            page.split(&format!("<{element}>")).nth(1).unwrap().split(&format!("</{element}>")).next().unwrap();
        assert!(policy.contains(&format!("{kind} 'sha256-{}'", STANDARD.encode(Sha256::digest(inside)))), "{policy}");
    }
    // Only the script fetches anything, even from this server.
    for word in [" src=", "url(http", "@import", "<link", " style="] {
        assert!(!page.contains(word), "{word}");
    }
}
