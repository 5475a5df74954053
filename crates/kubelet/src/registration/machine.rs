//! The life of a plugin with the kubelet as a state machine: attempts, pauses between them, and the end of a session.
//!
//! Pure: no I/O, no clock, no task. `executor` is its one caller: it feeds inputs and performs actions. A [`Handshake`]
//! turns a bound session into a registration: the device plugin's calls Register, the DRA plugin's waits for the
//! kubelet.

use std::fmt::Debug;
use std::time::Duration;

use linkwise_core::backoff::Backoff;
use linkwise_core::reported::Reported;

/// The time after which a session counts as stable: the next attempt after its end follows at once, and the pauses
/// start from the shortest again.
const STABLE_SESSION: Duration = Duration::from_secs(10);
/// The least time between two binds, however often files change. See [`Handshake::FIRST_RETRY_KEEPS_GAP`].
const MIN_BIND_INTERVAL: Duration = Duration::from_millis(100);

/// The phases of a plugin's life. The constants are the phases that every plugin has. A handshake adds its own, such
/// as those in which a session is open.
pub trait LifePhase: Copy + PartialEq + Debug + Send + Sync + 'static {
    /// There is no kubelet to register with.
    const WAITING_FOR_KUBELET: Self;
    /// The sockets are being bound.
    const BINDING: Self;
    /// The session ended; its connections are closing.
    const ENDING: Self;
    /// A session ended or could not begin; the next attempt follows after a pause.
    const PAUSING: Self;
    /// The registration stands.
    const SERVING: Self;

    /// Returns true while a session is open: the sockets are bound, and the session is not ending.
    fn is_open(self) -> bool;

    /// Returns true if the plugin is ready.
    fn is_ready(self) -> bool;

    /// The phase in words, for /readyz and the log.
    fn words(self) -> &'static str;
}

/// The part of a plugin's life in which the two plugins differ: from bound sockets to a registration that stands.
pub trait Handshake: Debug + Sized + Send + 'static {
    /// The phases of the whole life.
    type Phase: LifePhase;
    /// The identity of a kubelet, as the files show it.
    type Kubelet: Clone + Debug + Send;
    /// The other facts that a check of the files finds.
    type Others: Debug + Send;
    /// The facts that a bind finds.
    type Bound: Debug + Send + 'static;
    /// The handshake's own inputs.
    type Input: Debug + Send;
    /// The handshake's own actions.
    type Action: Clone + Debug + PartialEq + Send;

    /// The cause of a session's end when its sockets are gone.
    const SOCKETS_GONE: &str;
    /// True if the least time between two binds holds for the first retry too, which has no pause.
    const FIRST_RETRY_KEEPS_GAP: bool;

    /// The cause with which a session ends if the files show another kubelet than the one of the current attempt. By
    /// default, files tell no two kubelets apart.
    fn other_kubelet(_: &Result<Self::Kubelet, String>, _attempted: Option<&Self::Kubelet>) -> Option<&'static str> {
        None
    }

    /// Takes the other facts of a check into account, before the check ends a session or begins an attempt.
    fn checked(&mut self, _: &mut Attempts<Self>, _: Self::Others, _now: Duration) {}

    /// Enters the first phase of a session, whose sockets are bound and served.
    fn bound(&mut self, attempts: &mut Attempts<Self>, bound: Self::Bound, now: Duration);

    /// Takes the kubelet's answer to a registration, or the cause of a failed one. Called while a session is open.
    fn registered(&mut self, attempts: &mut Attempts<Self>, result: Result<(), String>, now: Duration);

    /// Takes one of the handshake's own inputs, in any phase.
    fn happened(&mut self, attempts: &mut Attempts<Self>, input: Self::Input, now: Duration);

    /// Acts on a timer that has expired. Called while a session is open.
    fn due(&mut self, attempts: &mut Attempts<Self>, now: Duration);

    /// The time of the handshake's own timer, in addition to the phase's deadline. Called while a session is open.
    fn wake(&self) -> Option<Duration> {
        None
    }
}

