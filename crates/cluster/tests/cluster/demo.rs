//! `linkwise demo --dra` on every built-in machine.

use std::sync::Mutex;

use clap::Parser;
use futures_util::{StreamExt, stream};
use linkwise::config::{Cli, Command, DemoArgs};
use linkwise::machines;

fn args() -> DemoArgs {
    match Cli::try_parse_from(["linkwise", "demo", "--dra"]).unwrap().command {
        Command::Demo(args) => args,
        other => panic!("{other:?}"),
    }
}

/// What the demo prints on a machine.
async fn played(machine: &str) -> String {
    let printed = Mutex::new(String::new());
    let out = |text: &str| {
        printed.lock().unwrap().push_str(text);
        Ok(())
    };
    let ended = linkwise_cluster::demo::play(&args(), machines::load(machine).unwrap(), &out).await;
    let printed = printed.into_inner().unwrap();
    ended.unwrap_or_else(|error| panic!("{machine}: {error:#}\n{printed}"));
    printed
}

/// Demos at a time: each waits for the kubelet and for lists of pods most of its time.
const AT_ONCE: usize = 5;

#[tokio::test]
async fn dra_demo_succeeds_on_each_machine() {
    let demos = machines::built_in().map(|machine| async move { (machine.name, played(machine.name).await) });
    let mut demos = stream::iter(demos).buffer_unordered(AT_ONCE);
    let mut count = 0;
    while let Some((machine, printed)) = demos.next().await {
        count += 1;
        let gpus = machines::load(machine).unwrap().observed.gpus.len();
        let stored = format!("stores {gpus} devices in a ResourceSlice");
        let always = [
            &stored,
            "notebook claims 1: gets gpu-",
            "written them again",
            "tainted gpu.nvidia.com/gpu-lost",
            "the taint is gone",
            "tainted gpu.nvidia.com/xid=79",
            "claims allocated",
            "nothing left behind",
        ];
        for part in always {
            assert!(printed.contains(part), "{machine}: {part}\n{printed}");
        }
        // Half of the GPUs are for train-b: with one of the others taken, its claim waits.
        if gpus >= 4 {
            assert!(printed.contains("✗ train-b claims") && printed.contains("in use"), "{machine}\n{printed}");
        }
    }
    assert_eq!(count, machines::built_in().count());
}
