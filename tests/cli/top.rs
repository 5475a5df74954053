//! `linkwise top` on a terminal and on a pipe, beside an admin socket that answers what the test wants.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use crate::cli::golden::holds;
use crate::cli::pty::Terminal;
use crate::cli::{linkwise, text};

/// A linkwise that answers `GET /state`.
pub(super) struct Neighbour {
    folder: tempfile::TempDir,
    state: Arc<Mutex<Value>>,
}

impl Neighbour {
    /// One that has not started yet.
    fn new(state: Value) -> Self {
        Self { folder: tempfile::tempdir().unwrap(), state: Arc::new(Mutex::new(state)) }
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.folder.path().join("admin.sock")
    }

    /// Listens; it is away again when the file is.
    fn listens(&self) {
        let _ = fs::remove_file(self.socket());
        let listener = UnixListener::bind(self.socket()).unwrap();
        let state = Arc::clone(&self.state);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map(Result::unwrap);
                assert_eq!(lines.next().unwrap(), "GET /state HTTP/1.1");
                lines.find(String::is_empty);
                let body = state.lock().unwrap().to_string();
                let _ = write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
            }
        });
    }

    pub(super) fn started(state: Value) -> Self {
        let neighbour = Self::new(state);
        neighbour.listens();
        neighbour
    }

    fn top(&self, args: &[&str]) -> Command {
        self.top_every("1", args)
    }

    fn top_every(&self, seconds: &str, args: &[&str]) -> Command {
        let mut command = linkwise(&["top", "--interval", seconds]);
        command.arg("--socket").arg(self.socket()).args(args);
        command
    }
}

fn gpu(index: usize, reasons: &Value) -> Value {
    let healthy = reasons.as_array().is_some_and(Vec::is_empty);
    let model = "NVIDIA H100 80GB HBM3";
    let availability = match index {
        7 => "unhealthy",
        3 | 6 => "free",
        _ => "held",
    };
    json!({
        "uuid": format!("GPU-{index}"), "index": index, "pci": "", "model": model, "healthy": healthy,
        "availability": availability, "reasons": reasons,
    })
}

/// Eight GPUs, two pods, one GPU sick for as long as this century.
fn state() -> Value {
    let sick = json!([{"reason": "XID 79", "kind": "xid", "since": 978_307_200, "ends_with": "a reset of the GPU"}]);
    let well = json!([]);
    let gpus: Vec<Value> = (0..8).map(|index| gpu(index, if index == 7 { &sick } else { &well })).collect();
    let held = |pod: &str, gpus: Value, collective: Value, why: Value| {
        json!({
            "namespace": "team-a", "pod": pod, "container": "main", "resource": "nvidia.com/gpu", "door": "plugin",
            "gpus": gpus, "collective": collective, "best": 450_000, "best_at_admission": collective, "why": why,
        })
    };
    json!({
        "version": "1.2.3", "driver_released": false, "idle": null,
        "resources": {"nvidia.com/gpu": {"phase": "serving", "trouble": null, "healthy": 7, "unhealthy": 1}},
        "parts": {"CDI sync": {"phase": "waiting", "ready": false, "trouble": "no room on the disk"}},
        "gpus": gpus,
        "allocations": [
            held("train-0", json!(["GPU-0", "GPU-1"]), json!(450_000), json!([])),
            held("train-1", json!(["GPU-2", "GPU-4"]), json!(150_000), json!(["narrowed", "fragmented"])),
            held("one", json!(["GPU-5"]), Value::Null, json!([])),
        ],
        "outlook": [
            {"size": 1, "collective": null, "best": null, "gpus": ["GPU-3"]},
            {"size": 2, "collective": 300_000, "best": 450_000, "gpus": ["GPU-3", "GPU-6"]},
            {"size": 4, "collective": null, "best": 450_000, "gpus": []},
        ],
        "warnings": ["GPU 0000:0b:00.0: one end of an NVLink is unknown"],
    })
}

