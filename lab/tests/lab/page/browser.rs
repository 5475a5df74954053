//! A real Chromium, driven by the DevTools protocol over a pair of named pipes.
//!
//! <https://chromedevtools.github.io/devtools-protocol/>. A browser has one tab here.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::demo::KillOnDrop;

/// The longest wait for any answer or state, far longer than each takes.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// The browser's program: the one of `make tools`, or else one on the PATH. `build.rs` looked for the same names.
fn program() -> PathBuf {
    let from_make_tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tools/chromium");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path);
    let names = ["chromium", "chromium-headless-shell", "google-chrome"];
    let installed = folders.flat_map(|folder| names.map(|name| folder.join(name)));
    [from_make_tools].into_iter().chain(installed).find(|path| path.exists()).expect("no browser")
}

/// A browser with one empty tab.
pub struct Browser {
    _process: KillOnDrop,
    commands: File,
    answers: Receiver<Value>,
    /// Events that came while an answer was awaited.
    events: VecDeque<Value>,
    session: Option<String>,
    last_id: u64,
    _folder: TempDir,
}

impl Browser {
    pub fn start() -> Self {
        let program = program();
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let (commands, answers) = (at("commands"), at("answers"));
        assert!(Command::new("mkfifo").args([&commands, &answers]).status().unwrap().success());
        // The browser reads descriptor 3 and writes descriptor 4. Not every machine allows its sandbox, and it needs
        // none, because it opens only our page.
        let script = "exec \"$0\" --headless --no-sandbox --disable-dev-shm-usage --disable-gpu --hide-scrollbars \
                      --force-color-profile=srgb --remote-debugging-pipe --user-data-dir=\"$1\" 3<\"$2\" 4>\"$3\"";
        let mut sh = Command::new("sh");
        sh.args(["-c", script]).arg(program).args([at("profile"), commands.clone(), answers.clone()]);
        let process = sh.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let commands = OpenOptions::new().write(true).open(commands).unwrap();
        let reader = BufReader::new(File::open(answers).unwrap());
        let (sender, receiver) = channel();
        std::thread::spawn(move || {
            for message in reader.split(0).map_while(Result::ok) {
                if sender.send(serde_json::from_slice(&message).unwrap()).is_err() {
                    break;
                }
            }
        });
        let mut browser = Self {
            _process: KillOnDrop(process),
            commands,
            answers: receiver,
            events: VecDeque::new(),
            session: None,
            last_id: 0,
            _folder: folder,
        };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let session = browser.call("Target.attachToTarget", attach);
        browser.session = Some(session["sessionId"].as_str().unwrap().to_owned());
        for domain in ["Page", "Runtime", "Log", "Network", "Accessibility", "DOM"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        browser
    }

    pub fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.last_id += 1;
        let mut message = json!({"id": self.last_id, "method": method, "params": parameters});
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        self.commands.write_all(&[message.to_string().as_bytes(), b"\0"].concat()).unwrap();
        loop {
            let answer = self.answers.recv_timeout(WAIT_TIMEOUT).unwrap_or_else(|_| panic!("no answer to {method}"));
            if answer["id"] == json!(self.last_id) {
                assert!(answer["error"].is_null(), "{method}: {}", answer["error"]);
                return answer["result"].clone();
            }
            if answer["method"].is_string() {
                self.events.push_back(answer);
            }
        }
    }

    /// All events of this method so far. The browser sends them before it answers a later call.
    pub fn events(&mut self, method: &str) -> Vec<Value> {
        self.call("Runtime.evaluate", json!({"expression": "0"}));
        self.events.iter().filter(|event| event["method"] == method).map(|event| event["params"].clone()).collect()
    }

    /// The value of an expression. A promise is awaited.
    pub fn value(&mut self, expression: &str) -> Value {
        let parameters = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let answer = self.call("Runtime.evaluate", parameters);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {}", answer["exceptionDetails"]);
        answer["result"]["value"].clone()
    }

    /// Waits until an expression has this value.
    pub fn wait(&mut self, expression: &str, wanted: &Value) {
        let start = Instant::now();
        loop {
            let value = self.value(expression);
            if value == *wanted {
                return;
            }
            assert!(start.elapsed() < WAIT_TIMEOUT, "{expression} is {value:#}, and not {wanted:#}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Opens a page at this size, and waits until it is loaded.
    pub fn open(&mut self, url: &str, (width, height): (u32, u32)) {
        self.resize(width, height);
        self.call("Page.navigate", json!({"url": url}));
        self.wait("document.readyState", &json!("complete"));
    }

    pub fn resize(&mut self, width: u32, height: u32) {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", size);
    }

    /// Sets the colour scheme that the person prefers: `light` or `dark`.
    pub fn prefer(&mut self, scheme: &str) {
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.call("Emulation.setEmulatedMedia", features);
    }

    pub fn press(&mut self, key: &str, code: u32) {
        for kind in ["keyDown", "keyUp"] {
            let text = if key == "Enter" && kind == "keyDown" { "\r" } else { "" };
            let event = json!({"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code, "text": text});
            self.call("Input.dispatchKeyEvent", event);
        }
    }

    /// Writes the whole page as a PNG file into the folder that `PAGE_IMAGES` names, if it is set.
    pub fn write_picture(&mut self, name: &str) {
        let Some(folder) = std::env::var_os("PAGE_IMAGES") else { return };
        let answer = self.call("Page.captureScreenshot", json!({"format": "png", "captureBeyondViewport": true}));
        let base64 = answer["data"].as_str().unwrap();
        let mut decode = Command::new("base64").arg("-d").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut input = decode.stdin.take().unwrap();
        let text = base64.to_owned();
        let writing = std::thread::spawn(move || input.write_all(text.as_bytes()).unwrap());
        let png = decode.wait_with_output().unwrap().stdout;
        writing.join().unwrap();
        std::fs::write(Path::new(&folder).join(format!("{name}.png")), png).unwrap();
    }
}
