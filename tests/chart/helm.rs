//! Runs helm.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// A file or folder of the repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// A program of `make tools`, else the one on the PATH.
pub fn tool(name: &str) -> PathBuf {
    let brought = repository("target/tools").join(name);
    if brought.exists() { brought } else { name.into() }
}

/// The release that all tests render; NVIDIA's README calls it so.
pub const RELEASE: &str = "nvdp";

/// helm on this machine.
pub struct Helm(PathBuf);

impl Helm {
    pub fn found() -> Self {
        Self(tool("helm"))
    }

    /// It ends before it needs a garbage collection: a quarter less time, three hundred times.
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

    /// The objects that the cluster would get, without those that are empty, or helm's message.
    pub fn template(&self, args: &[&str]) -> Result<Vec<Value>, String> {
        let flags = ["--namespace", "gpu"].iter().chain(args).map(|flag| (*flag).to_owned()).collect::<Vec<_>>();
        self.of_chart(&repository("charts/linkwise"), RELEASE, &flags, &repository(""))
    }

    /// The objects of a release with these flags and no others, from a folder with the files that they name.
    pub fn of_chart(&self, chart: &Path, release: &str, flags: &[String], at: &Path) -> Result<Vec<Value>, String> {
        let mut helm = self.command();
        helm.args(["template", release]).arg(chart).args(flags);
        objects(helm.current_dir(at).output().unwrap())
    }

    /// The objects for values that the chart has to take, `--set` for each.
    pub fn objects(&self, values: &[&str]) -> Vec<Value> {
        self.template(&set(values)).unwrap_or_else(|error| panic!("{values:?}: {error}"))
    }
}

/// The objects that helm printed, or its message.
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

/// `--set VALUE` for each; a file (`config.map.NAME=@FILE`) by `--set-file`.
pub fn set<'a>(values: &[&'a str]) -> Vec<&'a str> {
    values.iter().flat_map(|value| ["--set", value]).collect()
}

/// The named object of a kind.
pub fn object<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let found = objects.iter().find(|object| object["kind"] == kind && object["metadata"]["name"] == name);
    found.unwrap_or_else(|| panic!("no {kind} {name}"))
}

/// The list at this place, empty where it is missing.
pub fn list<'a>(value: &'a Value, pointer: &str) -> Vec<&'a Value> {
    value.pointer(pointer).and_then(Value::as_array).map(|list| list.iter().collect()).unwrap_or_default()
}

pub const POD: &str = "/spec/template/spec";

/// The containers of a DaemonSet, those that run first in front.
pub fn containers(set: &Value) -> Vec<&Value> {
    ["initContainers", "containers"].iter().flat_map(|of| list(set, &format!("{POD}/{of}"))).collect()
}

/// The DaemonSets among these objects.
pub fn daemon_sets(objects: &[Value]) -> impl Iterator<Item = &Value> {
    objects.iter().filter(|object| object["kind"] == "DaemonSet")
}