/// Text without the ages, which grow.
fn ageless(text: &str) -> String {
    let days = |line: &str| match line.split_once(" days") {
        Some((before, after)) => {
            format!("{}N days{after}\n", before.trim_end_matches(|char: char| char.is_ascii_digit()))
        }
        None => format!("{line}\n"),
    };
    text.lines().map(days).collect()
}

#[test]
fn piped_text_is_printed_once_and_plain() {
    let neighbour = Neighbour::started(state());
    let shown = text(&mut neighbour.top(&[]));
    assert!(!shown.contains('\x1b'), "{shown:?}");
    holds("top", &ageless(&shown));
}

#[test]
fn screen_follows_the_state_until_q() {
    let neighbour = Neighbour::started(state());
    let mut terminal = Terminal::start(&neighbour.top(&[]), 80, 40);
    terminal.wait_for("q ends");
    for words in ["team-a/train-0", "unhealthy", "XID 79", "GPU 3,6", "66 %", "nothing", "no room on the disk"] {
        assert!(terminal.screen.text().contains(words), "{words}:\n{}", terminal.screen.text());
    }
    assert!(terminal.screen.colors > 0);
    neighbour.state.lock().unwrap()["allocations"][0]["pod"] = json!("later");
    terminal.wait_for("team-a/later");
    // The terminal may have got a part of the new screen only.
    terminal.wait("screen without the old pod", |screen| !screen.text().contains("train-0"));
    terminal.press("q");
    assert!(terminal.ends().success());
}

#[test]
fn narrow_and_resized_screens_are_cut() {
    let mut state = state();
    state["allocations"][0]["pod"] = json!("漢字".repeat(40));
    state["allocations"][1]["pod"] = json!("p".repeat(253));
    let neighbour = Neighbour::started(state);
    // It draws once, and again for each size: nothing is under way for another size.
    let mut terminal = Terminal::start(&neighbour.top_every("3600", &[]), 80, 40);
    terminal.wait("whole screen", |screen| screen.drawn == 1);
    for (number, (columns, rows)) in [(40, 40), (20, 5), (1, 1), (200, 50), (79, 40), (41, 12)].into_iter().enumerate()
    {
        terminal.resize(columns, rows);
        // The screen itself fails where a line wraps.
        terminal.wait("screen of this size", |screen| screen.drawn == number + 2);
        assert!(columns == 200 || terminal.screen.text().contains('…'), "{}", terminal.screen.text());
        assert!(terminal.screen.text().lines().last().is_some_and(|line| !line.is_empty()));
    }
    terminal.press("\x03");
    assert!(terminal.ends().success());
}

#[test]
fn long_state_scrolls() {
    let neighbour = Neighbour::started(state());
    let mut terminal = Terminal::start(&neighbour.top(&[]), 80, 8);
    terminal.wait_for("0 lines above");
    assert!(!terminal.screen.text().contains("warning"));
    terminal.press("\x1b[F");
    terminal.wait_for("warning");
    terminal.wait_for(" 0 below");
    terminal.press("g");
    terminal.wait_for("linkwise 1.2.3");
    terminal.press("j");
    terminal.wait_for("1 lines above");
    terminal.press("q");
    assert!(terminal.ends().success());
}

