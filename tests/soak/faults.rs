//! The faults: the calls that may fail during each, its beginning, the sign that it was noticed, and its end.

use linkwise_api_server_box::{Answer, Fault as Refused};
use linkwise_kubelet_box::Fault as BoxFault;

use super::ledger::SHARES;
use super::world::{FailingCalls, GPUS, MIG, SHARED, Soak};
use crate::dra::cluster::mps;
use crate::run::node::GPU;

/// The NVML call that every poll makes of every GPU.
const POLL_CALL: &str = "nvmlDeviceGetTemperature";
const LINKS: u32 = 12;

/// One kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Rollout,
    Kill,
    ProcessStopped,
    KubeletRestarts,
    NodeRestarts,
    KubeletGone,
    SocketDeleted,
    StreamCut,
    RegisterRefused,
    RegisterHangs,
    NoDialBack,
    DoorChanges,
    SharingChanges,
    ApiServerAway,
    ApiServerRefuses,
    SlicesWiped,
    MpsKilled,
    AgentKilled,
    AgentStopped,
    CallHangs,
    CallHoldsTheLock,
    CallCrashes,
    InitFails,
    DriverReleased,
    GpuLost,
    GpuRemoved,
    LinksDown,
    XidStorm,
    XidUntilRecovery,
    XidUntilCleared,
}

use Fault::*;

/// The faults of one process of linkwise.
const OF_A_PROCESS: [Fault; 2] = [Kill, ProcessStopped];
const OF_THE_KUBELET: [Fault; 3] = [KubeletRestarts, NodeRestarts, KubeletGone];
/// The faults between a kubelet and the device plugin.
const BETWEEN: [Fault; 5] = [SocketDeleted, StreamCut, RegisterRefused, RegisterHangs, NoDialBack];
/// The faults that only DRA notices.
const OF_CLAIMS: [Fault; 4] = [ApiServerAway, ApiServerRefuses, SlicesWiped, MpsKilled];
const OF_THE_DRIVER: [Fault; 6] = [AgentKilled, AgentStopped, CallHangs, CallHoldsTheLock, InitFails, DriverReleased];
/// The faults that make one GPU unhealthy.
const OF_A_GPU: [Fault; 6] = [CallCrashes, GpuLost, GpuRemoved, LinksDown, XidUntilRecovery, XidUntilCleared];

impl Fault {
    /// Every fault once, rollouts and changes of doors three times.
    pub fn all() -> Vec<Self> {
        let ours = [[Rollout; 3].as_slice(), &[DoorChanges; 3], &[SharingChanges, XidStorm], &OF_A_PROCESS].concat();
        let others = [OF_THE_KUBELET.as_slice(), &BETWEEN, &OF_CLAIMS, &OF_THE_DRIVER, &OF_A_GPU].concat();
        [ours, others].concat()
    }

    /// The faults of the short runs.
    pub fn few() -> Vec<Self> {
        let processes = [[Kill; 2].as_slice(), &[Rollout, KubeletRestarts, NodeRestarts]].concat();
        let cluster = [[ApiServerAway, ApiServerRefuses, SlicesWiped].as_slice(), &[DoorChanges; 2]].concat();
        let driver = vec![GpuLost, AgentKilled, CallHoldsTheLock, CallCrashes, XidUntilRecovery];
        [processes, cluster, driver].concat()
    }

    /// The calls of the kubelet that may fail during the fault.
    pub fn failing_calls(self) -> FailingCalls {
        match self {
            Rollout | SlicesWiped | SharingChanges => FailingCalls::Nothing,
            DoorChanges => FailingCalls::All,
            _ if [OF_A_PROCESS.as_slice(), &OF_THE_KUBELET, &BETWEEN].concat().contains(&self) => FailingCalls::All,
            _ => FailingCalls::Claims,
        }
    }

    /// Returns true if the fault can happen at this door of the node.
    pub fn fits(self, is_dra: bool) -> bool {
        match self {
            SharingChanges => !is_dra,
            _ if is_dra => !BETWEEN.contains(&self),
            _ => !OF_CLAIMS.contains(&self),
        }
    }

