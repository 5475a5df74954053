//! Single stories: plugins of the resource that were there before ours, or that came after it.

use super::*;

/// Beside another plugin: detached from it before it is called serving, and registered again once its stream has ended.
#[test]
fn end_of_the_plugin_before_us_changes_nothing() {
    let mut world = World::new(1);
    for happening in [
        Happening::KubeletNew,
        Happening::BindsBeside,
        Happening::StreamOpens,
        Happening::RegisterEnds(true),
        Happening::AskEnds(Listing::Listed),
    ] {
        world.happens(happening);
    }
    assert_eq!(world.machine.phase(), Phase::Unnaming, "its end would end us");
    world.happens(Happening::UnnameEnds(true));
    world.happens(Happening::Passes(40_000));
    assert_eq!(world.machine.phase(), Phase::Beside, "it may live for long");
    world.happens(Happening::PredecessorEnds(900));
    world.happens(Happening::Passes(999));
    assert!(world.registering.is_none() && world.predecessor.stream_ends.is_none());
    world.happens(Happening::Passes(1));
    world.happens(Happening::RegisterEnds(true));
    assert_eq!(world.machine.phase(), Phase::Serving);
    let ended = |done: &(Duration, Action)| matches!(done.1, Action::ReportEnded(_));
    assert!(world.named && world.sockets == 1 && !world.done.iter().any(ended));
}

/// One that registers over us and ends takes our registration with it: we register again at once.
#[test]
fn successor_that_ends_is_followed_by_a_registration() {
    let mut world = World::new(1);
    for happening in [Happening::KubeletNew, Happening::AllWell, Happening::SuccessorEnds, Happening::Passes(20)] {
        world.happens(happening);
    }
    world.happens(Happening::StreamOpens);
    world.happens(Happening::RegisterEnds(true));
    assert!(world.machine.phase() == Phase::Serving && world.named && world.sockets == 1);
    // The kubelet saw its end only now, and gave up the newer of our two connections.
    world.happens(Happening::StreamEnds);
    world.happens(Happening::Passes(20));
    assert!(world.registering.is_some());
    world.happens(Happening::RegisterEnds(true));
    assert_eq!((world.machine.phase(), world.sockets), (Phase::Serving, 1));
}

/// Where the kubelet did not forget the name, the end of the other plugin costs one session.
#[test]
fn failed_detachment_costs_one_session() {
    let mut world = World::new(1);
    for happening in [
        Happening::KubeletNew,
        Happening::BindsBeside,
        Happening::StreamOpens,
        Happening::RegisterEnds(true),
        Happening::AskEnds(Listing::Listed),
        Happening::UnnameEnds(false),
        Happening::PredecessorEnds(5),
        Happening::Passes(5),
    ] {
        world.happens(happening);
    }
    assert_eq!(world.machine.phase(), Phase::Ending);
    world.benign_until_serving(false, true);
    assert_eq!(world.sockets, 2);
}
