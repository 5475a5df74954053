//! Runs helm, and finds objects in its output.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// A program of `make tools`, else the one on the PATH.
pub fn tool(name: &str) -> PathBuf {
    let installed = repository("target/tools").join(name);
    if installed.exists() { installed } else { name.into() }
}

/// The name of the release that the chart's tests render, from NVIDIA's README.
pub const RELEASE: &str = "nvdp";

pub struct Helm(PathBuf);

impl Helm {
    pub fn found() -> Self {
        Self(tool("helm"))
    }

    /// A helm without garbage collection, which its short life does not need: a quarter less time in 300 runs.
    fn command(&self) -> Command {
        let mut helm = Command::new(&self.0);
        helm.env("GOGC", "off");
        helm
    }

    pub fn run(&self, command: &[&str], args: &[&str]) -> Output {
        let mut helm = self.command();
        helm.args(command).arg(repository("charts/linkwise")).args(["--namespace", "gpu"]).args(args);
        helm.output().unwrap()
    }

    /// The objects that the cluster would get, without empty ones; the error is helm's message.
    pub fn template(&self, args: &[&str]) -> Result<Vec<Value>, String> {
        let flags = ["--namespace", "gpu"].iter().chain(args).map(|flag| (*flag).to_owned()).collect::<Vec<_>>();
        self.of_chart(&repository("charts/linkwise"), RELEASE, &flags, &repository(""))
    }

    /// The objects of a release with these flags only. helm runs in `at`, the folder of the files that the flags name.
    pub fn of_chart(&self, chart: &Path, release: &str, flags: &[String], at: &Path) -> Result<Vec<Value>, String> {
        let mut helm = self.command();
        helm.args(["template", release]).arg(chart).args(flags);
        objects(helm.current_dir(at).output().unwrap())
    }

    /// The objects for values that the chart has to accept, each by `--set`.
    pub fn objects(&self, values: &[&str]) -> Vec<Value> {
        self.template(&set(values)).unwrap_or_else(|error| panic!("{values:?}: {error}"))
    }
}

/// The objects that helm printed; the error is its message.
fn objects(output: Output) -> Result<Vec<Value>, String> {
    if !output.status.success() {
        return Err(String::from_utf8(output.stderr).unwrap());
    }
    let text = String::from_utf8(output.stdout).unwrap();
    let documents =
        text.split("---\n").filter(|text| text.lines().any(|line| !line.starts_with('#') && !line.is_empty()));
    let read = |text: &str| serde_saphyr::from_str(text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    Ok(documents.map(read).collect())
}

/// The arguments `--set VALUE` for each value.
pub fn set<'a>(values: &[&'a str]) -> Vec<&'a str> {
    values.iter().flat_map(|value| ["--set", value]).collect()
}

pub fn object<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let found = objects.iter().find(|object| object["kind"] == kind && object["metadata"]["name"] == name);
    found.unwrap_or_else(|| panic!("no {kind} {name}"))
}

/// The list at a pointer; empty if there is none.
pub fn list<'a>(value: &'a Value, pointer: &str) -> Vec<&'a Value> {
    value.pointer(pointer).and_then(Value::as_array).map(|list| list.iter().collect()).unwrap_or_default()
}

pub const POD: &str = "/spec/template/spec";

/// The containers of a DaemonSet, init containers first.
pub fn containers(set: &Value) -> Vec<&Value> {
    ["initContainers", "containers"].iter().flat_map(|of| list(set, &format!("{POD}/{of}"))).collect()
}

pub fn daemon_sets(objects: &[Value]) -> impl Iterator<Item = &Value> {
    objects.iter().filter(|object| object["kind"] == "DaemonSet")
}