/// An input of a plugin's state machine.
#[derive(Debug)]
pub enum Input<H: Handshake> {
    /// The files were checked.
    Checked {
        /// The kubelet, or why there is none.
        kubelet: Result<H::Kubelet, String>,
        /// True if the plugin's own sockets are in place.
        has_sockets: bool,
        /// The handshake's other facts.
        others: H::Others,
    },
    /// The sockets are bound and served, or why not.
    Bound(Result<H::Bound, String>),
    /// The kubelet registered the plugin, or why not.
    Registered(Result<(), String>),
    /// An input of the handshake.
    Own(H::Input),
    /// A server ended by itself.
    ServerEnded(String),
    /// The servers have ended, and no connection to them is open.
    Closed,
    /// The moment of [`RegistrationMachine::wake`] has come.
    Tick,
    /// The plugin is asked to end.
    Shutdown,
}

/// An order to the executor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action<A> {
    /// Remove dead predecessors' sockets, bind the plugin's own and serve them.
    Bind,
    /// Cancel every call to the kubelet and any bind, remove the sockets, end their streams.
    End,
    /// Cut the connections that have not closed by themselves.
    Cut,
    /// An action of the handshake.
    Own(A),
    /// Report why the plugin is not registered.
    ReportWaiting(String),
    /// Report that a registration succeeded, or why it failed.
    ReportRegistered(Result<(), String>),
    /// Report why a session ended or did not begin; another attempt follows.
    ReportEnded(String),
}

/// The actions of a handshake's state machine.
pub type ActionOf<H> = Action<<H as Handshake>::Action>;

/// The deadlines of every plugin.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The time between the end of a session and the cut of its connections.
    pub close: Duration,
    /// The longest pause between attempts.
    pub longest_pause: Duration,
}

/// The attempts to register, and the session of the last one.
#[derive(Debug)]
pub struct Attempts<H: Handshake> {
    limits: Limits,
    phase: H::Phase,
    /// True once the plugin has ended; its last phase is `ENDING`.
    is_over: bool,
    /// The phase's deadline.
    pub until: Option<Duration>,
    /// The kubelet at the last check, or why there is none.
    kubelet: Result<H::Kubelet, String>,
    /// The kubelet of the current attempt.
    attempted: Option<H::Kubelet>,
    /// The time at which the last session began, or its bind failed.
    session_began: Duration,
    /// True until a session ends soon or cannot begin: the next attempt follows at once, later ones after pauses.
    retry_at_once: bool,
    pauses: Backoff,
    /// The state of the generator of random numbers.
    random: u64,
    /// The time of the last [`Action::Bind`].
    last_bind: Option<Duration>,
    /// True once the plugin was asked to end.
    is_leaving: bool,
    /// The cause of waiting that was reported last.
    waits: Reported<String>,
    /// The actions of the present step, in order.
    actions: Vec<ActionOf<H>>,
}

impl<H: Handshake> Attempts<H> {
    fn new(limits: Limits, phase: H::Phase, seed: u64) -> Self {
        Self {
            limits,
            phase,
            is_over: false,
            until: None,
            kubelet: Err("the folder has not been checked yet".to_owned()),
            attempted: None,
            session_began: Duration::ZERO,
            retry_at_once: true,
            // Six doublings lead from the first pause to the longest.
            pauses: Backoff::new(limits.longest_pause / 64, limits.longest_pause),
            random: seed,
            last_bind: None,
            is_leaving: false,
            waits: Reported::new(),
            actions: Vec::new(),
        }
    }

    /// The current phase.
    pub fn phase(&self) -> H::Phase {
        self.phase
    }

    /// Appends an action to those of the current step.
    pub fn act(&mut self, action: ActionOf<H>) {
        self.actions.push(action);
    }

