//! Each command in a page is run, rendered, or marked as one that no test here can run. Any other command fails the
//! tests.

mod cluster;
pub mod kustomize;
mod notes;
mod page;
mod shell;
mod typed;

use crate::chart::helm;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use cluster::{chart_objects, check_names, folder_objects, is_our_chart, kustomization, nvidia_daemon_set};
use helm::{Helm, repository};
use page::{Typed, commands, inline, pages};
use shell::{is_placeholder, options, without_variables};

fn commands_by_page() -> Vec<Vec<Typed>> {
    let pages = pages().into_iter();
    pages.map(|page| commands(&page, &fs::read_to_string(repository(&page)).unwrap())).collect()
}

/// The first program of a command line.
fn program(typed: &Typed) -> String {
    without_variables(&typed.parts()[0])[0].clone()
}

/// Returns true if a test or CI runs or renders the command; any other needs a mark.
fn is_run(typed: &Typed) -> bool {
    let words = typed.parts().remove(0);
    match program(typed).as_str() {
        "linkwise" | "linkwise-lab" => typed.mark.is_none(),
        "helm" => is_our_chart(&words),
        "kubectl" => kustomization(&words).is_some(),
        "make" => CI.contains(&words[1].as_str()) || RUN_HERE.contains(&words[1].as_str()),
        _ => false,
    }
}

/// The targets of make in `.ci/run`.
const CI: [&str; 4] = ["tools", "lint", "test", "test-image"];
/// The targets whose recipe `make_targets_exist_and_demo_runs` runs.
const RUN_HERE: [&str; 1] = ["demo"];

#[test]
fn commands_that_no_test_runs_are_marked() {
    let commands: Vec<Typed> = commands_by_page().concat();
    assert!(commands.len() > 60, "{} commands", commands.len());
    let unmarked = commands.iter().filter(|typed| typed.mark.is_none() && !is_run(typed));
    let unmarked: Vec<String> = unmarked.map(|typed| format!("{}: {}", typed.place, typed.text)).collect();
    assert!(
        unmarked.is_empty(),
        "these are neither run by a test nor marked by a comment `# Needs ...; not tried.`:\n{}",
        unmarked.join("\n")
    );
}

#[test]
fn linkwise_commands_run_as_they_are_typed() {
    let commands: Vec<Typed> = commands_by_page().concat();
    let ours: Vec<&Typed> = commands.iter().filter(|typed| program(typed).starts_with("linkwise")).collect();
    let (run, marked): (Vec<&Typed>, Vec<&Typed>) = ours.into_iter().partition(|typed| typed.mark.is_none());
    assert!(run.len() > 20, "{} commands", run.len());
    run.iter().for_each(|typed| typed::run(typed));
    for typed in marked {
        assert!(typed::is_known(without_variables(&typed.parts()[0])), "{}: {}", typed.place, typed.text);
    }
}

/// Checks commands in a container (`kubectl exec POD -- linkwise doctor`) and in running text.
#[test]
fn commands_in_containers_and_text_are_known() {
    let mut seen = BTreeSet::new();
    let mut check = |place: &str, words: &[String]| {
        let is_placeholder_or_help = words.len() < 2 || is_placeholder(&words[1]) || words[1] == "help";
        let known = is_placeholder_or_help || !seen.insert(words.to_vec()) || typed::is_known(words);
        assert!(known, "{place}: {}", words.join(" "));
    };
    for typed in commands_by_page().concat() {
        let words = typed.parts().remove(0);
        if let Some(end) = words.iter().position(|word| word == "--") {
            check(&typed.place, &words[end + 1..]);
        }
    }
    let makefile = fs::read_to_string(repository("Makefile")).unwrap();
    for page in pages() {
        for (place, text) in inline(&page, &fs::read_to_string(repository(&page)).unwrap()) {
            let Some(words) = shell::pipeline(&text).into_iter().next() else { continue };
            let words = without_variables(&words);
            match words[0].as_str() {
                // Messages of linkwise begin with its name, too.
                "linkwise" | "linkwise-lab" if words.len() > 4 && !typed::is_known(words) => {}
                "linkwise" | "linkwise-lab" => check(&place, words),
                "make" => assert!(makefile.contains(&format!("\n{}:", words[1])), "{place}: {text}"),
                _ => {
                    if let Some(folder) = kustomization(words).filter(|folder| folder.starts_with("manifests/")) {
                        assert!(repository(folder).is_dir() || is_placeholder(folder), "{place}: {text}");
                    }
                }
            }
        }
    }
}

