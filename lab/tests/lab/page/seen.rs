//! The page as people see it: the holders after each step of the demo, sizes and colours, the keyboard, names for
//! screen readers, and a page that is hidden, has lost its node or runs no script.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::browser::Browser;
use super::demo::Demo;

/// The pods and GPUs that the page shows: the rows of its table, and the picture.
const SHOWN: &str = include_str!("shown.js");

/// Makes the page's script poll every 25 ms, so that it shows steps soon, and counts its polls, so that a test notices
/// if a hidden page polls.
const FAST_POLLS: &str = "
    const [later, ask] = [window.setTimeout, window.fetch];
    window.setTimeout = (run, _) => later(run, 25);
    window.asks = 0;
    window.fetch = (url, options) => { window.asks += options ? 1 : 0; return ask(url, options); };
";

/// The texts with too little contrast: below 4.5 to 1, or below 3 to 1 for large text (WCAG 2.2, 1.4.3).
const FAINT: &str = include_str!("faint.js");

/// The GPUs of the pods, as the demo prints the kubelet's grants.
#[derive(Default)]
struct Books {
    pods: BTreeMap<String, Vec<u32>>,
    /// The GPUs that have failed.
    sick: BTreeSet<u32>,
    /// The pod whose one GPU left the bus, and that GPU.
    gone: Option<(String, u32)>,
}

impl Books {
    fn read(&mut self, printed: &str) {
        for line in printed.lines() {
            let gpu = || line.split("GPU ").nth(1).unwrap().split([' ', ',']).next().unwrap().parse::<u32>().unwrap();
            if let Some((pod, rest)) = line.strip_prefix("● ").and_then(|line| line.split_once(" wants ")) {
                let gpus = rest.split("gets GPU ").nth(1).unwrap().split(", ").next().unwrap();
                let mut gpus: Vec<u32> = gpus.split(',').map(|gpu| gpu.parse().unwrap()).collect();
                gpus.sort_unstable();
                self.pods.insert(pod.to_owned(), gpus);
            } else if let Some(pod) =
                line.strip_prefix("- ").and_then(|line| line.strip_suffix(" ends, its GPUs are free again"))
            {
                assert!(self.pods.remove(pod).is_some(), "{line}");
            } else if line.contains("reports XID 79") {
                self.sick.insert(gpu());
            } else if line.contains("leaves the bus") {
                self.gone = line.split(['(', '\'']).nth(1).map(|pod| (pod.to_owned(), gpu()));
            } else if line.contains("It comes back and is healthy again") {
                self.gone = None;
            } else if line.contains("puts it back") {
                self.sick.clear();
            }
        }
    }

    fn shown(&self) -> Value {
        let mut picture = self.pods.clone();
        if let Some((pod, _)) = &self.gone {
            // The picture shows only GPUs that are in the machine, although the pod still holds this one.
            picture.remove(pod);
        }
        json!({"table": self.pods, "picture": picture, "sick": self.sick})
    }

    /// The GPUs that have failed or are gone.
    fn unhealthy(&self) -> Vec<u32> {
        self.gone.iter().map(|(_, gpu)| *gpu).chain(self.sick.iter().copied()).collect()
    }
}

/// A browser that shows a demo's page.
fn open(machine: &str, size: (u32, u32)) -> (Browser, Demo) {
    let mut browser = Browser::start();
    let demo = Demo::start(machine);
    browser.call("Page.addScriptToEvaluateOnNewDocument", json!({"source": FAST_POLLS}));
    browser.open(&demo.url, size);
    browser.wait("document.getElementById('fresh').textContent", &json!("live"));
    (browser, demo)
}

/// Plays some steps, and waits until the page shows their results.
fn play(browser: &mut Browser, demo: &mut Demo, books: &mut Books, steps: usize) {
    for _ in 0..steps {
        books.read(&demo.step());
    }
    browser.wait(SHOWN, &books.shown());
}