#[test]
fn linkwise_that_is_away_is_named_and_awaited() {
    let neighbour = Neighbour::new(state());
    let mut terminal = Terminal::start(&neighbour.top(&[]), 100, 40);
    terminal.wait_for("linkwise does not answer");
    neighbour.listens();
    terminal.wait_for("team-a/train-0");
    assert!(!terminal.screen.text().contains("does not answer"));
    fs::remove_file(neighbour.socket()).unwrap();
    terminal.wait_for("trying again; this is");
    assert!(terminal.screen.text().contains("team-a/train-0"), "the last state stays");
    fs::write(neighbour.socket(), "no socket").unwrap();
    neighbour.listens();
    terminal.wait("answer", |screen| !screen.text().contains("does not answer"));
    // Ended by a signal, it leaves the terminal as it was, too.
    let pid = rustix::process::Pid::from_child(&terminal.child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(terminal.ends().success());
}

#[test]
fn stopped_top_gives_the_terminal_back_meanwhile() {
    let neighbour = Neighbour::started(state());
    let mut terminal = Terminal::start(&neighbour.top(&[]), 80, 40);
    terminal.wait_for("q ends");
    // The kernel stops no process that no shell could let go on; it takes the terminal again.
    terminal.press("\x1a");
    terminal.wait("second start", |screen| screen.entered == 2);
    terminal.press("q");
    assert!(terminal.ends().success());
}

#[test]
fn hostile_names_are_escaped() {
    let mut state = state();
    let hostile = "\u{1b}[2J\u{1b}]0;title\u{7}\r\n\u{9b}31m\u{202e}x";
    state["allocations"][0]["pod"] = json!(hostile);
    state["gpus"][0]["model"] = json!(hostile);
    state["parts"]["CDI sync"]["trouble"] = json!(hostile);
    state["warnings"] = json!([hostile]);
    state["version"] = json!(hostile);
    let neighbour = Neighbour::started(state);
    let mut terminal = Terminal::start(&neighbour.top(&[]), 200, 40);
    terminal.wait_for("warning: \\u{1b}[2J\\u{1b}]0;title\\u{7} \\u{9b}31m\\u{202e}x");
    terminal.press("q");
    assert!(terminal.ends().success());
    for args in [&[][..], &["--format=json", "--once"]] {
        let shown = text(&mut neighbour.top(args));
        assert!(shown.chars().all(|char| char == '\n' || !char.is_control()), "{shown:?}");
    }
    let object: Value = serde_json::from_str(&text(&mut neighbour.top(&["--format=json", "--once"]))).unwrap();
    assert_eq!(object["state"]["version"], hostile);
}

#[test]
fn colours_are_off_by_no_color() {
    let neighbour = Neighbour::started(state());
    for (flag, variable) in [(Some("--no-color"), ""), (None, "1")] {
        let mut top = neighbour.top(flag.as_slice());
        let mut terminal = Terminal::start(top.env("NO_COLOR", variable), 80, 40);
        terminal.wait_for("q ends");
        assert_eq!(terminal.screen.colors, 0);
        terminal.press("q");
        assert!(terminal.ends().success());
    }
}

#[test]
fn state_of_another_version_is_shown() {
    let mut old = gpu(0, &json!([]));
    old.as_object_mut().unwrap().remove("availability");
    let neighbour = Neighbour::started(json!({"version": "0.1.0", "gpus": [old], "new": {}}));
    let shown = text(&mut neighbour.top(&[]));
    assert!(shown.contains("healthy  unknown"), "{shown}");
    *neighbour.state.lock().unwrap() = json!([1]);
    let output = neighbour.top(&[]).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains("is no linkwise"), "{error}");
}

#[test]
fn json_is_one_object_for_each_look() {
    let neighbour = Neighbour::started(state());
    let mut child = neighbour.top(&["--format=json"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut object = || serde_json::from_str::<Value>(&lines.next().unwrap()).unwrap();
    let first = object();
    assert_eq!(first["state"], state());
    assert!(first["time"].as_u64().is_some_and(|time| time > 1_700_000_000));
    assert_eq!(object()["state"], state());
    fs::remove_file(neighbour.socket()).unwrap();
    while object()["error"].as_str().is_none_or(|error| !error.contains("admin.sock")) {}
    // Nobody reads any more.
    drop(lines);
    assert!(child.wait().unwrap().success());
    let output = neighbour.top(&["--format=json", "--once"]).output().unwrap();
    assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
    neighbour.listens();
    let one = text(&mut neighbour.top(&["--format=json", "--once"]));
    assert_eq!(one.lines().count(), 1, "{one}");
}
