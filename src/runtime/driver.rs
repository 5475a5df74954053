//! Keeps the NVML child alive and turns what it says into events.
//!
//! One child works at a time. A second one is started beside it where a new one is needed though the first still works (a GPU
//! has come, the library's file is another one, a GPU that was left out is to be tried), and takes over once it has seen the
//! GPUs: no event falls between the two, and a second one that dies costs nothing.

mod away;
mod dying;
mod facts;
mod known;
mod look;
pub(super) mod metrics;
mod outside;
mod shift;
mod suspects;

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::idle::{self, Idle};
use super::operator::{Holding, Release};
use crate::hwloc;
use crate::nvml::child::{Agent, AgentCommand, AgentEnded};
use crate::nvml::protocol::{Called, FromAgent, Place, ToAgent};
use crate::state::{Event, HealthPoll, MigInstance};
use crate::topology::{GpuObservation, GpuUuid, NodeObservation, PciAddress, ProbeFailure};
use away::{Away, Working};
use dying::Dying;
use known::Known;
use metrics::DriverMetrics;
use outside::Outside;
pub(super) use outside::identity;
use shift::{Errand, Shift, Successor, Who, at, end};
use suspects::Verdict;

/// The longest pause before a child is started again, as a multiple of the first; doubling from the one to the other.
const LONGEST: u32 = 60;

/// What NVML's answer comes to where it works and there is no GPU.
const NO_GPUS: &str = "NVML lists no GPU on this node";

/// How long a round waits for files; what they would have said counts at a later one.
const FILES: Duration = Duration::from_millis(500);

/// How long a child that was told to end is listened to: what it had said lies in its socket.
const HEARING_OUT: Duration = Duration::from_secs(1);

/// Signals that are not the library's doing: an operator's, or the kernel's for want of memory. SIGHUP, SIGINT, SIGKILL,
/// SIGTERM (signal(7)).
const FROM_OUTSIDE: [i32; 4] = [1, 2, 9, 15];

/// How the driver is lived with; see `config::NvmlArgs`.
pub(super) struct Settings {
    /// Whether GPUs are not given out while NVML is away.
    pub unhealthy_when_away: bool,
    /// The pause before a second child.
    pub pause: Duration,
    /// How long NVML may be away.
    pub grace: Duration,
    /// When a GPU that was left out is tried first.
    pub trial: Duration,
    /// How often the PCI bus is looked at on a node without GPUs.
    pub bus_look: Duration,
}

/// The driver's side of the node.
pub(super) struct Driver {
    pub command: AgentCommand,
    pub settings: Settings,
    pub sysfs: PathBuf,
    pub fail_on_init_error: Option<bool>,
    pub events: mpsc::Sender<Event>,
    /// The node as it was told last, for whoever needs more than the graph.
    pub seen: watch::Sender<Arc<NodeObservation>>,
    pub metrics: Arc<DriverMetrics>,
    /// Why there is nothing to offer, for /readyz.
    pub idle: watch::Sender<Idle>,
    /// Whether an operator wants the driver for something else.
    pub release: Release,
}

/// How far a child had got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reached {
    /// Not so far that NVML was initialised, or NVML has no GPU.
    Nothing,
    /// NVML was initialised: what ended it was a call after that, and may be one GPU's doing.
    Nvml,
    /// It saw the GPUs.
    Gpus,
}

/// How a child's time ended.
enum End {
    /// It died, or was killed.
    Died { reached: Reached, why: String },
    /// It was ended: its driver is no more, or is wanted by somebody else. A new one follows at once, or once that is over.
    Ended(String),
}

impl Driver {
    /// Lives until `shutdown`; fails where NVML cannot be initialised and that is not to be lived with.
    pub async fn run(self, shutdown: CancellationToken) -> Result<()> {
        let (working, follow) = watch::channel(Working::Never);
        let away = Away {
            working: follow,
            grace: self.settings.grace,
            unhealthy: self.settings.unhealthy_when_away,
            events: self.events.clone(),
            metrics: Arc::clone(&self.metrics),
        };
        let dying = Dying::new(self.release.clone(), Arc::clone(&self.metrics));
        let known = Known::new(self.settings.trial, working, dying);
        let life = async {
            tokio::select! {
                ended = self.live(known) => ended,
                ended = away.run() => ended,
            }
        };
        shutdown.run_until_cancelled(life).await.unwrap_or(Ok(()))
    }

