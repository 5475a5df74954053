//! The notes after `helm install`: their commands name objects of the release.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::commands::cluster::check_names;
use crate::commands::helm::{Helm, repository};
use crate::commands::page::commands;

/// A copy of the chart whose notes are an object, because `helm template` prints no notes.
fn with_notes() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let copied = Command::new("cp").arg("-r").arg(repository("charts/linkwise/.")).arg(folder.path()).status();
    assert!(copied.unwrap().success());
    let templates = folder.path().join("templates");
    fs::rename(templates.join("NOTES.txt"), folder.path().join("notes.tpl")).unwrap();
    let object = "kind: Notes\nmetadata: {name: notes}\ntext: {{ tpl (.Files.Get \"notes.tpl\") . | toJson }}\n";
    fs::write(templates.join("notes.yaml"), object).unwrap();
    folder
}

/// The notes of a release, and its objects.
fn notes(helm: &Helm, chart: &Path, release: &str, flags: &[&str]) -> (String, Vec<serde_json::Value>) {
    let flags: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
    let objects = helm.of_chart(chart, release, &flags, chart).unwrap();
    let text = objects.iter().find(|object| object["kind"] == "Notes").unwrap()["text"].as_str().unwrap().to_owned();
    (text, objects)
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn commands_of_the_notes_name_installed_objects() {
    let helm = Helm::found();
    let chart = with_notes();
    for (release, flags) in [
        ("linkwise", &["-n", "linkwise"][..]),
        ("nvdp", &["-n", "gpu", "--set", "namespaceOverride=elsewhere,dra.enabled=true"]),
        ("nvdp", &["-n", "gpu", "--set", "fullnameOverride=plugin,config.name=x,gfd.enabled=true"]),
    ] {
        let (text, objects) = notes(&helm, chart.path(), release, flags);
        // The notes indent commands by two spaces, pages by four.
        let blocks: String = text
            .lines()
            .map(|line| if line.starts_with("  ") { format!("  {line}\n") } else { format!("\n{line}\n\n") })
            .collect();
        let commands = commands("NOTES.txt", &blocks);
        let test = objects.iter().find(|it| it["metadata"]["annotations"]["helm.sh/hook"] == "test").unwrap();
        // helm looks for the test's log in the release's namespace only.
        let (name, namespace) = (test["metadata"]["name"].as_str().unwrap(), &test["metadata"]["namespace"]);
        let log = format!("kubectl -n {} logs {name}\n", namespace.as_str().unwrap());
        let is_in_release = *namespace == flags[1];
        assert_eq!(
            (text.contains("--logs"), text.contains(&log)),
            (is_in_release, !is_in_release),
            "{release}:\n{text}"
        );
        let parts = ["helm test", "get pods", "exec", "describe", "label namespace"];
        for part in parts {
            assert!(commands.iter().any(|typed| typed.text.contains(part)), "no {part} in\n{text}");
        }
        for typed in commands {
            let words = typed.parts().remove(0);
            assert_eq!(check_names(&words, &objects), Ok(()), "{release}: {}", typed.text);
        }
    }
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn notes_of_gfd_alone_name_nfd_and_no_test() {
    let helm = Helm::found();
    let chart = with_notes();
    let (text, _) =
        notes(&helm, chart.path(), "a", &["-n", "b", "--set", "devicePlugin.enabled=false,gfd.enabled=true"]);
    assert!(!text.contains("helm test") && text.contains("helm install nfd"), "{text}");
}