    /// Enters a phase with its deadline.
    pub fn enter(&mut self, phase: H::Phase, until: Option<Duration>) {
        (self.phase, self.until) = (phase, until);
    }

    /// Returns true if the phase's deadline has come.
    pub fn is_due(&self, now: Duration) -> bool {
        self.until.is_some_and(|until| now >= until)
    }

    /// The result of [`Handshake::other_kubelet`] for the last check and the current attempt.
    pub fn other_kubelet(&self) -> Option<&'static str> {
        H::other_kubelet(&self.kubelet, self.attempted.as_ref())
    }

    /// Begins the next attempt, at once or [`MIN_BIND_INTERVAL`] after the last bind; without a kubelet, waits for one.
    pub fn attempt_or_wait(&mut self, now: Duration) {
        self.attempt(true, now);
    }

    fn attempt(&mut self, keeps_gap: bool, now: Duration) {
        self.attempted = match self.kubelet.clone() {
            Ok(kubelet) => Some(kubelet),
            Err(why) => {
                self.enter(H::Phase::WAITING_FOR_KUBELET, None);
                return self.report_waiting(why);
            }
        };
        let gap_ends = self.last_bind.map(|bound| bound + MIN_BIND_INTERVAL).filter(|end| keeps_gap && now < *end);
        if gap_ends.is_some() {
            return self.enter(H::Phase::PAUSING, gap_ends);
        }
        self.last_bind = Some(now);
        self.enter(H::Phase::BINDING, None);
        self.act(Action::Bind);
    }

    /// Reports why the plugin is not registered, unless the last report gave the same cause.
    pub fn report_waiting(&mut self, why: String) {
        self.actions.extend(self.waits.replace([why]).into_iter().map(Action::ReportWaiting));
    }

    /// Forgets what [`Self::report_waiting`] has reported.
    pub fn forget_waiting(&mut self) {
        self.waits.clear();
    }

    /// Forgets the failures: the next retry has no pause, and the pauses start from the shortest again.
    pub fn forget_failures(&mut self) {
        self.retry_at_once = true;
        self.pauses.reset();
    }

    /// Ends the open session, if there is one, and reports why. The next attempt waits until the session's
    /// connections are closed.
    pub fn end_if_open(&mut self, cause: impl Into<String>, now: Duration) {
        if self.phase.is_open() {
            self.act(Action::ReportEnded(cause.into()));
            self.end(now);
        }
    }

    /// Ends the open session without a report.
    pub fn end(&mut self, now: Duration) {
        self.enter(H::Phase::ENDING, Some(now + self.limits.close));
        self.act(Action::End);
    }

    fn checked(&mut self, has_sockets: bool, now: Duration) {
        if self.phase == H::Phase::WAITING_FOR_KUBELET {
            return self.attempt_or_wait(now);
        }
        match self.other_kubelet() {
            // A kubelet that has ended leaves its socket behind, so attempts fail and the pauses grow. For the new
            // kubelet they start from the shortest again.
            Some(_) if self.phase == H::Phase::PAUSING => {
                self.forget_failures();
                self.attempt_or_wait(now);
            }
            Some(cause) => self.end_if_open(cause, now),
            None if has_sockets => {}
            None => self.end_if_open(H::SOCKETS_GONE, now),
        }
    }

    fn closed(&mut self, now: Duration) {
        if self.phase != H::Phase::ENDING {
            return;
        }
        if self.is_leaving {
            (self.is_over, self.until) = (true, None);
        } else {
            self.pause(now);
        }
    }

    /// Begins the next attempt after a session, or the pause before it. The pause lasts `full * (1 - n / 1024)` for a
    /// random `n` below 512, so that the nodes of a cluster do not retry in step.
    fn pause(&mut self, now: Duration) {
        if self.other_kubelet().is_some() || now.saturating_sub(self.session_began) >= STABLE_SESSION {
            self.forget_failures();
            return self.attempt_or_wait(now);
        }
        if std::mem::take(&mut self.retry_at_once) {
            return self.attempt(H::FIRST_RETRY_KEEPS_GAP, now);
        }
        let full = self.pauses.failed();
        let part = self.random_below_512();
        self.enter(H::Phase::PAUSING, Some(now + full.saturating_sub((full / 1024).saturating_mul(part))));
    }

    /// The next number of a linear congruential generator, with the constants of Knuth's MMIX.
    fn random_below_512(&mut self) -> u32 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        u32::try_from(self.random >> 55).unwrap_or(0)
    }

    fn shutdown(&mut self, now: Duration) {
        self.is_leaving = true;
        if self.phase == H::Phase::ENDING {
            return;
        }
        // Without an open session the plugin is over at once; a bind in progress is cancelled.
        self.is_over = !self.phase.is_open();
        self.enter(H::Phase::ENDING, (!self.is_over).then_some(now + self.limits.close));
        self.act(Action::End);
    }
}