    async fn live(&self, mut known: Known) -> Result<()> {
        let mut pause = Duration::ZERO;
        let mut opened = false;
        let mut told = None;
        loop {
            let holding = self.may_start(&mut known).await;
            let began = Instant::now();
            let end = self.one_child(&mut known).await?;
            drop(holding);
            self.metrics.agent_up(false);
            if known.untold.is_some() {
                let host = known.host().await;
                self.observed(host, &mut known).await?;
            }
            let (reached, why) = match end {
                End::Died { reached, why } => (reached, why),
                End::Ended(why) => {
                    known.away(why);
                    // The pauses were another matter's.
                    pause = Duration::ZERO;
                    continue;
                }
            };
            pause = self.next_pause(pause, began.elapsed());
            opened |= reached != Reached::Nothing;
            if known.worked() {
                known.away(why.clone());
            } else if opened && why != NO_GPUS {
                // This container can open the driver: what is in its way is for `suspects` to find, and another container would
                // fare no better.
                let reason = format!("NVML is initialised, and no process has got to see the GPUs: {why}");
                self.idle.send_replace(Idle::Waiting(reason));
            } else if self.live_without(&why, &mut known).await? {
                // A GPU has come: the pauses were another matter's.
                pause = Duration::ZERO;
                continue;
            }
            // Where there is no driver this goes on for ever: one line for a cause, the metric counts the starts.
            if reached == Reached::Gpus || told.as_ref() != Some(&why) {
                tracing::warn!(cause = why, again_in = ?pause, "NVML is not to be had");
            } else {
                tracing::debug!(cause = why, again_in = ?pause, "NVML is not to be had, as before");
            }
            told = Some(why);
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.release.wished() => pause = Duration::ZERO,
            }
        }
    }

    /// Waits until a child may be started: from now on the driver is held.
    async fn may_start(&self, known: &mut Known) -> Holding {
        loop {
            self.release.over().await;
            known.dying.room().await;
            let holding = self.release.holding();
            // An order may have come meanwhile, and may have been answered already.
            if !self.release.is_wished() {
                return holding;
            }
        }
    }

    fn spawn(&self, known: &Known, trial: Option<Place>) -> Result<(Agent, Vec<Place>), String> {
        self.metrics.agent_started();
        let skipped = known.suspects.skip(trial);
        let command = AgentCommand { skip: skipped.clone(), ..self.command.clone() };
        match Agent::spawn(&command) {
            Ok(agent) => Ok((agent, skipped)),
            // No process or no memory to be had is a matter of time.
            Err(error) => Err(format!("{:#}", anyhow::Error::from(error))),
        }
    }

    /// One child from its start to its end, and those that follow it without a gap.
    async fn one_child(&self, known: &mut Known) -> Result<End> {
        let outside = self.outside(None, known).await;
        let mut shift = match self.spawn(known, None) {
            Ok((agent, skipped)) => Shift::new(agent, skipped, outside),
            Err(why) => return Ok(End::Died { reached: Reached::Nothing, why }),
        };
        let mut leaving = None;
        loop {
            let due = shift.due(&known.suspects).filter(|_| known.dying.leave_room());
            let (who, said) = tokio::select! {
                said = shift.next() => said,
                host = known.host() => {
                    self.observed(host, known).await?;
                    continue;
                }
                errand = at(due) => {
                    self.begin(&mut shift, errand, known).await;
                    continue;
                }
                () = self.release.wished() => {
                    self.metrics.agent_ended("released");
                    shift.end(&mut known.dying).await;
                    return Ok(End::Ended("an operator asked to let go of the driver".to_owned()));
                }
            };
            let message = match (who, said) {
                (Who::First, Ok(message)) => message,
                (Who::First, Err(ended)) => {
                    let trial = matches!(&shift.successor, Some(Successor { errand: Errand::Trial(_), .. }));
                    let why = self.ended(&ended, &shift.agent, known, !trial);
                    let reached = match &leaving {
                        _ if shift.ready => Reached::Gpus,
                        None if shift.agent.has_initialised() => Reached::Nvml,
                        _ => Reached::Nothing,
                    };
                    shift.kill(&mut known.dying);
                    // What the child said before it ended explains more than its exit code.
                    return Ok(End::Died { reached, why: leaving.unwrap_or(why) });
                }
                (Who::Second, said) => match self.second(&mut shift, said, known).await? {
                    Some(ready) => ready,
                    None => continue,
                },
            };
            self.introduce(&message, known).await?;
            match message {
                // Nothing to look after, and a child would look at it for ever.
                FromAgent::Ready { gpus, .. }
                    if known.told.is_none()
                        && gpus.is_empty()
                        && shift.skipped.is_empty()
                        && self.on_bus(known).await.is_some_and(|gpus| gpus.is_empty()) =>
                {
                    self.metrics.agent_ended("replaced");
                    shift.end(&mut known.dying).await;
                    return Ok(End::Died { reached: Reached::Nothing, why: NO_GPUS.to_owned() });
                }
                FromAgent::Ready { driver, nvml, count, gpus, failures } => {
                    if !shift.ready {
                        shift.at_start = gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
                        let Some(verdict) = known.suspects.lives(&shift.skipped, gpus.len(), count) else {
                            self.metrics.agent_ended("replaced");
                            shift.end(&mut known.dying).await;
                            let why = "children die whichever GPU they leave out".to_owned();
                            return Ok(End::Died { reached: Reached::Nvml, why });
                        };
                        shift.ready = true;
                        // Another child may be another driver's: that it was looked at is news, whatever it saw.
                        known.told = None;
                        self.metrics.agent_up(true);
                        known.working.send_replace(Working::Yes);
                        tracing::info!(
                            gpus = gpus.len(),
                            driver = driver.as_deref().unwrap_or("unknown"),
                            nvml = nvml.as_deref().unwrap_or("unknown"),
                            "NVML answers"
                        );
                        self.tell_of(verdict, known).await?;
                    }
                    if let Some(new) = gpus.iter().find(|gpu| !shift.at_start.contains(&gpu.uuid)) {
                        shift.renew(format!("GPU {} has come, and its events are to be heard", new.uuid));
                    }
                    if gpus.is_empty() {
                        self.idle.send_replace(Idle::Waiting(NO_GPUS.to_owned()));
                    }
                    known.look(count, gpus, failures);
                    self.look_at_host(known).await?;
                }
                FromAgent::Polled { mut gpus, missing, unheard, .. } => {
                    self.metrics.unheard_gpus(unheard);
                    gpus.extend(known.unpolled(&gpus, &missing, &shift.skipped));
                    if let Some(outdated) = self.polled(gpus, &mut shift, known).await? {
                        self.metrics.agent_ended("replaced");
                        shift.end(&mut known.dying).await;
                        tracing::warn!(cause = outdated, "a new NVML agent is started");
                        return Ok(End::Ended(outdated));
                    }
                }
                event @ (FromAgent::Xid { .. } | FromAgent::DoubleBitEcc { .. }) => self.happened(event).await?,
                FromAgent::Leaving { call, error } => leaving = Some(format!("{call}: {error}")),
                FromAgent::Failed { call, error } => {
                    self.metrics.event_failed();
                    tracing::warn!(call, error, "NVML failed");
                }
                // The agent keeps these to itself.
                FromAgent::Calling(_) => {}
            }
        }
    }

    /// Starts a second child.
    async fn begin(&self, shift: &mut Shift, errand: Errand, known: &mut Known) {
        let trial = match &errand {
            Errand::Trial(place) => Some(*place),
            Errand::Renewal(_) => None,
        };
        tracing::info!(?errand, "a second NVML agent is started; the first one works on");
        let outside = self.outside(None, known).await;
        match self.spawn(known, trial) {
            Ok((agent, skipped)) => {
                shift.successor = Some(Successor { agent, skipped, errand, outside, failed: None });
            }
            Err(why) => self.in_vain(shift, errand, why, known),
        }
    }

    /// What a second child says: its first look, with which it takes over, is passed on.
    async fn second(
        &self,
        shift: &mut Shift,
        said: Result<FromAgent, AgentEnded>,
        known: &mut Known,
    ) -> Result<Option<FromAgent>> {
        let Some(mut successor) = shift.successor.take() else { return Ok(None) };
        match said {
            // One that cannot even count the GPUs sees less than the one that works.
            Ok(FromAgent::Ready { count: None, .. }) => {
                self.metrics.agent_ended("replaced");
                end(successor.agent, &mut known.dying).await;
                self.in_vain(shift, successor.errand, "it cannot count the GPUs".to_owned(), known);
            }
            Ok(ready @ FromAgent::Ready { .. }) => {
                let next = Shift::new(successor.agent, successor.skipped, successor.outside);
                let mut old = std::mem::replace(shift, next);
                self.metrics.agent_ended("replaced");
                self.hear_out(&mut old.agent).await?;
                end(old.agent, &mut known.dying).await;
                return Ok(Some(ready));
            }
            Ok(message) => {
                if let FromAgent::Leaving { call, error } = message {
                    successor.failed = Some(format!("{call}: {error}"));
                }
                shift.successor = Some(successor);
            }
            Err(ended) => {
                let why = self.ended(&ended, &successor.agent, known, true);
                known.dying.take(successor.agent);
                self.in_vain(shift, successor.errand, successor.failed.unwrap_or(why), known);
            }
        }
        Ok(None)
    }

    /// What a child that is followed by another had said, and nobody had heard: events from before the other one listened.
    async fn hear_out(&self, agent: &mut Agent) -> Result<()> {
        if agent.dismiss().await.is_err() {
            return Ok(());
        }
        let hear = async {
            while let Ok(message) = agent.next().await {
                self.happened(message).await?;
            }
            Ok(())
        };
        tokio::time::timeout(HEARING_OUT, hear).await.unwrap_or(Ok(()))
    }

    /// An event that the driver reported; anything else is none.
    async fn happened(&self, message: FromAgent) -> Result<()> {
        match message {
            FromAgent::Xid { gpu, code, gpu_instance, compute_instance } => {
                self.metrics.xid(&gpu, code);
                let instance = gpu_instance.map(|gpu_instance| MigInstance { gpu_instance, compute_instance });
                self.tell(Event::Xid { gpu, code, instance }).await
            }
            FromAgent::DoubleBitEcc { gpu } => self.tell(Event::DoubleBitEcc { gpu }).await,
            _ => Ok(()),
        }
    }

    /// A second child came to nothing: again, later.
    fn in_vain(&self, shift: &mut Shift, errand: Errand, why: String, known: &mut Known) {
        let now = Instant::now();
        let again_in = match &errand {
            Errand::Trial(place) => known.suspects.put_off(*place, now),
            Errand::Renewal(wish) => {
                shift.pause = self.next_pause(shift.pause, Duration::ZERO);
                shift.renewal = Some((now + shift.pause, wish.clone()));
                shift.pause
            }
        };
        tracing::warn!(
            ?errand,
            cause = why,
            ?again_in,
            "the second NVML agent came to nothing; the first one works on"
        );
    }

    /// How a child ended, in words; counts it, and lays it to the GPU whose call it was.
    fn ended(&self, ended: &AgentEnded, agent: &Agent, known: &mut Known, may_blame: bool) -> String {
        let (cause, during) = cause(ended, agent.open());
        self.metrics.agent_ended(cause);
        let source = std::error::Error::source(ended).map(|source| format!(": {source}")).unwrap_or_default();
        let call = during.filter(|_| cause == "crashed").map(|called| format!(", in {called}")).unwrap_or_default();
        let why = format!("{ended}{source}{call}");
        if let Some(Called { gpu: Some(gpu), .. }) = during.filter(|_| may_blame) {
            known.suspects.blame(gpu, why.clone(), Instant::now());
        }
        why
    }

    /// Who is left out from now on, and who no longer.
    async fn tell_of(&self, verdict: Verdict, known: &Known) -> Result<()> {
        let words = |place| {
            let uuid = known.name(place).or_else(|| known.suspects.name(place).cloned());
            uuid.map(|uuid| uuid.to_string()).unwrap_or_default()
        };
        for (place, why) in verdict.left_out {
            let (gpu, named) = (known.name(place), words(place));
            tracing::error!(
                gpu = named,
                index = place.index,
                cause = why,
                "the GPU ends whoever looks at it: left out"
            );
            // One that was never seen whole was never offered.
            if let Some(gpu) = gpu {
                self.tell(Event::LeftOut { gpu, why }).await?;
            }
        }
        for place in verdict.taken_back_in {
            let (gpu, named) = (known.name(place), words(place));
            tracing::warn!(gpu = named, index = place.index, "the GPU can be looked at again: taken back in");
            if let Some(gpu) = gpu {
                self.tell(Event::TakenBackIn { gpu }).await?;
            }
        }
        Ok(())
    }

    /// Which boot and which load of the driver this is; where that does not come in time, with a later round.
    async fn identify(&self, known: &mut Known) -> Result<()> {
        // What was asked before may be of another driver.
        drop(known.identities.late().await);
        known.identified = false;
        if known.identities.runs() {
            return Ok(());
        }
        let sysfs = self.sysfs.clone();
        let identity = known.identities.within(FILES, move || outside::identity(&sysfs)).await;
        let Some(identity) = identity else { return Ok(()) };
        known.identified = true;
        self.tell(Event::Identified(identity)).await
    }

    /// A round's answers, with what is seen from outside; why the child is of no more use, if it is.
    async fn polled(
        &self,
        mut polls: BTreeMap<GpuUuid, HealthPoll>,
        shift: &mut Shift,
        known: &mut Known,
    ) -> Result<Option<String>> {
        if known.again.is_due() {
            // One that cannot be asked has ended, and says so by itself.
            let _ = shift.agent.request(ToAgent::Observe).await;
        }
        if !known.identified {
            self.identify(known).await?;
        }
        let outside = self.outside(shift.agent.id(), known).await;
        if let Some(bus) = outside.as_ref().and_then(|outside| outside.bus.as_ref()) {
            known.once_on_bus.extend(bus);
            for (gpu, poll) in &mut polls {
                // A GPU that never was on it is none that fell off: under WSL, or with a /sys that is not the host's, the bus
                // shows no GPU, and all of them are well.
                let pci = known.pci(gpu).filter(|pci| known.once_on_bus.contains(pci));
                poll.on_bus = pci.map(|pci| bus.contains(&pci));
            }
        }
        self.tell(Event::Polled(polls)).await?;
        let Some(now) = outside else { return Ok(None) };
        let Some(before) = shift.outside.replace(now.clone()) else { return Ok(None) };
        if before.driver != now.driver {
            let name = |driver: &Option<(String, u64)>| {
                driver.as_ref().map_or_else(|| "none".to_owned(), |(version, load)| format!("{version} (load {load})"))
            };
            return Ok(Some(format!("the driver was {}, and is {}", name(&before.driver), name(&now.driver))));
        }
        if now.has_other_library(&before) {
            shift.renew("the file of NVML's library is another one".to_owned());
        }
        if before.bus != now.bus {
            shift.renew("the PCI bus has other GPUs than before".to_owned());
        }
        Ok(None)
    }

    async fn outside(&self, child: Option<u32>, known: &mut Known) -> Option<Outside> {
        let (sysfs, library) = (self.sysfs.clone(), self.command.library.clone());
        let mut bus = std::mem::take(&mut known.bus);
        let last = known.library.clone();
        let look = move || (outside::look(&mut bus, &sysfs, child, library.as_deref(), last), bus);
        let (outside, bus) = known.outsides.within(FILES, look).await?;
        known.bus = bus;
        known.library = outside.library.as_ref().map(|library| library.path.clone());
        Some(outside)
    }

    async fn tell(&self, event: Event) -> Result<()> {
        self.events.send(event).await.context("nobody takes events any more")
    }

    /// The pause after a child that lived so long. Doubling, also where each child sees the GPUs and dies soon after; one
    /// that lasted died of something new.
    fn next_pause(&self, last: Duration, lived: Duration) -> Duration {
        next_pause(self.settings.pause, last, lived)
    }

    /// The NVIDIA GPUs on the PCI bus; `None` while a file there does not answer.
    async fn on_bus(&self, known: &mut Known) -> Option<Vec<PciAddress>> {
        let sysfs = self.sysfs.clone();
        known.buses.within(FILES, move || hwloc::nvidia_gpus_on_bus(&sysfs)).await
    }

    /// Whether to live without NVML, which never answered: by the option, else by what is on the PCI bus. `true` once a
    /// node without GPUs has got one.
    async fn live_without(&self, why: &str, known: &mut Known) -> Result<bool> {
        let Some(gpus) = self.on_bus(known).await else {
            if self.fail_on_init_error == Some(true) {
                bail!("NVML cannot be initialised: {why}");
            }
            // Whether there is a GPU is not known, and neither ends a node nor lets it rest.
            let reason = format!("NVML cannot be initialised, and the PCI bus does not answer: {why}");
            self.idle.send_replace(Idle::Waiting(reason));
            return Ok(false);
        };
        match (self.fail_on_init_error, gpus.first()) {
            (_, None) if why == NO_GPUS => {}
            (Some(true), _) => bail!("NVML cannot be initialised: {why}"),
            // Libraries and device nodes are given at a container's creation: it has to be made anew.
            (None, Some(first)) => {
                bail!(
                    "{} NVIDIA GPU(s) on the PCI bus ({first} ...), but NVML cannot be initialised: {why}",
                    gpus.len()
                )
            }
            (Some(false), Some(_)) => {
                self.idle.send_replace(Idle::Waiting(format!("NVML cannot be initialised: {why}")));
                return Ok(false);
            }
            (None | Some(false), None) => {}
        }
        let reason = format!("no NVIDIA GPU on the PCI bus, and none by NVML: {why}");
        tracing::info!(reason, "this node has no NVIDIA GPU: idle until one is on its PCI bus");
        self.idle.send_replace(Idle::NoGpu(reason));
        self.metrics.idle(true);
        let first = idle::gpu_appears(&self.sysfs, self.settings.bus_look).await?;
        self.metrics.idle(false);
        self.idle.send_replace(Idle::Waiting(format!("GPU {first} has come, and was not looked at yet")));
        tracing::info!(gpu = %first, "an NVIDIA GPU is on the PCI bus now");
        Ok(true)
    }
}

