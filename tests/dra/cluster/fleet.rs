//! `linkwise claim --exact --cluster`, which reads the groups of a cluster from its API server.

use std::process::{Output, Stdio};

use linkwise_api_server_box::{Answer, Fault, ResourceType};
use tokio::process::Command;

use crate::cluster::support::{Cluster, within};
use crate::dra::published::exact::slices;

async fn claim(cluster: &Cluster) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_linkwise"));
    command.env_clear().envs(cluster.variables()).args(["claim", "--exact", "--cluster", "--gpus", "4"]);
    within(command.stdin(Stdio::null()).kill_on_drop(true).output()).await.unwrap()
}

#[tokio::test]
async fn group_is_chosen_by_all_slices_of_the_cluster() {
    let cluster = Cluster::start().await;
    let stderr = String::from_utf8(claim(&cluster).await.stderr).unwrap();
    assert!(stderr.contains("no node publishes whole GPUs"), "{stderr}");
    // The cluster has more slices than one page of a list.
    let template = &slices("dgx1-v100", "node")[0];
    for node in 0..501 {
        let mut slice = template.clone();
        let name = format!("node-{node}");
        slice["metadata"]["name"] = name.clone().into();
        slice["spec"]["nodeName"] = name.clone().into();
        slice["spec"]["pool"]["name"] = format!("{name}/gpu").into();
        let key = ResourceType::RESOURCE_SLICES.key(None, &name);
        cluster.server.create("linkwise", &key, slice).unwrap_or_else(|status| panic!("{status}"));
    }
    let output = claim(&cluster).await;
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("4 GPUs of one group on 501 of 501 nodes") && stderr.contains("as dgx1-v100"), "{stderr}");
    assert!(String::from_utf8(output.stdout).unwrap().contains("matchAttribute: linkwise.dev/quad1a"));
    assert_eq!(cluster.count("GET", "limit=500"), 3);
}

#[tokio::test]
async fn refusal_of_the_server_is_printed() {
    let cluster = Cluster::start().await;
    cluster.server.fail(Fault::of("GET", "resourceslices", 1, Answer::Refusal(403, "no rights", None)));
    let output = claim(&cluster).await;
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && output.stdout.is_empty(), "{stderr}");
    assert!(stderr.contains("cannot read the ResourceSlices of the cluster: the API server answered 403"), "{stderr}");
}