#[test]
#[cfg_attr(not(has_chromium), ignore = "no chromium here: make tools brings it")]
fn each_step_of_the_demo_is_shown_without_reload() {
    let (mut browser, mut demo) = open("dgx-h100", (1400, 900));
    browser.value("window.since = 'the start'; document.getElementById('gpus-summary').click()");
    let mut books = Books::default();
    let (mut steps, mut most_held) = (0, 0);
    loop {
        let printed = demo.step();
        if printed.contains("nothing left behind") {
            break;
        }
        books.read(&printed);
        browser.wait(SHOWN, &books.shown());
        let (held, pods, unhealthy) =
            (books.pods.values().map(Vec::len).sum::<usize>(), books.pods.len(), books.unhealthy());
        let free =
            8 - held - books.sick.iter().filter(|gpu| !books.pods.values().flatten().any(|held| held == *gpu)).count();
        let holders = match pods {
            0 => String::new(),
            1 => " by 1 pod".to_owned(),
            pods => format!(" by {pods} pods"),
        };
        let spoken = format!("Ready. 8 GPUs: {held} held{holders}, {free} free, {} unhealthy.", unhealthy.len());
        browser.wait("document.getElementById('spoken').textContent", &json!(spoken));
        for gpu in unhealthy {
            let alert = format!("document.querySelector('#alerts li strong')?.textContent === 'GPU {gpu}'");
            browser.wait(&alert, &json!(true));
        }
        (steps, most_held) = (steps + 1, most_held.max(held));
    }
    assert!(steps >= 11 && most_held == 7, "{steps} steps, {most_held} GPUs");
    assert_eq!(browser.value("window.since"), "the start", "the page was loaded again");
    assert_eq!(browser.value("document.getElementById('gpus-table').open"), true, "the opened table was closed");
    // The browser complains only about requests after the demo's end.
    let complaints = browser.events("Log.entryAdded").into_iter().map(|event| event["entry"]["text"].to_string());
    let complaints: Vec<String> = complaints.filter(|text| !text.contains("net::ERR_")).collect();
    assert!(complaints.is_empty(), "{complaints:?}");
    for request in browser.events("Network.requestWillBeSent") {
        assert_eq!(request["request"]["url"], json!(demo.url), "the page requested another address");
    }
}

#[test]
#[cfg_attr(not(has_chromium), ignore = "no chromium here: make tools brings it")]
fn page_looks_right_at_each_size_and_colour() {
    let (mut browser, mut demo) = open("dgx-h100", (1400, 900));
    let mut books = Books::default();
    // Three pods run, and a GPU has failed.
    play(&mut browser, &mut demo, &mut books, 8);
    assert_eq!((books.pods.len(), books.sick.len()), (3, 1), "{:?}", books.pods);
    for (scheme, width) in [("light", 1400), ("dark", 1400), ("light", 400), ("dark", 400)] {
        browser.prefer(scheme);
        browser.resize(width, 900);
        browser.wait("innerWidth", &json!(width));
        assert_eq!(browser.value("document.documentElement.scrollWidth"), json!(width), "{scheme} {width}");
        assert_eq!(browser.value(FAINT), json!([]), "{scheme} {width}");
        browser.write_picture(&format!("page-{scheme}-{width}"));
    }
    // The picture of a DGX-1 has links between single GPUs.
    let (mut browser, mut demo) = open("dgx1-v100", (1400, 900));
    play(&mut browser, &mut demo, &mut Books::default(), 3);
    assert_eq!(browser.value("document.documentElement.scrollWidth"), json!(1400));
    browser.write_picture("page-dgx1");
}