/// The cause of a child's end, in the metric's word, and the call that it is laid to. `open` is the one it was last heard to make.
fn cause<'a>(ended: &'a AgentEnded, open: Option<&'a Called>) -> (&'static str, Option<&'a Called>) {
    match ended {
        AgentEnded::Hung { called, .. } => ("hung", Some(called)),
        AgentEnded::Deaf(_) => ("hung", None),
        AgentEnded::Exited(status) if status.signal().is_some_and(|signal| !FROM_OUTSIDE.contains(&signal)) => {
            ("crashed", open)
        }
        AgentEnded::Late(_) | AgentEnded::Stopped(_) | AgentEnded::Silent => ("silent", None),
        AgentEnded::Exited(_) | AgentEnded::Protocol(_) | AgentEnded::Io(_) => ("exited", None),
    }
}

/// The pause after a child that lived so long, from the `first` to its multiple.
fn next_pause(first: Duration, last: Duration, lived: Duration) -> Duration {
    let longest = first * LONGEST;
    if lived >= longest { first } else { (last * 2).clamp(first, longest) }
}

/// One look at the GPUs through a child that then ends.
pub async fn look(command: &AgentCommand) -> Result<(Vec<GpuObservation>, Vec<ProbeFailure>)> {
    let mut agent = Agent::spawn(command)?;
    let mut failed = None;
    loop {
        match agent.next().await {
            Ok(FromAgent::Ready { gpus, failures, .. }) => {
                agent.end().await.context("cannot end the NVML agent")?;
                return Ok((gpus, failures));
            }
            Ok(FromAgent::Leaving { call, error }) => failed = Some(format!("{call}: {error}")),
            Ok(_) => {}
            Err(ended) => match failed {
                Some(failed) => bail!("{failed}"),
                None => return Err(ended.into()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_hang_and_a_crash_of_the_librarys_own_are_laid_to_a_call() {
        let open = Called { call: "nvmlDeviceGetName".to_owned(), gpu: None };
        let of = |ended: AgentEnded| {
            let (cause, during) = cause(&ended, Some(&open));
            (cause, during.map(|called| called.call.clone()))
        };
        let exited = |wait_status| of(AgentEnded::Exited(std::process::ExitStatus::from_raw(wait_status)));
        // SIGABRT, SIGSEGV, SIGBUS; then signals that others send, and exit codes (wait(2)).
        for signal in [6, 11, 7] {
            assert_eq!(exited(signal), ("crashed", Some("nvmlDeviceGetName".to_owned())), "signal {signal}");
        }
        for outside in [1, 2, 9, 15, 0, 1 << 8] {
            assert_eq!(exited(outside), ("exited", None), "{outside}");
        }
        let (limit, called) = (Duration::ZERO, Called { call: "nvmlInit_v2".to_owned(), gpu: None });
        assert_eq!(of(AgentEnded::Hung { called, limit }), ("hung", Some("nvmlInit_v2".to_owned())));
        assert_eq!(of(AgentEnded::Deaf(limit)), ("hung", None));
        for ended in [AgentEnded::Late(limit), AgentEnded::Stopped(limit), AgentEnded::Silent] {
            assert_eq!(of(ended), ("silent", None));
        }
    }

    #[test]
    fn pauses_double_until_a_child_lasts() {
        let second = Duration::from_secs;
        let mut pause = Duration::ZERO;
        let pauses = [0, 1, 59, 0, 2, 0, 3, 0, 61, 0].map(|lived| {
            pause = next_pause(second(1), pause, second(lived));
            pause.as_secs()
        });
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60, 1, 2]);
    }
}