    /// The faults that may begin while this one lasts.
    pub fn overlapping(self) -> &'static [Self] {
        match self {
            DoorChanges => &[Kill, KubeletRestarts],
            GpuLost => &[Rollout, Kill, KubeletRestarts, NodeRestarts],
            ApiServerAway | CallHangs | CallHoldsTheLock | CallCrashes | InitFails | GpuRemoved | LinksDown
            | XidUntilRecovery => {
                &[Kill, ProcessStopped, KubeletRestarts, NodeRestarts, KubeletGone, StreamCut, RegisterHangs]
            }
            _ => &[],
        }
    }

    pub fn is_of_a_gpu(self) -> bool {
        OF_A_GPU.contains(&self)
    }

    /// Begins the fault. For most faults that are `alone`, waits until linkwise notices. Kubelets up to 1.36 may forget
    /// their connection when an older stream ends; without a connection, `disconnect` returns false.
    pub async fn begin(self, soak: &mut Soak, gpu: u32, alone: bool) {
        let world = std::sync::Arc::clone(&soak.world);
        let (kubelet, server) = (&world.node.kubelet, &world.node.cluster.server);
        let registrations = kubelet.state().resources[GPU].registrations;
        let registered = async || {
            kubelet.wait(|state| state.resources[GPU].registrations > registrations).await.unwrap();
        };
        match self {
            Rollout => soak.rollout().await,
            Kill => soak.kill().await,
            ProcessStopped => soak.process.signal("STOP"),
            KubeletRestarts => {
                soak.stop_kubelet().await;
                soak.start_kubelet();
            }
            NodeRestarts => soak.reboot().await,
            KubeletGone => soak.stop_kubelet().await,
            SocketDeleted => {
                for socket in soak.sockets() {
                    // The plugin may remove its socket at the same moment.
                    let _ = std::fs::remove_file(socket);
                }
                if alone {
                    registered().await;
                }
            }
            StreamCut => {
                if kubelet.disconnect(GPU) && alone {
                    registered().await;
                }
            }
            RegisterRefused => {
                let refused = kubelet.state().refused;
                kubelet.set_fault(BoxFault::Refuse { code: tonic::Code::Unavailable, message: "not now".to_owned() });
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
            NoDialBack => {
                kubelet.set_fault(BoxFault::AnswerWithoutDial);
                kubelet.disconnect(GPU);
            }
            DoorChanges => world.change_door(),
            SharingChanges => {
                world.share(false);
                let whole = |id: &String| super::world::gpu_of(id) == SHARED && !id.contains("::");
                kubelet.wait(|state| state.resources[GPU].healthy.iter().any(whole)).await.unwrap();
            }
            ApiServerAway => {
                world.set_server_away(true);
                server.go_away().await;
            }
            ApiServerRefuses => {
                for (method, path) in [("GET", "resourceclaims"), ("PUT", "resourceslices"), ("POST", "resourceslices")]
                {
                    let code = soak.random.of(&[409, 429, 500, 503]);
                    server.fail(Refused::of(method, path, 1, Answer::Refusal(code, "not now", None)));
                }
            }
            SlicesWiped => server.wipe_slices("n", None),
            MpsKilled => {
                soak.end_daemons().await;
                soak.daemons = Some(mps::daemons(&world.node));
            }
            AgentKilled | AgentStopped => {
                soak.signal_agent(if self == AgentKilled { "KILL" } else { "STOP" }).await;
            }
            CallHangs | CallHoldsTheLock => {
                let agent = soak.agent();
                let word = if self == CallHangs { "hang" } else { "hold" };
                world.tell(&format!("{word} {gpu} {POLL_CALL}")).await;
                if alone {
                    soak.wait_agent_gone(agent).await;
                }
            }
            CallCrashes => world.tell(&format!("crash {gpu} {POLL_CALL}")).await,
            InitFails => {
                world.tell("init 9").await;
                soak.signal_agent("KILL").await;
            }
            DriverReleased => world.admin(&["release"]).await,
            GpuLost => world.tell(&format!("lost {gpu}")).await,
            GpuRemoved => world.tell(&format!("remove {gpu}")).await,
            LinksDown => {
                for link in 0..LINKS {
                    world.tell(&format!("link {gpu} {link} down")).await;
                }
            }
            XidStorm => {
                let series = format!("linkwise_xid_errors_total{{uuid=\"{}\",xid=\"31\"}}", world.uuid(gpu));
                let before = soak.metric(&series).await.unwrap_or(0);
                world.tell(&format!("storm {gpu} 31 5000")).await;
                soak.wait_metric(&series, |value| value == Some(before + 5000)).await;
            }
            XidUntilRecovery | XidUntilCleared => {
                // A driver reports a recovery action too: without it, the XID's reason could end after a hold time.
                world.tell(&format!("recovery {gpu} 1")).await;
                world.tell(&format!("xid {gpu} 79")).await;
                if alone {
                    // Wait for the XID itself, because the recovery action alone makes the GPU unhealthy too.
                    soak.wait_reason(gpu, "xid").await;
                }
            }
        }
        if alone && self.is_of_a_gpu() {
            world.wait_offered(gpu, false).await;
        }
    }

    /// Ends the fault, unless it ends by itself.
    pub async fn end(self, soak: &mut Soak, gpu: u32) {
        let world = std::sync::Arc::clone(&soak.world);
        let kubelet = &world.node.kubelet;
        match self {
            KubeletGone => soak.start_kubelet(),
            RegisterRefused | RegisterHangs | NoDialBack => kubelet.set_fault(BoxFault::None),
            ProcessStopped => soak.process.signal("CONT"),
            SharingChanges => {
                world.share(true);
                let slots = |healthy: &std::collections::BTreeSet<String>| {
                    u32::try_from(healthy.iter().filter(|id| id.contains("::")).count()) == Ok(SHARES)
                };
                kubelet.wait(|state| slots(&state.resources[GPU].healthy)).await.unwrap();
            }
            ApiServerAway => {
                world.node.cluster.server.come_back().await;
                world.set_server_away(false);
            }
            CallHangs => world.tell(&format!("unhang {gpu} {POLL_CALL}")).await,
            CallHoldsTheLock => world.tell(&format!("unhold {gpu} {POLL_CALL}")).await,
            CallCrashes => world.tell(&format!("uncrash {gpu} {POLL_CALL}")).await,
            InitFails => world.tell("init 0").await,
            DriverReleased => world.admin(&["resume"]).await,
            GpuLost => {
                if gpu == MIG {
                    world.tell(&format!("mig {MIG} {}", soak.layout)).await;
                    world.disrupt(|disruptions| disruptions.mig_losses += 1);
                }
                world.tell(&format!("back {gpu}")).await;
            }
            GpuRemoved => world.tell(&format!("add {gpu}")).await,
            LinksDown => {
                for link in 0..LINKS {
                    world.tell(&format!("link {gpu} {link} up")).await;
                }
            }
            XidUntilRecovery => world.tell(&format!("recovery {gpu} 0")).await,
            XidUntilCleared => {
                // `clear` covers known reasons only: a recovery action that is noticed later would be a new reason.
                soak.wait_reason(gpu, "recovery_action").await;
                world.admin(&["clear", &world.uuid(gpu)]).await;
                // The operator's order brings the GPU back although the driver still reports the recovery action.
                world.wait_offered(gpu, true).await;
                world.tell(&format!("recovery {gpu} 0")).await;
            }
            _ => {}
        }
    }
}

