//! `linkwise top` and `linkwise admin state`, with an admin socket whose answers the test sets.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use crate::cli::{OnTerminal, linkwise, text};
use crate::dra::published::golden::assert_golden;

/// A stand-in for `linkwise run` that answers `GET /state` on an admin socket.
pub(super) struct Neighbour {
    folder: tempfile::TempDir,
    state: Arc<Mutex<Value>>,
}

impl Neighbour {
    /// A stand-in that does not listen yet.
    fn new(state: Value) -> Self {
        Self { folder: tempfile::tempdir().unwrap(), state: Arc::new(Mutex::new(state)) }
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.folder.path().join("admin.sock")
    }

    /// Listens on the socket, and replaces an existing one.
    fn listen(&self) {
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
        neighbour.listen();
        neighbour
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = linkwise(args);
        command.env("LINKWISE_ADMIN_SOCKET", self.socket());
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

/// Eight GPUs and three pods. GPU 7 has been unhealthy since 2001.
fn state() -> Value {
    let reasons = json!([{"reason": "XID 79", "kind": "xid", "since": 978_307_200, "ends_with": "a reset of the GPU"}]);
    let none = json!([]);
    let gpus: Vec<Value> = (0..8).map(|index| gpu(index, if index == 7 { &reasons } else { &none })).collect();
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

/// Replaces the ages in days, which grow.
fn ageless(text: &str) -> String {
    let is_digit = |char: char| char.is_ascii_digit();
    let days = |line: &str| match line.split_once(" days") {
        Some((before, after)) => format!("{}N days{after}\n", before.trim_end_matches(is_digit)),
        None => format!("{line}\n"),
    };
    text.lines().map(days).collect()
}

#[test]
fn piped_text_is_printed_once_and_plain() {
    let neighbour = Neighbour::started(state());
    let shown = text(&mut neighbour.command(&["top"]));
    assert!(!shown.contains('\x1b'), "{shown:?}");
    assert_golden("top", &ageless(&shown));
    let once = text(&mut neighbour.command(&["admin", "state", "--format", "text"]));
    assert_eq!(ageless(&once), ageless(&shown));
}

#[test]
fn terminal_is_redrawn_until_a_signal() {
    let neighbour = Neighbour::new(state());
    let mut terminal = OnTerminal::start(&mut neighbour.command(&["top", "--interval", "1"]));
    terminal.wait(|written| written.contains("\x1b[H\x1b[Jlinkwise does not answer, trying again: "));
    neighbour.listen();
    terminal.wait(|written| written.contains("\x1b[H\x1b[Jlinkwise 1.2.3") && written.contains("team-a/train-0"));
    neighbour.state.lock().unwrap()["allocations"][0]["pod"] = json!("later");
    terminal.wait(|written| written.contains("team-a/later"));
    // The command runs until a signal ends it.
    assert!(terminal.child.try_wait().unwrap().is_none());
    let mut once = OnTerminal::start(&mut neighbour.command(&["top", "--once"]));
    once.wait(|written| written.contains("warning: "));
    assert!(once.child.wait().unwrap().success() && !once.written.contains('\x1b'), "{:?}", once.written);
}

#[test]
fn missing_linkwise_fails_a_single_report() {
    let neighbour = Neighbour::new(state());
    for args in [&["top"][..], &["top", "--once"], &["admin", "state", "--format", "text"]] {
        let output = neighbour.command(args).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && error.contains("admin.sock") && output.stdout.is_empty(), "{error}");
    }
}

#[test]
fn hostile_names_are_escaped() {
    let mut state = state();
    let hostile = "\u{1b}[2J\u{1b}]0;title\u{7}\r\n\u{9b}31m\u{202e}x";
    state["allocations"][0]["pod"] = json!(hostile);
    state["allocations"][0]["gone"] = json!([hostile]);
    state["gpus"][0]["model"] = json!(hostile);
    state["gpus"][7]["reasons"][0]["reason"] = json!(hostile);
    state["parts"]["CDI sync"]["trouble"] = json!(hostile);
    state["parts"][hostile] = json!({"phase": hostile});
    for list in ["warnings", "problems", "unready"] {
        state[list] = json!([hostile]);
    }
    state["choices"] = json!([{"resource": hostile, "gpus": [hostile], "why": hostile}]);
    for word in ["version", "node", "idle"] {
        state[word] = json!(hostile);
    }
    let neighbour = Neighbour::started(state);
    let escaped = "\\u{1b}[2J\\u{1b}]0;title\\u{7} \\u{9b}31m\\u{202e}x";
    let shown = text(&mut neighbour.command(&["top"]));
    assert_eq!(shown.matches(escaped).count(), 18, "{shown}");
    let json = text(&mut neighbour.command(&["admin", "state"]));
    for shown in [&shown, &json] {
        assert!(shown.chars().all(|char| char == '\n' || char != '\u{202e}' && !char.is_control()), "{shown:?}");
    }
    assert_eq!(serde_json::from_str::<Value>(&json).unwrap()["version"], hostile);
}

#[test]
fn state_of_another_version_is_shown() {
    let mut old = gpu(0, &json!([]));
    old.as_object_mut().unwrap().remove("availability");
    let neighbour = Neighbour::started(json!({"version": "0.1.0", "gpus": [old], "new": {}}));
    let shown = text(&mut neighbour.command(&["top"]));
    assert!(shown.contains("healthy  unknown"), "{shown}");
    *neighbour.state.lock().unwrap() = json!([1]);
    let output = neighbour.command(&["top"]).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains("another program answers on"), "{error}");
}
