//! Renders a folder by kubectl or kustomize.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::chart::helm::tool;

/// Renders a folder; uses kubectl if it is here, else kustomize.
pub fn rendered(folder: &Path) -> Vec<Value> {
    let (kubectl, kustomize) = (tool("kubectl"), PathBuf::from("kustomize"));
    let ways = [(kubectl, "kustomize"), (kustomize, "build")];
    let mut outputs =
        ways.iter().filter_map(|(program, command)| match Command::new(program).arg(command).arg(folder).output() {
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            output => Some(output.unwrap_or_else(|error| panic!("{}: {error}", program.display()))),
        });
    let output = outputs.next().expect("neither kubectl nor kustomize");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{}: {}", folder.display(), String::from_utf8_lossy(&output.stderr));
    text.split("\n---\n").map(|document| serde_saphyr::from_str(document).unwrap()).collect()
}
