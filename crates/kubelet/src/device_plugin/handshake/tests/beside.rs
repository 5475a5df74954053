//! Single stories: plugins of the resource that were there before ours, or that came after it.

use super::*;

/// Beside another plugin: detached from it before it is called serving, and registered again once its stream has ended.
#[test]
fn end_of_the_plugin_before_us_changes_nothing() {
    let mut world = World::new(1);
    for happening in [
        Happening::KubeletNew,
        Happening::Own(Own::BindsBeside),
        Happening::Own(Own::StreamOpens),
        Happening::Own(Own::RegisterEnds(true)),
        Happening::Own(Own::AskEnds(Listing::Listed)),
    ] {
        world.happens(happening);
    }
    assert_eq!(world.phase(), Phase::Detaching, "its end would end us");
    does(&mut world, Own::DetachEnds(true));
    world.happens(Happening::Passes(40_000));
    assert_eq!(world.phase(), Phase::Beside, "it may live for long");
    does(&mut world, Own::PredecessorEnds(900));
    world.happens(Happening::Passes(999));
    assert!(!world.neighbour.registering && world.neighbour.predecessor.stream_ends.is_none());
    world.happens(Happening::Passes(1));
    does(&mut world, Own::RegisterEnds(true));
    assert_eq!(world.phase(), Phase::Serving);
    let ended = |done: &(Duration, Action<OwnAction>)| matches!(done.1, Action::ReportEnded(_));
    assert!(world.neighbour.named && world.sockets == 1 && !world.done.iter().any(ended));
}

/// A kubelet up to 1.24 is asked for nothing more: the end of the other plugin's stream does not reach us.
#[test]
fn older_kubelet_is_not_detached_from() {
    let mut world = World::new(1);
    for happening in [
        Happening::Own(Own::KubeletOf { is_older: true }),
        Happening::Own(Own::BindsBeside),
        Happening::Own(Own::RegisterEnds(true)),
        Happening::Own(Own::StreamOpens),
        Happening::Own(Own::AskEnds(Listing::Listed)),
    ] {
        world.happens(happening);
    }
    assert_eq!(world.phase(), Phase::Serving);
    does(&mut world, Own::PredecessorEnds(900));
    world.happens(Happening::Passes(40_000));
    assert_eq!((world.phase(), world.sockets), (Phase::Serving, 1));
    let calls = world.done.iter().filter(|(_, action)| matches!(action, Action::Own(own) if *own != OwnAction::Ask));
    assert_eq!(calls.count(), 1, "one registration");
}

/// One that registers over us and ends takes our registration with it: we register again at once.
#[test]
fn successor_that_ends_is_followed_by_a_registration() {
    let mut world = World::new(1);
    for happening in
        [Happening::KubeletNew, Happening::Own(Own::AllWell), Happening::Own(Own::SuccessorEnds), Happening::Passes(20)]
    {
        world.happens(happening);
    }
    does(&mut world, Own::StreamOpens);
    does(&mut world, Own::RegisterEnds(true));
    assert!(world.phase() == Phase::Serving && world.neighbour.named && world.sockets == 1);
    // The kubelet saw its end only now, and gave up the newer of our two connections.
    does(&mut world, Own::StreamEnds);
    world.happens(Happening::Passes(20));
    assert!(world.neighbour.registering);
    does(&mut world, Own::RegisterEnds(true));
    assert_eq!((world.phase(), world.sockets), (Phase::Serving, 1));
}

/// Where the kubelet did not forget the name, the end of the other plugin costs one session.
#[test]
fn failed_detachment_costs_one_session() {
    let mut world = World::new(1);
    for happening in [
        Happening::KubeletNew,
        Happening::Own(Own::BindsBeside),
        Happening::Own(Own::StreamOpens),
        Happening::Own(Own::RegisterEnds(true)),
        Happening::Own(Own::AskEnds(Listing::Listed)),
        Happening::Own(Own::DetachEnds(false)),
        Happening::Own(Own::PredecessorEnds(5)),
        Happening::Passes(5),
    ] {
        world.happens(happening);
    }
    assert_eq!(world.phase(), Phase::Ending);
    world.benign_until_registered(false, true);
    assert_eq!(world.sockets, 2);
}

/// A second registration gives us the name again: the plugin is detached again, whatever PodResources said meanwhile.
#[test]
fn doubt_during_second_registration_still_detaches() {
    for listed_before_the_answer in [false, true] {
        let mut world = World::new(1);
        for happening in [
            Happening::KubeletNew,
            Happening::Own(Own::BindsBeside),
            Happening::Own(Own::StreamOpens),
            Happening::Own(Own::AllWell),
            Happening::Own(Own::NextAsk(Listing::Missing)),
            Happening::Own(Own::StreamEnds),
            Happening::Passes(100),
            Happening::Own(Own::AskEnds(Listing::Missing)),
        ] {
            world.happens(happening);
        }
        assert!(world.phase() == Phase::Confirming && world.neighbour.registering);
        if listed_before_the_answer {
            does(&mut world, Own::NextAsk(Listing::Listed));
            assert_eq!(world.phase(), Phase::Beside);
        }
        does(&mut world, Own::RegisterEnds(true));
        if !listed_before_the_answer {
            does(&mut world, Own::NextAsk(Listing::Listed));
        }
        assert_eq!(world.phase(), Phase::Detaching);
        does(&mut world, Own::DetachEnds(true));
        does(&mut world, Own::PredecessorEnds(5));
        world.benign_until_registered(false, true);
        assert_eq!(world.sockets, 1);
    }
}

