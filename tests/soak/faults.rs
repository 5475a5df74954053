//! The faults: what each does, when it has been noticed, what ends it.

use std::time::Instant;

use linkwise_kubelet_box::{Fault as BoxFault, Restart, State};
use tokio::task::JoinSet;

use crate::RECOVERY;
use crate::node::{GPU, signal, until};
use crate::random::Random;
use crate::world::{GPUS, World, uuid};

/// How a temperature is asked for: the call that every round makes of every GPU.
const CALL: &str = "nvmlDeviceGetTemperature";
/// NVLinks of a GPU.
const LINKS: u32 = 12;

/// One kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    KubeletRestarts,
    NodeRestarts,
    KubeletGone,
    SocketDeleted,
    StreamCut,
    RegisterRefused,
    RegisterHangs,
    NobodyDialsBack,
    PluginStopped,
    PluginKilled,
    ChildKilled,
    ChildStopped,
    CallHangs,
    CallHoldsTheLock,
    CallCrashes,
    InitFails,
    GpuLost,
    XidStorm,
    XidUntilRecovery,
    XidUntilCleared,
    LinksDown,
    GpuRemoved,
    MigChanged,
    GpusShared,
    DriverReleased,
}

use Fault::{
    CallCrashes, CallHangs, CallHoldsTheLock, ChildKilled, ChildStopped, DriverReleased, GpuLost, GpuRemoved,
    GpusShared, InitFails, KubeletGone, KubeletRestarts, LinksDown, MigChanged, NobodyDialsBack, NodeRestarts,
    PluginKilled, PluginStopped, RegisterHangs, RegisterRefused, SocketDeleted, StreamCut, XidStorm, XidUntilCleared,
    XidUntilRecovery,
};

/// Those that keep kubelet and plugin from each other.
const BETWEEN: [Fault; 10] = [
    KubeletRestarts,
    NodeRestarts,
    KubeletGone,
    SocketDeleted,
    StreamCut,
    RegisterRefused,
    RegisterHangs,
    NobodyDialsBack,
    PluginStopped,
    PluginKilled,
];
/// Those that no admission may notice.
const BEHIND: [Fault; 15] = [
    ChildKilled,
    ChildStopped,
    CallHangs,
    CallHoldsTheLock,
    CallCrashes,
    InitFails,
    GpuLost,
    XidStorm,
    XidUntilRecovery,
    XidUntilCleared,
    LinksDown,
    GpuRemoved,
    MigChanged,
    GpusShared,
    DriverReleased,
];

