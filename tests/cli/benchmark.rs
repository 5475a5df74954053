//! `linkwise expect` and `linkwise verify` for the GPUs of a pod, which they read from an admin socket.

use serde_json::{Value, json};

use crate::cli::linkwise;
use crate::cli::top::Neighbour;
use crate::nccl::table;

const UUID_PREFIX: &str = "GPU-00000002-0000-4000-8000-00000000000";

/// One container's GPUs of a DGX H100, by index.
fn held(pod: &str, container: &str, gpus: &[u32]) -> Value {
    let gpus: Vec<String> = gpus.iter().map(|index| format!("{UUID_PREFIX}{index}")).collect();
    json!({"namespace": "team-a", "pod": pod, "container": container, "gpus": gpus})
}

/// Runs a command; returns all that it printed, and true if it succeeded.
fn output(neighbour: &Neighbour, args: &[&str]) -> (String, bool) {
    let output = linkwise(args).arg("--socket").arg(neighbour.socket()).output().unwrap();
    (String::from_utf8([output.stdout, output.stderr].concat()).unwrap(), output.status.success())
}

#[test]
fn gpus_of_a_pod_come_from_the_admin_socket() {
    let neighbour = Neighbour::started(json!({"allocations": [
        held("train-0", "main", &[4, 1]),
        held("train-0", "side", &[6]),
        held("train-1", "main", &[2, 3, 5]),
        held("one", "main", &[0]),
    ]}));
    let indices = |pod: &str| {
        let (text, succeeded) = output(&neighbour, &["expect", "--node", "dgx-h100", "--pod", pod, "--format", "json"]);
        assert!(succeeded, "{text}");
        let answer: Value = serde_json::from_str(&text).unwrap();
        let gpus = answer["gpus"].as_array().unwrap();
        gpus.iter().map(|gpu| gpu["index"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(indices("team-a/train-0"), [1, 4, 6]);
    assert_eq!(indices("team-a/train-0/main"), [1, 4]);
    assert_eq!(indices("team-a/train-1"), [2, 3, 5]);

    // A result of nccl-tests on three GPUs is compared with the pod's GPUs, not with all GPUs of the machine.
    let log = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(log.path(), table(3, &[(1 << 33, vec![350_000.0])]).replace("nGpus 8", "nGpus 3")).unwrap();
    let file = log.path().to_str().unwrap();
    let verify = |pod| output(&neighbour, &["verify", "--node", "dgx-h100", "--pod", pod, file]);
    let (text, succeeded) = verify("team-a/train-0");
    assert!(succeeded && text.contains("as expected: 350.00 GB/s"), "{text}");
    let (text, succeeded) = verify("team-a/train-0/main");
    assert!(!succeeded && text.contains("cannot compare"), "{text}");
}

#[test]
fn unusable_pod_is_named_with_the_cause() {
    let neighbour = Neighbour::started(json!({"allocations": [held("one", "main", &[0])]}));
    for (pod, cause) in [
        ("team-b/one", "team-b/one has no GPU on this node"),
        ("team-a/one/side", "team-a/one/side has no GPU on this node"),
        ("team-a/one", "name two or more"),
        ("one", "'one' is not NAMESPACE/POD or NAMESPACE/POD/CONTAINER"),
        ("a/b/c/d", "'a/b/c/d' is not NAMESPACE/POD"),
        ("team-a//main", "'team-a//main' is not NAMESPACE/POD"),
    ] {
        let (text, succeeded) = output(&neighbour, &["expect", "--node", "dgx-h100", "--pod", pod]);
        assert!(!succeeded && text.contains(cause), "{pod}: {text}");
    }
    // The machine of --node lacks the GPU that the socket names.
    let (text, succeeded) = output(&neighbour, &["expect", "--node", "dgx-a100", "--pod", "team-a/one"]);
    assert!(!succeeded && text.contains(&format!("no GPU {UUID_PREFIX}0 on this machine")), "{text}");
    // MIG devices are refused, because there is no bandwidth model for them.
    let gpus = [0, 1].map(|index| format!("GPU-00000000-0000-0000-0000-{index:012}"));
    let held = json!([{"namespace": "team-a", "pod": "mixed", "container": "main", "gpus": gpus}]);
    let mixed = Neighbour::started(json!({"allocations": held}));
    let machine = concat!(env!("CARGO_MANIFEST_DIR"), "/lab/fake-nvml/machines/four-gpus-mig.yaml");
    let (text, succeeded) = output(&mixed, &["expect", "--node", machine, "--pod", "team-a/mixed"]);
    assert!(!succeeded && text.contains("team-a/mixed has MIG devices of GPU 1"), "{text}");
    // Before the kubelet's first answer linkwise does not know the holders.
    let starting = Neighbour::started(json!({"allocations": null}));
    let (text, succeeded) = output(&starting, &["expect", "--node", "dgx-h100", "--pod", "team-a/one"]);
    assert!(!succeeded && text.contains("does not know yet which pods have which GPUs"), "{text}");
}