/// The life of one plugin with the kubelet.
#[derive(Debug)]
pub struct RegistrationMachine<H: Handshake> {
    attempts: Attempts<H>,
    handshake: H,
}

impl<H: Handshake> RegistrationMachine<H> {
    /// A state machine that begins in `phase`. The seed determines how much each pause is shortened.
    pub fn new(limits: Limits, phase: H::Phase, handshake: H, seed: u64) -> Self {
        Self { attempts: Attempts::new(limits, phase, seed), handshake }
    }

    /// The phase that /readyz shows.
    pub fn phase(&self) -> H::Phase {
        self.attempts.phase
    }

    /// Returns true once the plugin has ended.
    pub fn is_over(&self) -> bool {
        self.attempts.is_over
    }

    /// The time at which an [`Input::Tick`] is due; `None`: not before another input.
    pub fn wake(&self) -> Option<Duration> {
        let own = self.attempts.phase.is_open().then(|| self.handshake.wake()).flatten();
        self.attempts.until.into_iter().chain(own).min()
    }

    /// Takes an input into account; returns what has to be done, in order. An input that the phase does not expect
    /// changes nothing.
    pub fn step(&mut self, input: Input<H>, now: Duration) -> Vec<ActionOf<H>> {
        let Self { attempts, handshake } = self;
        match input {
            Input::Checked { kubelet, has_sockets, others } => {
                attempts.kubelet = kubelet;
                handshake.checked(attempts, others, now);
                attempts.checked(has_sockets, now);
            }
            Input::Bound(_) if attempts.phase != H::Phase::BINDING => {}
            Input::Bound(result) => {
                attempts.session_began = now;
                match result {
                    Ok(bound) => handshake.bound(attempts, bound, now),
                    Err(why) => {
                        attempts.act(Action::ReportEnded(why));
                        attempts.pause(now);
                    }
                }
            }
            Input::Registered(result) if attempts.phase.is_open() => handshake.registered(attempts, result, now),
            Input::Registered(_) => {}
            Input::Own(input) => handshake.happened(attempts, input, now),
            Input::ServerEnded(why) => attempts.end_if_open(format!("the server ended: {why}"), now),
            Input::Closed => attempts.closed(now),
            Input::Tick => self.tick(now),
            Input::Shutdown => attempts.shutdown(now),
        }
        std::mem::take(&mut self.attempts.actions)
    }

    fn tick(&mut self, now: Duration) {
        if self.wake().is_none_or(|wake| now < wake) {
            return;
        }
        let attempts = &mut self.attempts;
        if attempts.phase.is_open() {
            self.handshake.due(attempts, now);
        } else if attempts.phase == H::Phase::ENDING {
            attempts.until = None;
            attempts.act(Action::Cut);
        } else if attempts.phase == H::Phase::PAUSING {
            attempts.attempt_or_wait(now);
        }
    }
}
