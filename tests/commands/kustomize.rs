//! What kubectl, or kustomize, makes of a folder.

use std::io::ErrorKind;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// The objects, by what `build.rs` found.
pub fn rendered(folder: &Path) -> Vec<Value> {
    let brought = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/tools/kubectl");
    let ways: [(&Path, &[&str]); 3] =
        [(&brought, &["kustomize"]), (Path::new("kubectl"), &["kustomize"]), (Path::new("kustomize"), &["build"])];
    let mut outputs =
        ways.iter().filter_map(|(program, args)| match Command::new(program).args(*args).arg(folder).output() {
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            output => Some(output.unwrap_or_else(|error| panic!("{}: {error}", program.display()))),
        });
    let output = outputs.next().expect("kubectl or kustomize");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{}: {}", folder.display(), String::from_utf8_lossy(&output.stderr));
    text.split("\n---\n").map(|document| serde_saphyr::from_str(document).unwrap()).collect()
}