impl Soak {
    /// Runs one fault, or two that overlap, from the beginning to the node's recovery.
    pub async fn round(&mut self, faults: &[Fault]) {
        let world = std::sync::Arc::clone(&self.world);
        let alone = faults.len() == 1;
        // The GPU in MIG mode has no links, and claims have parts of it, so that GpuLost is its only fault.
        let gpu =
            if faults.contains(&GpuLost) { self.random.within(0..GPUS) } else { self.random.within(MIG + 1..GPUS) };
        world.journal.note(&format!("{faults:?} (GPU {gpu})"));
        let failing_calls = faults.iter().map(|fault| fault.failing_calls()).max().unwrap_or(FailingCalls::Nothing);
        if failing_calls >= FailingCalls::Claims {
            world.journal.claims.begin();
        }
        if failing_calls == FailingCalls::All {
            world.journal.pods.begin();
        }
        // Other GPUs must stay offered. A round after two faults is not watched: they may be noticed a round late.
        let is_watched = alone && !self.had_two_faults && faults[0].is_of_a_gpu();
        self.had_two_faults = !alone;
        let watch = is_watched.then(|| self.watch([Some(gpu), self.last_gpu]));
        self.last_gpu = Some(gpu);
        for fault in faults {
            fault.begin(self, gpu, alone).await;
        }
        tokio::time::sleep(self.random.milliseconds(0..1_000)).await;
        // End the last fault first, because a stopped process takes no orders.
        for fault in faults.iter().rev() {
            fault.end(self, gpu).await;
        }
        let recovered = self.wait_whole().await;
        drop(watch);
        for fault in faults {
            let name = format!("{}{fault:?}", if alone { "" } else { "one of two: " });
            world.journal.count(&name);
            world.journal.took(&name, recovered);
        }
        world.journal.claims.end();
        world.journal.pods.end();
        for violation in world.node.kubelet.violations() {
            world.journal.error(format!("{violation:?}"));
        }
    }
}