#[test]
#[cfg_attr(not(has_chromium), ignore = "no chromium here: make tools brings it")]
fn keyboard_and_screen_reader_find_everything() {
    let (mut browser, mut demo) = open("dgx-h100", (400, 900));
    let mut books = Books::default();
    play(&mut browser, &mut demo, &mut books, 2);
    let tree = browser.call("Accessibility.getFullAXTree", json!({}));
    let nodes = tree["nodes"].as_array().unwrap().iter().filter(|node| node["ignored"] != json!(true));
    let named = |node: &Value| format!("{} {}", node["role"]["value"], node["name"]["value"]).replace('"', "");
    let nodes: Vec<String> = nodes.map(named).collect();
    for wanted in [
        "heading linkwise 8 × NVIDIA H100 80GB HBM3",
        "status ",
        "heading The machine",
        "region The picture, which may scroll",
        "image The machine: 8 × NVIDIA H100 80GB HBM3. What it shows is in the tables too.",
        "region Who holds what",
        "table",
        "columnheader Pod",
        "columnheader Of the machine's best",
        "image pod A",
        "region What a request would get now",
        "region Last choices",
        "region Readiness",
        "image ready",
        "link metrics",
    ] {
        assert!(nodes.iter().any(|node| node.starts_with(wanted)), "no {wanted}: {nodes:#?}");
    }
    // The letter of a pod depends on the order of the pods.
    assert!(nodes.iter().any(|node| node.starts_with("cell pod ") && node.ends_with(" train-a default")), "{nodes:#?}");
    // The Tab key goes through the page in reading order.
    let at = "(({id, textContent}) => id || textContent.trim())(document.activeElement)";
    let order = ["Skip to who holds what", "picture", "gpus-summary", "metrics", "readiness", "liveness"];
    for wanted in order {
        browser.press("Tab", 9);
        assert_eq!(browser.value(at), wanted);
    }
    // A part that changes while it has the focus keeps the focus.
    browser.value("document.getElementById('gpus-summary').focus()");
    browser.press("Enter", 13);
    assert_eq!(browser.value("document.getElementById('gpus-table').open"), true);
    browser.value("document.getElementById('gpus').wasHere = true");
    play(&mut browser, &mut demo, &mut books, 1);
    browser.wait("document.getElementById('gpus').wasHere === undefined", &json!(true));
    assert_eq!(
        (browser.value(at), browser.value("document.getElementById('gpus-table').open")),
        (json!("gpus-summary"), json!(true))
    );
}

#[test]
#[cfg_attr(not(has_chromium), ignore = "no chromium here: make tools brings it")]
fn hidden_page_stops_polls_and_lost_node_is_shown() {
    let (mut browser, mut demo) = open("dgx-h100", (1400, 900));
    let mut books = Books::default();
    let hide = |browser: &mut Browser, hidden: bool| {
        let property = format!("Object.defineProperty(document, 'hidden', {{configurable: true, value: {hidden}}})");
        browser.value(&format!("{property}; document.dispatchEvent(new Event('visibilitychange'))"));
    };
    hide(&mut browser, true);
    let asks = browser.value("asks");
    books.read(&demo.step());
    // Another request sees the pod. By then a page that is not hidden would have polled several times.
    browser.wait(
        "fetch(location.href).then((page) => page.text()).then((text) => text.includes('notebook'))",
        &json!(true),
    );
    assert_eq!((browser.value("asks"), browser.value(SHOWN)), (asks, Books::default().shown()));
    hide(&mut browser, false);
    browser.wait(SHOWN, &books.shown());
    drop(demo);
    browser.wait("document.getElementById('fresh').className", &json!("fresh lost"));
    assert_eq!(browser.value(SHOWN), books.shown(), "the last known state is gone");
}

#[test]
#[cfg_attr(not(has_chromium), ignore = "no chromium here: make tools brings it")]
fn page_without_script_reloads_itself() {
    let mut browser = Browser::start();
    let mut demo = Demo::start("dgx-h100");
    browser.call("Emulation.setScriptExecutionDisabled", json!({"value": true}));
    browser.call("Page.navigate", json!({"url": demo.url}));
    let mut books = Books::default();
    books.read(&demo.step());
    browser.wait(SHOWN, &books.shown());
    assert_eq!(browser.value("document.getElementById('fresh').textContent"), "as of when it was loaded");
}
