//! `linkwise demo --dra` on every built-in machine.

use std::sync::Mutex;

use clap::Parser;
use futures_util::{StreamExt, stream};
use linkwise::config::{Cli, Command, DemoArgs};
use linkwise::machines::{self, Machine};

fn args() -> DemoArgs {
    match Cli::try_parse_from(["linkwise", "demo", "--dra"]).unwrap().command {
        Command::Demo(args) => args,
        other => panic!("{other:?}"),
    }
}

/// What the demo prints on a machine.
async fn played(name: &str, machine: Machine) -> String {
    let printed = Mutex::new(String::new());
    let out = |text: &str| {
        printed.lock().unwrap().push_str(text);
        Ok(())
    };
    let ended = linkwise_cluster::demo::play(&args(), machine, &out).await;
    let printed = printed.into_inner().unwrap();
    ended.unwrap_or_else(|error| panic!("{name}: {error:#}\n{printed}"));
    printed
}

/// Demos at a time: each waits for the kubelet and for lists of pods most of its time.
const AT_ONCE: usize = 5;

#[tokio::test]
async fn dra_demo_succeeds_on_each_machine() {
    let load = |name| machines::load(name).unwrap();
    let demos = machines::built_in().map(|it| async move { (it.name, played(it.name, load(it.name)).await) });
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

#[tokio::test]
async fn dra_demo_succeeds_with_few_gpus_or_none() {
    for gpus in [0, 1, 3] {
        let mut machine = machines::load("dgx1-v100").unwrap();
        machine.observed.gpus.truncate(gpus);
        let printed = played("some GPUs", machine).await;
        let end = if gpus == 0 { "publishes nothing" } else { "nothing left behind" };
        assert!(printed.contains(end), "{gpus}\n{printed}");
    }
}
