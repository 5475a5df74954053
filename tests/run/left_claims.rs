//! Claims that a process with DRA has left, and a linkwise without it.

use std::fs;

use crate::node::Setup;

#[tokio::test]
async fn claims_that_are_left_need_no_other_program() {
    let mut setup = Setup::on("dgx1-v100");
    let (bin, claims) = (setup.at("bin"), setup.at("k/linkwise/claims"));
    fs::create_dir_all(&bin).unwrap();
    fs::create_dir_all(&claims).unwrap();
    fs::write(claims.join("uid.json"), "{}").unwrap();
    // Without linkwise-cluster beside it.
    fs::copy(&setup.program, bin.join("linkwise")).unwrap();
    setup.program = bin.join("linkwise");
    let (node, _kubelet) = setup.serve(8).await;
    node.process.said("linkwise-cluster, which could unprepare them, is not installed").await;
    assert!(claims.join("uid.json").exists(), "it is another process's");
}