#[test]
#[cfg_attr(not(has_helm), ignore = "no helm here: make tools brings it")]
fn helm_commands_render() {
    let helm = Helm::found();
    let commands = commands_by_page().concat();
    let ours = commands.iter().filter(|typed| is_our_chart(&typed.parts()[0]));
    let rendered = ours.map(|typed| chart_objects(&helm, typed)).inspect(|it| assert!(!it.is_empty())).count();
    assert!(rendered > 6, "{rendered} commands");
}

#[test]
#[cfg_attr(not(has_kubectl), ignore = "no kubectl or kustomize here: make tools brings it")]
fn folders_of_kubectl_render() {
    let commands = commands_by_page().concat();
    let ours: Vec<&Typed> = commands.iter().filter(|typed| kustomization(&typed.parts()[0]).is_some()).collect();
    assert!(ours.len() > 6, "{} commands", ours.len());
    for typed in ours {
        let objects = folder_objects(typed).unwrap();
        assert!(!objects.is_empty(), "{}", typed.place);
    }
}

/// Checks that kubectl names installed objects: those of the command's block if the block installs any, else those of
/// the page, of `manifests/base` and of NVIDIA's manifest.
#[test]
#[cfg_attr(not(all(has_helm, has_kubectl)), ignore = "no helm or kubectl here: make tools brings them")]
fn kubectl_names_installed_objects() {
    let helm = Helm::found();
    let others = [kustomize::rendered(&repository("manifests/base")), vec![nvidia_daemon_set()]].concat();
    let mut named = 0;
    for commands in commands_by_page() {
        let mut page: Vec<(usize, Vec<Value>)> = Vec::new();
        for typed in &commands {
            let words = typed.parts().remove(0);
            if is_our_chart(&words) {
                page.push((typed.block, chart_objects(&helm, typed)));
            } else if let Some(objects) = folder_objects(typed) {
                page.push((typed.block, objects));
            } else if words[0] == "kubectl" {
                let own: Vec<Value> =
                    page.iter().filter(|(block, _)| *block == typed.block).flat_map(|(_, it)| it.clone()).collect();
                let objects = match own.is_empty() {
                    true => page.iter().flat_map(|(_, it)| it.clone()).chain(others.clone()).collect(),
                    false => own,
                };
                let found = check_names(&words, &objects);
                assert_eq!(found, Ok(()), "{}: {}", typed.place, typed.text);
                named += 1;
            } else if words[..2] == ["helm", "test"] {
                let namespace = options(&words, &["-n", "--namespace"]);
                let objects = page.iter().flat_map(|(_, objects)| objects);
                let is_test = |it: &&Value| it["metadata"]["annotations"]["helm.sh/hook"] == "test";
                let pod = objects.clone().find(is_test).expect("no test in the chart");
                assert!(namespace.iter().all(|name| pod["metadata"]["namespace"] == *name), "{}", typed.place);
                assert!(pod["metadata"]["name"].as_str().unwrap().starts_with(&words[2]), "{}", typed.place);
            }
        }
    }
    assert!(named > 25, "{named} commands");
}