/// A slow PodResources: still asked when the plugin is detached a second time, since it registered again meanwhile.
fn detaching_with_an_open_question() -> World {
    let mut world = World::new(1);
    for happening in [
        Happening::KubeletNew,
        Happening::Own(Own::BindsBeside),
        Happening::Own(Own::StreamOpens),
        Happening::Own(Own::AllWell),
        Happening::Passes(29_990),
        Happening::Own(Own::SuccessorEnds),
        Happening::Passes(20),
        Happening::Own(Own::RegisterEnds(true)),
    ] {
        world.happens(happening);
    }
    assert!(world.phase() == Phase::Detaching && world.neighbour.asking);
    world
}

/// The answer that our devices are not listed is not forgotten because it came while the plugin was detached.
#[test]
fn doubt_while_detaching_is_looked_into() {
    let mut world = detaching_with_an_open_question();
    does(&mut world, Own::AskEnds(Listing::Missing));
    does(&mut world, Own::DetachEnds(true));
    assert_eq!(world.phase(), Phase::Confirming);
    world.happens(Happening::Passes(100));
    assert!(world.neighbour.asking, "asked again soon");
    does(&mut world, Own::AskEnds(Listing::Listed));
    assert_eq!((world.phase(), world.sockets), (Phase::Beside, 1));
}

/// The world refuses a second question at once.
#[test]
fn slow_answer_is_waited_for_after_detaching() {
    let mut world = detaching_with_an_open_question();
    does(&mut world, Own::DetachEnds(true));
    world.happens(Happening::Passes(40_000));
    assert_eq!(world.phase(), Phase::Beside);
    does(&mut world, Own::AskEnds(Listing::Listed));
    world.happens(Happening::Passes(29_999));
    assert!(!world.neighbour.asking);
    world.happens(Happening::Passes(1));
    assert!(world.neighbour.asking);
}

/// A kubelet answers the registration that fails on purpose when we have registered again, and forgets the name.
#[test]
fn late_answer_is_followed_by_a_registration() {
    let mut world = World::new(1);
    for happening in [
        Happening::KubeletNew,
        Happening::Own(Own::BindsBeside),
        Happening::Own(Own::StreamOpens),
        Happening::Own(Own::RegisterEnds(true)),
        Happening::Own(Own::AskEnds(Listing::Listed)),
        Happening::Passes(15_000),
    ] {
        world.happens(happening);
    }
    assert_eq!(world.phase(), Phase::Beside, "the kubelet hangs");
    does(&mut world, Own::PredecessorEnds(5));
    // The client under the name is that of the registration that fails: the end of the plugin before us ends that one.
    world.neighbour.predecessor = Predecessor::default();
    world.happens(Happening::Passes(1_000));
    does(&mut world, Own::RegisterEnds(true));
    assert_eq!(world.phase(), Phase::Serving);
    does(&mut world, Own::DetachEnds(true));
    assert!(world.phase() == Phase::Beside && !world.neighbour.named);
    world.happens(Happening::Passes(20));
    does(&mut world, Own::RegisterEnds(true));
    assert!(world.phase() == Phase::Serving && world.neighbour.named && world.sockets == 1);
}

/// A plugin that lives on beside ours does not keep the kubelet from noticing our end for ever.
#[test]
fn plugin_before_us_that_lives_on_is_waited_for_5_min() {
    let mut world = World::new(1);
    for happening in [
        Happening::KubeletNew,
        Happening::Own(Own::BindsBeside),
        Happening::Own(Own::StreamOpens),
        Happening::Own(Own::RegisterEnds(true)),
        Happening::Own(Own::AskEnds(Listing::Listed)),
        Happening::Own(Own::DetachEnds(true)),
    ] {
        world.happens(happening);
    }
    for _ in 0..9 {
        does(&mut world, Own::NextAsk(Listing::Listed));
    }
    assert!(world.phase() == Phase::Beside && !world.neighbour.registering);
    world.happens(Happening::Passes(30_000));
    assert!(world.neighbour.registering, "{:?}", world.phase());
    does(&mut world, Own::RegisterEnds(true));
    assert!(world.phase() == Phase::Serving && world.neighbour.named && world.sockets == 1);
    // Its end ends our session, and no more.
    does(&mut world, Own::PredecessorEnds(5));
    world.happens(Happening::Passes(5));
    assert_eq!(world.phase(), Phase::Ending);
    world.benign_until_registered(false, true);
    assert_eq!(world.sockets, 2);
}
