//! Tests of NVLinks and GPU instance profiles that NVML 13 has and the bindings, which are of NVML 12, lack.

use std::fs;

use linkwise_core::topology::MigExtension;

use super::{Machine, Path, machine, polled, ready};

/// A machine of the fake library with one text of its file replaced.
fn machine_with(name: &str, from: &str, to: &str) -> Machine {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("lab/fake-nvml/machines/{name}.yaml"));
    let text = fs::read_to_string(file).unwrap();
    assert_eq!(text.matches(from).count(), 1, "{from}");
    let machine = machine();
    let file = machine.folder.path().join("machine.yaml");
    fs::write(&file, text.replace(from, to)).unwrap();
    machine.with("FAKE_NVML_MACHINE", file)
}

#[tokio::test]
async fn last_of_36_links_is_seen_and_watched() {
    for fields in ["yes", "no"] {
        let machine = machine_with("four-gpus", "links: [5]", "links: [5, 35]");
        machine.tell(&format!("link-fields {fields}"));
        let mut agent = machine.agent();
        let links = ready(&mut agent).await.0[0].nvlinks.clone().unwrap();
        assert!(links.iter().any(|group| group.links.contains(&35)), "fields: {fields}: {links:?}");
        machine.tell("link 0 35 down");
        polled(&mut agent, 0, |poll| poll.nvlinks_down.iter().flatten().any(|link| *link == 35)).await;
    }
}

#[tokio::test]
async fn last_of_18_profiles_is_read() {
    let machine = machine_with("mig-on-demand", "number: 9,", "number: 17,");
    let (gpus, failures) = ready(&mut machine.agent()).await;
    let profiles = &gpus[0].mig.as_ref().unwrap().profiles;
    assert!(profiles.iter().any(|profile| profile.number == 17) && failures.is_empty(), "{profiles:?}, {failures:?}");
    assert_eq!(MigExtension::of_profile(17), MigExtension::Graphics);
}