#[test]
fn make_targets_exist_and_demo_runs() {
    let ci = fs::read_to_string(repository(".ci/run")).unwrap();
    let line = ci.lines().find_map(|line| line.strip_prefix(".ci/commits && ")).expect(".ci/run checks no commits");
    assert_eq!(line.split(" && ").collect::<Vec<_>>(), CI.map(|target| format!("make {target}")), ".ci/run");
    let printed = |target: &str| {
        let mut make = Command::new("make");
        // This make is not a part of the `make test` that runs the test.
        make.args(["-n", "--no-print-directory", target]).current_dir(repository(""));
        make.env_remove("MAKEFLAGS").env_remove("MAKELEVEL");
        let output = make.output().unwrap();
        assert!(output.status.success(), "make {target}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let commands = commands_by_page().concat();
    let targets: BTreeSet<String> =
        commands.iter().filter(|typed| program(typed) == "make").map(|typed| typed.parts()[0][1].clone()).collect();
    assert!(targets.len() > 3, "{targets:?}");
    for target in &targets {
        assert!(!printed(target).is_empty(), "make {target}");
    }
    for target in RUN_HERE.into_iter().filter(|_| typed::lab().is_file()) {
        let recipe = printed(target);
        let (_, command) =
            recipe.rsplit_once("-p linkwise-lab --no-default-features -- ").expect("no laboratory in the recipe");
        let words: Vec<String> =
            ["linkwise-lab"].into_iter().chain(command.split_whitespace()).map(str::to_owned).collect();
        let output = typed::linkwise(&words, &repository(""));
        assert!(output.status.success() && output.stdout.len() > 1000, "make {target}: {output:?}");
    }
}

#[test]
fn readme_is_short() {
    let words = fs::read_to_string(repository("README.md")).unwrap().split_whitespace().count();
    assert!(words <= 1200, "{words} words");
}

#[test]
fn unmarked_and_misnamed_commands_are_found() {
    let one = |line: &str| commands("page", &format!("text\n\n    {line}\n")).remove(0);
    for line in ["kubectl get pods", "helm rollback a -n b", "make soak", "oc get scc", "helm install a oci://b/c"] {
        assert!(!is_run(&one(line)), "{line}");
    }
    let marked =
        commands("page", "    kubectl get nodes\n    # Needs a cluster; not tried.\n    kubectl get pods   # all\n");
    assert_eq!(marked[0].mark, None);
    assert_eq!((marked[1].mark.as_deref(), marked[1].place.as_str()), (Some("Needs a cluster; not tried."), "page:3"));
    let block =
        commands("page", "1. a:\n\n       helm install a charts/linkwise -n b \\\n         --set 'c=d e'\n\ntext\n");
    assert_eq!(block[0].parts()[0][4..], ["-n", "b", "--set", "c=d e"].map(str::to_owned));
    let printed = commands("page", "    $ linkwise x\n    line\n      other\n");
    assert_eq!((printed.len(), printed[0].prints.as_deref()), (1, Some("line\n  other\n")));
    let labels = json!({"app": "a"});
    let alike = |name: &str| {
        let spec = json!({"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}}});
        json!({"kind": "DaemonSet", "metadata": {"namespace": "gpu", "name": name}, "spec": spec})
    };
    let objects = [nvidia_daemon_set(), alike("one"), alike("two")];
    let check = |line: &str| check_names(&one(line).parts()[0], &objects);
    assert_eq!(check("kubectl -n kube-system exec ds/nvidia-device-plugin-daemonset -- linkwise doctor"), Ok(()));
    assert_eq!(check("kubectl -n NAMESPACE exec ds/other -- linkwise doctor"), Ok(()));
    for (line, words) in [
        ("kubectl -n gpu exec ds/nvidia-device-plugin-daemonset -- x", "no DaemonSet gpu/"),
        ("kubectl -n kube-system logs ds/other", "no DaemonSet kube-system/other"),
        ("kubectl -n gpu logs ds/one", "selects pods of \"two\" too"),
        ("kubectl exec ds/nvidia-device-plugin-daemonset -- x", "without a namespace"),
        ("kubectl -n kube-system exec ds/nvidia-device-plugin-daemonset -c other -- x", "no container other"),
        ("kubectl -n kube-system set image daemonset/nvidia-device-plugin-daemonset a=b", "no container a"),
    ] {
        let error = check(line).unwrap_err();
        assert!(error.contains(words), "{line}: {error}");
    }
}

/// Collects texts that operators read beside the pages: sources without comments, charts, manifests.
fn collect_texts(folder: &Path, texts: &mut Vec<(String, String)>) {
    for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            collect_texts(&entry, texts);
        } else if entry.extension().is_some_and(|end| ["rs", "yaml", "txt", "tpl"].iter().any(|text| end == *text)) {
            let text = fs::read_to_string(&entry).unwrap();
            let lines: Vec<_> = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
            texts.push((entry.display().to_string(), lines.join("\n")));
        }
    }
}

#[test]
fn reset_is_advised_between_release_and_resume() {
    /// The longest distance between the reset and its steps, in characters.
    const MAX_DISTANCE: usize = 120;
    let mut texts: Vec<(String, String)> =
        pages().into_iter().map(|page| (page.clone(), fs::read_to_string(repository(&page)).unwrap())).collect();
    for folder in ["src", "crates", "charts", "manifests"] {
        collect_texts(&repository(folder), &mut texts);
    }
    let mut found = BTreeSet::new();
    for (place, text) in &texts {
        for (at, _) in ["--gpu-reset", "reset the GPU", "eset it]"].iter().flat_map(|words| text.match_indices(words)) {
            let before = text.split_at(at).0.char_indices();
            let begin = before.rev().nth(MAX_DISTANCE).map_or(0, |(begin, _)| begin);
            let around: String = text.split_at(begin).1.chars().take(2 * MAX_DISTANCE).collect();
            let has_link = around.contains("](operations.md#resetting-a-gpu)");
            let has_steps = around.contains("admin release") && around.contains("admin resume");
            assert!(has_link || has_steps, "{place}: the reset lacks `admin release` and `admin resume`: {around}");
            found.insert(place);
        }
    }
    assert!(found.len() >= 5, "{found:?}");
}
