//! The state machine in a simulated world, for the tests of both handshakes: random events, simulated time, and the
//! rules that hold after every input.
//!
//! A world keeps its own records (which socket of ours stands, which connections are open) from the state machine's
//! actions and its own events alone; of the state machine it reads only the phase, the timer and the end. The
//! [`Neighbour`] decides what a kubelet does with the sockets.

use std::fmt::Debug;
use std::time::Duration;

use proptest::prelude::*;

use super::machine::ActionOf;
use super::{Action, Handshake, Input, LifePhase, Limits, RegistrationMachine};

/// The deadlines of every world.
pub const LIMITS: Limits = Limits { close: Duration::from_millis(500), longest_pause: Duration::from_secs(16) };

/// The step of time in a world in which everything works.
const STEP: Duration = Duration::from_millis(10);

/// A phase of a neighbour's plugin.
pub type PhaseOf<N> = <<N as Neighbour>::Handshake as Handshake>::Phase;

/// A kubelet, and what it does with the sockets of a plugin.
pub trait Neighbour: Debug + Default + Sized {
    /// The plugin's handshake.
    type Handshake: Handshake;
    /// The neighbour's own events.
    type Happening: Clone + Debug + 'static;

    /// The phase of a registration that stands.
    const GOAL: PhaseOf<Self>;
    /// The longest time from any state to [`Self::GOAL`], once everything works.
    const RECOVERY: Duration;
    /// The longest time until the state machine's next timer.
    const MAX_WAIT: Duration;

    /// The state machine at its start.
    fn machine(seed: u64) -> RegistrationMachine<Self::Handshake>;
    /// The kubelet with this number as the files show it.
    fn kubelet(number: u64) -> <Self::Handshake as Handshake>::Kubelet;
    /// The other facts of a check.
    fn others(&self) -> <Self::Handshake as Handshake>::Others;
    /// The longest time that an open phase may last.
    fn longest(phase: PhaseOf<Self>) -> Duration;
    /// Begins the records of a new socket, after a bind that succeeded.
    fn bound(&mut self) -> <Self::Handshake as Handshake>::Bound;
    /// Cancels the calls of a session that was asked to end.
    fn ended(&mut self);
    /// Performs an action of the handshake.
    fn perform(world: &mut World<Self>, action: &<Self::Handshake as Handshake>::Action);
    /// Checks the rules beyond those of every plugin.
    fn check(world: &World<Self>);
    /// Takes one of the neighbour's own events.
    fn happens(world: &mut World<Self>, happening: Self::Happening);
    /// Takes a kubelet that started, ended or was replaced, before the files are checked.
    fn kubelet_changed(_: &mut World<Self>) {}
    /// Takes the present time, after time has passed.
    fn passed(_: &mut World<Self>) {}
    /// Answers everything at once and well. If `lost`, fails the current session.
    fn works(world: &mut World<Self>, lost: bool);
    /// Random events of the neighbour.
    fn happening() -> BoxedStrategy<Self::Happening>;
}

/// An event.
#[derive(Clone, Debug)]
pub enum Happening<A> {
    /// So many milliseconds pass.
    Passes(u64),
    KubeletGone,
    KubeletNew,
    KubeletTouched,
    SocketGone,
    BindEnds(bool),
    ServerEnds,
    ConnectionsClose,
    /// The end of a bind that was not begun.
    SpuriousBind,
    /// A timer that is not due.
    SpuriousTick,
    Own(A),
}

/// A plugin's socket, or its sockets.
#[derive(Clone, Copy, Debug)]
pub struct Socket {
    pub number: u64,
    /// Its file is there.
    pub stands: bool,
    /// Its server runs.
    pub served: bool,
    pub ended: bool,
}

/// A state machine, with a simulated kubelet and simulated files.
#[derive(Debug)]
pub struct World<N: Neighbour> {
    pub machine: RegistrationMachine<N::Handshake>,
    pub now: Duration,
    pub kubelet: Option<u64>,
    /// The number of the newest kubelet.
    kubelets: u64,
    /// The socket that is bound, or still has connections.
    pub socket: Option<Socket>,
    pub sockets: u64,
    pub binding: bool,
    pub neighbour: N,
    /// All actions, with their times.
    pub done: Vec<(Duration, ActionOf<N::Handshake>)>,
    /// The phase and the time at which it began.
    phase: (PhaseOf<N>, Duration),
}

