//! The page of a DGX-1, as a string: its escapes, a browser's rights, and the conditions for sending it again.

use super::*;
use crate::admin::state::{AllocationState, GpuState, OutlookState, ReasonState};
use crate::readiness::PartState;
use linkwise_core::state::Availability;

/// Names with a meaning in HTML, in SVG or to a browser.
const HOSTILE: [&str; 5] = [
    "<script>alert(1)</script>",
    "\"><img src=x onerror=alert(1)>",
    "' onmouseover='alert(1)",
    "</title></svg></style><svg onload=alert(1)>",
    "&lt;b&gt;\u{202e}gnp\u{0}",
];

/// A DGX-1 on which two pods with these names hold GPUs 0 to 3, and GPU 5 is unhealthy for this reason.
fn view(pods: [&str; 2], reason: &str) -> View {
    let mut observed = linkwise_host::machines::load("dgx1-v100").unwrap().observed;
    observed.gpus[2].model = Some(reason.to_owned());
    let (topology, _) = NodeTopology::assemble(&observed);
    let uuid = |at: usize| topology.gpus()[at].uuid.to_string();
    let allocation = |pod: &str, gpus: [usize; 2]| AllocationState {
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
        why: vec!["fragmented".into()],
    };
    let sick = |at: usize| {
        let (since, kind, ends_with) = (1_700_000_000, "xid", "a reset");
        if at == 5 {
            vec![ReasonState { reason: reason.to_owned(), kind: kind.into(), since, ends_with: ends_with.into() }]
        } else {
            Vec::new()
        }
    };
    let gpus = topology.gpus().iter().enumerate().map(|(at, gpu)| GpuState {
        uuid: gpu.uuid.to_string(),
        index: gpu.index,
        pci: gpu.pci.to_string(),
        model: gpu.model.clone(),
        door: None,
        waits_for: None,
        waits_until: None,
        healthy: at != 5,
        availability: match at {
            0..=3 => Availability::Held,
            5 => Availability::Unhealthy,
            _ => Availability::Free,
        },
        reasons: sick(at),
    });
    let part = PartState { phase: "waiting".into(), ready: false, trouble: Some(reason.to_owned()) };
    let state = State {
        version: "1.2.3".into(),
        parts: [("CDI sync".to_owned(), part)].into(),
        gpus: gpus.collect(),
        allocations: Some(pods.into_iter().zip([[0, 1], [2, 3]]).map(|(pod, gpus)| allocation(pod, gpus)).collect()),
        outlook: Some(vec![
            OutlookState {
                size: 2,
                collective: Some(20_000),
                nvls: None,
                best: Some(40_000),
                gpus: vec![uuid(4), uuid(6)],
            },
            OutlookState { size: 8, collective: None, nvls: None, best: Some(120_000), gpus: Vec::new() },
        ]),
        warnings: vec![reason.to_owned()],
        ..State::default()
    };
    View {
        node: Some(reason.to_owned()),
        state,
        ready: Err(vec![format!("CDI sync: {reason}")]),
        choices: Vec::new(),
        observed: Arc::new(observed),
        topology: Arc::new(topology),
    }
}

fn text(view: &View) -> String {
    String::from_utf8(Page::render(view, &mut Slots::default()).html.to_vec()).unwrap()
}

#[test]
fn hostile_names_stay_text() {
    for hostile in HOSTILE {
        let page = text(&view([hostile, "b"], hostile));
        let ours = page.replace(STYLE, "").replace(SCRIPT, "");
        assert_eq!((ours.matches("<script").count(), ours.matches("</script>").count()), (1, 1), "{hostile}");
        // Every attribute is in double quotes: single ones are text anywhere.
        for markup in ["<img", "onerror=alert(1)>", "<svg onload", "\u{202e}", "\u{0}"] {
            assert!(!ours.contains(markup), "{hostile}: {markup}");
        }
        // The page has only its own attributes.
        assert_eq!(ours.matches('<').count(), ours.matches('>').count(), "{hostile}");
        let escaped = hostile.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        let escaped = escaped.replace('"', "&quot;").replace('\'', "&#39;").replace(['\u{202e}', '\u{0}'], "\u{fffd}");
        assert!(ours.matches(&escaped).count() >= 8, "{hostile}: shown as itself");
    }
}

#[test]
fn long_names_make_no_endless_page() {
    let long = "x".repeat(253);
    let (short, long) = (text(&view(["a", "b"], "XID 79")), text(&view([&long, "b"], "XID 79")));
    assert!(long.len() < short.len() + 253 * 10, "{} to {}", long.len(), short.len());
    assert!(short.len() < 100_000, "{}", short.len());
}

#[test]
fn page_says_what_holds_and_hurts() {
    let page = text(&view(["train-a", "train-b"], "XID 79"));
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
    let mut unknown = view(["a", "b"], "XID 79");
    (unknown.state.allocations, unknown.state.outlook) = (None, None);
    let page = text(&unknown);
    assert!(page.contains("<dt>Free</dt><dd>unknown</dd>") && page.contains("PodResources socket does not answer"));
    assert!(!page.contains("cannot be met"), "it is not known");
}

#[tokio::test]
async fn unchanged_page_is_not_sent_again() {
    let mut slots = Slots::default();
    let page = Page::render(&view(["a", "b"], "XID 79"), &mut slots);
    assert_eq!(page, Page::render(&view(["a", "b"], "XID 79"), &mut slots), "it depends on nothing else");
    let mut request = HeaderMap::new();
    let answer = page.answer(&request);
    assert_eq!(answer.status(), StatusCode::OK);
    request.insert(header::IF_NONE_MATCH, answer.headers()[header::ETAG].clone());
    assert_eq!(page.answer(&request).status(), StatusCode::NOT_MODIFIED);
    let changed = Page::render(&view(["a", "c"], "XID 79"), &mut slots);
    assert_eq!(changed.answer(&request).status(), StatusCode::OK);
}

#[test]
fn policy_names_the_style_and_script_of_the_page() {
    // RFC 4648, section 10.
    let texts = ["", "f", "fo", "foo", "foob", "fooba", "foobar"].map(|text| base64(text.as_bytes()));
    assert_eq!(texts, ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg==", "Zm9vYmE=", "Zm9vYmFy"]);
    let policy = security_policy();
    let policy = policy.to_str().unwrap();
    assert!(
        policy.starts_with("default-src 'none'") && !policy.contains("unsafe") && !policy.contains('*'),
        "{policy}"
    );
    let page = text(&view(["a", "b"], "XID 79"));
    for (element, kind) in [("style", "style-src"), ("script", "script-src")] {
        let inside =
            page.split(&format!("<{element}>")).nth(1).unwrap().split(&format!("</{element}>")).next().unwrap();
        assert!(policy.contains(&format!("{kind} 'sha256-{}'", base64(&Sha256::digest(inside)))), "{policy}");
    }
    // Only the script fetches anything, even from this server.
    for word in [" src=", "url(http", "@import", "<link", " style="] {
        assert!(!page.contains(word), "{word}");
    }
}