impl Fault {
    fn name(self) -> &'static str {
        match self {
            KubeletRestarts => "kubelet restarts",
            NodeRestarts => "kubelet restarts, no container left",
            KubeletGone => "kubelet gone for a while",
            SocketDeleted => "our socket deleted",
            StreamCut => "stream cut",
            RegisterRefused => "Register refused",
            RegisterHangs => "Register hangs",
            NobodyDialsBack => "Register answers, nobody dials back",
            PluginStopped => "plugin SIGSTOP, SIGCONT",
            PluginKilled => "plugin kill -9, started again",
            ChildKilled => "NVML child SIGKILL",
            ChildStopped => "NVML child SIGSTOP",
            CallHangs => "an NVML call hangs",
            CallHoldsTheLock => "an NVML call hangs with the lock",
            CallCrashes => "an NVML call crashes for one GPU",
            InitFails => "nvmlInit fails for a while",
            GpuLost => "GPU lost, and back",
            XidStorm => "application XIDs, 5,000 at once",
            XidUntilRecovery => "fatal XID, ended by the recovery action",
            XidUntilCleared => "fatal XID, ended by an operator's clear",
            LinksDown => "NVLinks down, and up",
            GpuRemoved => "GPU removed, and added",
            MigChanged => "MIG layout changed, and back",
            GpusShared => "time-slicing on, and off",
            DriverReleased => "driver released, and resumed",
        }
    }

    fn is_between(self) -> bool {
        BETWEEN.contains(&self)
    }

    /// Whether it is over only when it is ended; the others are over as soon as they have happened.
    fn lasts(self) -> bool {
        let moments =
            [KubeletRestarts, NodeRestarts, SocketDeleted, StreamCut, PluginKilled, ChildKilled, ChildStopped];
        !moments.contains(&self) && self != XidStorm
    }

    /// Lets it happen. Alone, it is waited for until it was noticed; beside another one it lasts as long as chance says.
    /// A kubelet that the end of an older stream made forget its connection, as kubelets up to 1.36 do, cannot cut it.
    async fn begin(self, world: &mut World, gpu: u32, alone: bool) {
        let (id, kubelet) = (uuid(gpu), std::sync::Arc::clone(&world.kubelet));
        let registrations = world.state().resources[GPU].registrations;
        match self {
            KubeletRestarts => kubelet.restart(Restart::Kubelet).await.unwrap(),
            NodeRestarts => kubelet.restart(Restart::Node).await.unwrap(),
            KubeletGone => kubelet.stop().await.unwrap(),
            SocketDeleted => {
                for socket in world.node.setup.sockets() {
                    // The plugin may take it away at this very moment.
                    let _ = std::fs::remove_file(socket);
                }
                if alone {
                    kubelet.wait(|state| state.resources[GPU].registrations > registrations).await.unwrap();
                }
            }
            StreamCut => {
                if kubelet.disconnect(GPU) && alone {
                    kubelet.wait(|state| state.resources[GPU].registrations > registrations).await.unwrap();
                }
            }
            RegisterRefused => {
                let refused = world.state().refused;
                let message = "not now".to_owned();
                kubelet.set_fault(BoxFault::Refuse { code: tonic::Code::Unavailable, message });
                if kubelet.disconnect(GPU) && alone {
                    kubelet.wait(|state| state.refused > refused).await.unwrap();
                }
            }
            RegisterHangs => {
                kubelet.set_fault(BoxFault::Hang);
                if kubelet.disconnect(GPU) && alone {
                    kubelet.wait(|state| state.registering > 0).await.unwrap();
                }
            }
            NobodyDialsBack => {
                kubelet.set_fault(BoxFault::AnswerWithoutDial);
                kubelet.disconnect(GPU);
            }
            PluginStopped => world.node.process.signal("STOP"),
            PluginKilled => world.replace().await,
            ChildKilled | ChildStopped => {
                let child = world.child();
                if let Some(child) = child {
                    // It may have ended by itself where another fault is at work.
                    let word = if self == ChildKilled { "KILL" } else { "STOP" };
                    let _ = std::panic::catch_unwind(|| signal(word, child));
                }
                if alone {
                    gone(world, child).await;
                }
            }
            CallHangs | CallHoldsTheLock => {
                let child = world.child();
                let word = if self == CallHangs { "hang" } else { "hold" };
                world.tell(&format!("{word} {gpu} {CALL}")).await;
                if alone {
                    gone(world, child).await;
                }
            }
            CallCrashes => world.tell(&format!("crash {gpu} {CALL}")).await,
            InitFails => {
                world.tell("init 9").await;
                if let Some(child) = world.child() {
                    let _ = std::panic::catch_unwind(|| signal("KILL", child));
                    gone(world, Some(child)).await;
                }
            }
            GpuLost => world.tell(&format!("lost {gpu}")).await,
            XidStorm => {
                let series = format!("linkwise_xid_errors_total{{uuid=\"{id}\",xid=\"31\"}}");
                let before = if alone { world.metric(&series).await.unwrap_or(0) } else { 0 };
                world.tell(&format!("storm {gpu} 31 5000")).await;
                if alone {
                    until(async || {
                        let now = world.metric(&series).await.unwrap_or(0);
                        if now == before + 5000 { Ok(()) } else { Err((before, now)) }
                    })
                    .await;
                }
            }
            XidUntilRecovery | XidUntilCleared => {
                world.tell(&format!("xid {gpu} 79")).await;
                world.tell(&format!("recovery {gpu} 1")).await;
                if alone {
                    // The recovery action alone makes it ill as well.
                    world.stands(gpu, "xid").await;
                }
            }
            LinksDown => {
                for link in 0..LINKS {
                    world.tell(&format!("link {gpu} {link} down")).await;
                }
            }
            GpuRemoved => world.tell(&format!("remove {gpu}")).await,
            MigChanged => world.tell(&format!("mig {gpu} {}", layout(gpu))).await,
            GpusShared => world.share(true),
            DriverReleased => world.admin(&["release"]).await,
        }
        let hits_one_gpu = [CallCrashes, GpuLost, XidUntilRecovery, XidUntilCleared, LinksDown, GpuRemoved, MigChanged];
        if alone && hits_one_gpu.contains(&self) {
            world.ill(gpu).await;
        }
    }

    /// Ends what does not end by itself.
    async fn end(self, world: &mut World, gpu: u32) {
        match self {
            KubeletGone => world.kubelet.start_again(Restart::Kubelet).unwrap(),
            RegisterRefused | RegisterHangs | NobodyDialsBack => world.kubelet.set_fault(BoxFault::None),
            PluginStopped => world.node.process.signal("CONT"),
            CallHangs => world.tell(&format!("unhang {gpu} {CALL}")).await,
            CallHoldsTheLock => world.tell(&format!("unhold {gpu} {CALL}")).await,
            CallCrashes => world.tell(&format!("uncrash {gpu} {CALL}")).await,
            InitFails => world.tell("init 0").await,
            GpuLost => world.tell(&format!("back {gpu}")).await,
            XidUntilRecovery => world.tell(&format!("recovery {gpu} 0")).await,
            XidUntilCleared => {
                // An operator vouches for what was told. What the driver says for the first time afterwards is news.
                world.stands(gpu, "recovery_action").await;
                world.admin(&["clear", &uuid(gpu)]).await;
                // By the operator's word: what the driver says of it has not changed yet.
                world.well(gpu).await;
                world.tell(&format!("recovery {gpu} 0")).await;
            }
            LinksDown => {
                for link in 0..LINKS {
                    world.tell(&format!("link {gpu} {link} up")).await;
                }
            }
            GpuRemoved => world.tell(&format!("add {gpu}")).await,
            MigChanged => world.tell(&format!("mig {gpu} {{enabled: false}}")).await,
            GpusShared => {
                // A change that nobody has seen yet would be seen after `World::whole` finds the node as it was.
                let all = usize::try_from(GPUS * 2).unwrap();
                let shared = |state: &State| state.resources[GPU].healthy.iter().filter(|id| id.contains("::")).count();
                world.kubelet.wait(|state| shared(state) == all).await.unwrap();
                world.share(false);
            }
            DriverReleased => world.admin(&["resume"]).await,
            KubeletRestarts | NodeRestarts | SocketDeleted | StreamCut | PluginKilled | ChildKilled | ChildStopped
            | XidStorm => {}
        }
    }
}