impl<N: Neighbour> World<N> {
    pub fn new(seed: u64) -> Self {
        let machine = N::machine(seed);
        let phase = (machine.phase(), Duration::ZERO);
        let mut world = Self {
            machine,
            now: Duration::ZERO,
            kubelet: None,
            kubelets: 0,
            socket: None,
            sockets: 0,
            binding: false,
            neighbour: N::default(),
            done: Vec::new(),
            phase,
        };
        world.check_files();
        world
    }

    /// The world after a story.
    pub fn after(story: Vec<Happening<N::Happening>>, seed: u64) -> Self {
        let mut world = Self::new(seed);
        for happening in story {
            world.happens(happening);
        }
        world
    }

    pub fn phase(&self) -> PhaseOf<N> {
        self.machine.phase()
    }

    pub fn feed(&mut self, input: Input<N::Handshake>) -> Vec<ActionOf<N::Handshake>> {
        let actions = self.machine.step(input, self.now);
        for action in &actions {
            self.done.push((self.now, action.clone()));
            self.perform(action);
        }
        self.check();
        actions
    }

    fn perform(&mut self, action: &ActionOf<N::Handshake>) {
        match action {
            Action::Bind => {
                assert!(self.socket.is_none(), "a new socket while connections to the old one are open");
                assert!(!self.binding, "two binds at once");
                assert!(self.kubelet.is_some(), "binds without a kubelet");
                self.binding = true;
            }
            Action::End => {
                self.binding = false;
                self.neighbour.ended();
                if let Some(socket) = &mut self.socket {
                    (socket.ended, socket.stands) = (true, false);
                }
            }
            Action::Cut => {
                assert!(self.socket.is_some_and(|socket| socket.ended), "cuts what has not ended");
                self.close();
            }
            Action::Own(action) => N::perform(self, action),
            Action::ReportWaiting(_) | Action::ReportRegistered(_) | Action::ReportEnded(_) => {}
        }
    }

    fn check(&mut self) {
        let phase = self.phase();
        if phase != self.phase.0 {
            self.phase = (phase, self.now);
        }
        let longest = if phase.is_open() {
            assert!(self.socket.is_some_and(|socket| !socket.ended), "{phase:?} without a socket");
            N::longest(phase)
        } else if phase == PhaseOf::<N>::ENDING {
            LIMITS.close
        } else if phase == PhaseOf::<N>::PAUSING {
            let until = self.machine.wake().expect("a pause ends");
            assert!(until <= self.now + LIMITS.longest_pause, "a pause beyond the longest");
            LIMITS.longest_pause
        } else {
            Duration::MAX
        };
        assert!(self.machine.is_over() || self.now.saturating_sub(self.phase.1) <= longest, "too long in {phase:?}");
        if let Some(wake) = self.machine.wake() {
            assert!(wake <= self.now + N::MAX_WAIT, "waits for longer than anything may take: {wake:?}");
        }
        N::check(self);
    }

    /// Closes all connections to a socket that has ended; [`Self::feed_closed`] feeds [`Input::Closed`] later.
    fn close(&mut self) {
        self.socket.take_if(|socket| socket.ended);
    }

    pub fn check_files(&mut self) {
        let kubelet = self.kubelet.map(N::kubelet).ok_or_else(|| "there is none".to_owned());
        let has_sockets = self.socket.is_some_and(|socket| socket.stands);
        let others = self.neighbour.others();
        self.feed(Input::Checked { kubelet, has_sockets, others });
    }

    /// Lets the state machine's timer expire.
    pub fn wait(&mut self) -> Vec<ActionOf<N::Handshake>> {
        self.now = self.machine.wake().expect("something is due");
        self.feed(Input::Tick)
    }

    pub fn happens(&mut self, happening: Happening<N::Happening>) {
        match happening {
            Happening::Passes(millis) => {
                let until = self.now + Duration::from_millis(millis);
                // Timers go off when they are due. The bound is for a timer that stays due.
                for _ in 0..1000 {
                    match self.machine.wake().filter(|wake| *wake <= until) {
                        Some(wake) => self.now = self.now.max(wake),
                        None => break,
                    }
                    N::passed(self);
                    if self.machine.wake().is_some_and(|wake| wake <= self.now) {
                        self.feed(Input::Tick);
                    }
                    self.feed_closed();
                }
                self.now = until;
                N::passed(self);
            }
            Happening::KubeletGone => {
                self.kubelet = None;
                N::kubelet_changed(self);
                self.check_files();
            }
            Happening::KubeletNew => {
                self.kubelets += 1;
                self.kubelet = Some(self.kubelets);
                N::kubelet_changed(self);
                self.check_files();
            }
            Happening::KubeletTouched => self.check_files(),
            Happening::SocketGone => {
                if let Some(socket) = &mut self.socket {
                    socket.stands = false;
                }
                self.check_files();
            }
            Happening::BindEnds(ok) => {
                if std::mem::take(&mut self.binding) {
                    let result = if ok {
                        self.sockets += 1;
                        self.socket = Some(Socket { number: self.sockets, stands: true, served: true, ended: false });
                        Ok(self.neighbour.bound())
                    } else {
                        Err("the disk is full".to_owned())
                    };
                    self.feed(Input::Bound(result));
                }
            }
            Happening::ServerEnds => {
                if let Some(socket) = &mut self.socket {
                    socket.served = false;
                    self.feed(Input::ServerEnded("no more".to_owned()));
                }
            }
            Happening::ConnectionsClose => self.close(),
            Happening::SpuriousBind if !self.binding => {
                let before = self.phase();
                let bound = N::default().bound();
                self.feed(Input::Bound(Ok(bound)));
                assert_eq!(self.phase(), before);
            }
            Happening::SpuriousBind => {}
            Happening::SpuriousTick => drop(self.feed(Input::Tick)),
            Happening::Own(happening) => N::happens(self, happening),
        }
        self.feed_closed();
    }

