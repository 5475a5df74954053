//! The templates of claims in the manifests, the chart and the output of `linkwise claim`; the policies in the chart.

use std::path::Path;

use crate::dra::published::golden::run;
use crate::unchanged_pods::resources;

/// The chart has copies, because helm reads no file outside of a chart.
#[test]
fn chart_has_the_same_files() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR"));
    let policies = ["unchanged-pods", "several-claims"].map(|folder| (folder, folder));
    let templates = [("templates", "claim-templates"), ("templates-exact", "exact-claim-templates")];
    for (folder, copies) in templates.into_iter().chain(policies) {
        let texts = |folder: &Path| -> Vec<(std::ffi::OsString, String)> {
            let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
            let files = files.filter(|file| file.file_name() != "kustomization.yaml");
            let mut texts: Vec<_> =
                files.map(|file| (file.file_name(), std::fs::read_to_string(file.path()).unwrap())).collect();
            texts.sort();
            texts
        };
        let here = texts(&repository.join("manifests/dra").join(folder));
        assert_eq!(here, texts(&repository.join("charts/linkwise/files").join(copies)), "{folder}");
    }
}

#[test]
fn templates_are_what_the_command_prints() {
    for (folder, exact) in [("manifests/dra/templates", &[][..]), ("manifests/dra/templates-exact", &["--exact"])] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
        let mut names = Vec::new();
        for size in ["2", "4", "8"] {
            let name = format!("linkwise-gpus-{size}");
            let command = ["claim", "--gpus", size, "--kind", "template", "--name", &name];
            let (printed, _) = run(&[&command[..], exact].concat()).unwrap();
            assert_eq!(std::fs::read_to_string(path.join(format!("{name}.yaml"))).unwrap(), printed);
            let further = format!("{name}-any");
            names.extend([exact.is_empty().then_some(further), Some(name)].into_iter().flatten());
        }
        let listed = resources(folder).into_iter();
        let listed: Vec<String> = listed.map(|one| one["metadata"]["name"].as_str().unwrap().to_owned()).collect();
        assert_eq!(listed, names);
    }
}