/// Waits until a child is no more.
async fn gone(world: &World, child: Option<u32>) {
    let lives = || child.is_some_and(|child| world.node.agent_ids().contains(&child));
    until(async || if lives() { Err(child) } else { Ok(()) }).await;
}

/// Two devices of three slices each, as an A100 40 GB makes them.
fn layout(gpu: u32) -> String {
    let device = |number: u32| {
        format!(
            "{{index: {number}, uuid: MIG-0000000{gpu}-0000-4000-8000-00000000000{number}, gpu_instance: {}, \
             compute_instance: 0, gpu_slices: 3, compute_slices: 3, memory_mib: 19968}}",
            number + 1
        )
    };
    format!("{{enabled: true, devices: [{}, {}]}}", device(0), device(1))
}

/// One fault, or two, from the beginning to the node's recovery. Says whether the next one may come.
pub async fn round(world: &mut World, random: &mut Random) -> bool {
    let all: Vec<Fault> = BETWEEN.into_iter().chain(BEHIND).collect();
    let faults = if random.one_in(4) { vec![random.of(&BEHIND), random.of(&BETWEEN)] } else { vec![random.of(&all)] };
    let (gpu, alone) = (random.within(0..GPUS), faults.len() == 1);
    let names: Vec<&str> = faults.iter().map(|fault| fault.name()).collect();
    world.ledger.round(format!("{} (GPU {gpu})", names.join(" and ")));
    world.disturbance.set(faults.iter().any(|fault| fault.is_between()));
    world.sharing.set(faults.contains(&GpusShared));
    // Where GPUs begin to be shared each waits for the pods that hold it; a kubelet that loses its stream calls all ill.
    // Of two at once, the one between the kubelet and the plugin may be noticed as late as in the next round.
    let late = std::mem::replace(&mut world.two_before, !alone);
    let of_one = !late && !faults.iter().any(|fault| fault.is_between() || *fault == GpusShared);
    let others = world.others(gpu);
    let mut watch = JoinSet::new();
    if of_one {
        watch.spawn_local(others);
    }
    let mut over = Instant::now();
    for fault in &faults {
        world.ledger.injected(fault.name());
        fault.begin(world, gpu, alone).await;
    }
    if faults.iter().any(|fault| fault.lasts()) {
        tokio::time::sleep(random.milliseconds(0..1_000)).await;
        // What was last, first: who is stopped or away cannot be told anything.
        for fault in faults.iter().rev() {
            over = Instant::now();
            fault.end(world, gpu).await;
        }
    }
    let recovered = world.whole(over, RECOVERY).await;
    world.disturbance.set(false);
    world.sharing.set(false);
    if let Some(other) = watch.try_join_next() {
        print_log(world);
        world.ledger.error(other.unwrap());
        return false;
    }
    drop(watch);
    match recovered {
        Ok(after) => {
            for fault in &faults {
                world.ledger.recovered(fault.name(), alone.then_some(after));
            }
            if !alone {
                world.ledger.injected(TWO);
                world.ledger.recovered(TWO, Some(after));
            }
        }
        Err(missing) => {
            print_log(world);
            world.ledger.error(format!("not over within {RECOVERY:?}: {missing}"));
            return false;
        }
    }
    for violation in world.kubelet.violations() {
        world.ledger.error(format!("{violation:?}"));
    }
    if !world.ledger.errors().is_empty() {
        print_log(world);
        return false;
    }
    // A moment in which nothing happens: for what comes late.
    tokio::time::sleep(random.milliseconds(0..300)).await;
    true
}

/// What the process said last of other things than pods.
fn print_log(world: &World) {
    let of_pods = |line: &String| line.contains("\"preferred\"") || line.contains("\"allocated\"");
    let lines: Vec<String> = world.node.process.lines().into_iter().filter(|line| !of_pods(line)).collect();
    println!("the last lines of the log:\n{}", lines[lines.len().saturating_sub(30)..].join("\n"));
}

/// How two at once are called.
const TWO: &str = "(two of these at once)";