    /// Feeds, once, that the connections of an ended session are closed.
    fn feed_closed(&mut self) {
        if self.phase() == PhaseOf::<N>::ENDING && self.socket.is_none() && !self.machine.is_over() {
            self.feed(Input::Closed);
        }
    }

    /// Lets everything around the plugin work, and at once, until the plugin is registered. If `lost`, the session
    /// that began before this call fails. Unless `close`, connections stay open until they are cut.
    pub fn benign_until_registered(&mut self, lost: bool, close: bool) {
        if self.kubelet.is_none() {
            self.happens(Happening::KubeletNew);
        } else {
            self.check_files();
        }
        let (before, end) = (self.sockets, self.now + N::RECOVERY);
        while self.phase() != N::GOAL {
            assert!(self.now < end, "not registered in time: {:?}", self.phase());
            self.happens(Happening::BindEnds(true));
            N::works(self, lost && self.socket.is_some_and(|socket| socket.number <= before));
            self.feed_closed();
            if close {
                self.happens(Happening::ConnectionsClose);
            }
            self.happens(Happening::Passes(u64::try_from(STEP.as_millis()).expect("short")));
        }
    }

    /// Checks that a plugin that is asked to end is over once its connections are closed, after half a second at most.
    pub fn check_shutdown(mut self) {
        let begin = self.now;
        self.feed(Input::Shutdown);
        self.happens(Happening::Passes(500));
        assert!(self.machine.is_over() && self.now <= begin + LIMITS.close);
        assert!(!self.binding, "binds though it ends");
        self.happens(Happening::KubeletNew);
        assert!(self.machine.is_over() && !self.binding);
    }

    /// Checks that no second of the story had more than 24 actions of a kind: those of every plugin, and `own`.
    pub fn check_no_storm(&self, own: &[<N::Handshake as Handshake>::Action]) {
        let kinds = [Action::Bind, Action::End, Action::Cut].into_iter();
        for kind in kinds.chain(own.iter().cloned().map(Action::Own)) {
            let times: Vec<Duration> = self.done.iter().filter(|(_, done)| *done == kind).map(|(at, _)| *at).collect();
            // A new kubelet every tenth of a second brings an attempt and its first retry: 20 of a kind. 24 leave room.
            for window in times.windows(25) {
                let lasted = window[24].saturating_sub(window[0]);
                assert!(lasted >= Duration::from_secs(1), "a storm of {kind:?}: {window:?}");
            }
        }
    }

    /// Returns true if a session ended with this cause.
    pub fn has_ended_with(&self, cause: &str) -> bool {
        self.done.iter().any(|(_, done)| matches!(done, Action::ReportEnded(why) if why == cause))
    }
}

/// Random events, the neighbour's included.
pub fn happening<N: Neighbour>() -> impl Strategy<Value = Happening<N::Happening>> {
    prop_oneof![
        4 => (0_u64..400).prop_map(Happening::Passes),
        2 => (0_u64..40_000).prop_map(Happening::Passes),
        1 => Just(Happening::KubeletGone),
        3 => Just(Happening::KubeletNew),
        1 => Just(Happening::KubeletTouched),
        1 => Just(Happening::SocketGone),
        6 => prop::bool::weighted(0.8).prop_map(Happening::BindEnds),
        1 => Just(Happening::ServerEnds),
        3 => Just(Happening::ConnectionsClose),
        1 => Just(Happening::SpuriousBind),
        1 => Just(Happening::SpuriousTick),
        40 => N::happening().prop_map(Happening::Own),
    ]
}
