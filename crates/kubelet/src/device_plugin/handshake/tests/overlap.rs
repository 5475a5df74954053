//! Single stories of other plugins for the resource that registered before ours or after it.

use super::*;

/// A world in which we have registered while another plugin still runs. The kubelet lists our devices.
fn registered_over_predecessor() -> World {
    let mut world = World::new(1);
    world.happens(Happening::KubeletNew);
    let road = [Own::BindsWithPredecessor, Own::StreamOpens, Own::RegisterEnds(true), Own::AskEnds(Listing::Listed)];
    road.into_iter().for_each(|own| does(&mut world, own));
    world
}

/// Our plugin detaches from the one before it, then serves, and registers again once the other's stream has ended.
#[test]
fn end_of_the_plugin_before_us_changes_nothing() {
    let mut world = registered_over_predecessor();
    assert_eq!(world.phase(), Phase::Detaching, "the other plugin's end would end our session");
    does(&mut world, Own::DetachEnds(true));
    world.happens(Happening::Passes(40_000));
    assert_eq!(world.phase(), Phase::Overlapping, "the other plugin may live for long");
    does(&mut world, Own::PredecessorEnds(900));
    world.happens(Happening::Passes(999));
    assert!(!world.neighbour.registering && world.neighbour.predecessor.stream_ends.is_none());
    world.happens(Happening::Passes(1));
    does(&mut world, Own::RegisterEnds(true));
    assert_eq!(world.phase(), Phase::Serving);
    let ended = |done: &(Duration, Action<OwnAction>)| matches!(done.1, Action::ReportEnded(_));
    assert!(world.neighbour.named && world.sockets == 1 && !world.done.iter().any(ended));
}

/// The end of a plugin that registered after us ends our registration too, so we register again at once.
#[test]
fn successor_that_ends_is_followed_by_a_registration() {
    let mut world = World::after(vec![Happening::KubeletNew, Happening::Own(Own::AllWell)], 1);
    does(&mut world, Own::SuccessorEnds);
    world.happens(Happening::Passes(20));
    does(&mut world, Own::StreamOpens);
    does(&mut world, Own::RegisterEnds(true));
    assert!(world.phase() == Phase::Serving && world.neighbour.named && world.sockets == 1);
    // The kubelet sees the end of the other plugin only now, and closes the newer of our two connections.
    does(&mut world, Own::StreamEnds);
    assert_eq!(world.phase(), Phase::Ending);
    world.benign_until_registered(false, true);
    assert_eq!(world.sockets, 2);
}

/// If the kubelet did not forget the resource's name, the end of the other plugin costs one session.
#[test]
fn failed_detachment_costs_one_session() {
    let mut world = registered_over_predecessor();
    does(&mut world, Own::DetachEnds(false));
    does(&mut world, Own::PredecessorEnds(5));
    world.happens(Happening::Passes(5));
    assert_eq!(world.phase(), Phase::Ending);
    world.benign_until_registered(false, true);
    assert_eq!(world.sockets, 2);
}

/// A kubelet that hangs when it has to forget the name costs one session too, and nothing of the hung call is left.
#[test]
fn unanswered_detachment_costs_one_session() {
    let mut world = registered_over_predecessor();
    world.happens(Happening::Passes(15_000));
    assert!(world.phase() == Phase::Ending && !world.neighbour.detaching);
    world.benign_until_registered(false, true);
    assert_eq!(world.sockets, 2);
}

/// While PodResources is slow, it is not asked a second time. Its answer counts once we have registered again.
#[test]
fn slow_answer_counts_after_a_second_registration() {
    let mut world = World::after(vec![Happening::KubeletNew, Happening::Own(Own::AllWell)], 1);
    world.happens(Happening::Passes(30_000));
    does(&mut world, Own::SuccessorEnds);
    world.happens(Happening::Passes(20));
    assert!(world.neighbour.asking && world.neighbour.registering);
    does(&mut world, Own::RegisterEnds(true));
    assert!(world.phase() == Phase::Serving && world.neighbour.asking);
    does(&mut world, Own::AskEnds(Listing::Missing));
    assert!(!world.neighbour.asking);
    does(&mut world, Own::NextAsk(Listing::Missing));
    assert_eq!((world.phase(), world.sockets), (Phase::Confirming, 1));
}

/// If the plugin before us does not end, we register again after 5 minutes.
#[test]
fn plugin_before_us_that_lives_on_is_waited_for_5_min() {
    let mut world = registered_over_predecessor();
    does(&mut world, Own::DetachEnds(true));
    world.happens(Happening::Passes(299_999));
    assert!(world.phase() == Phase::Overlapping && !world.neighbour.registering);
    world.happens(Happening::Passes(1));
    assert!(world.neighbour.registering, "{:?}", world.phase());
    does(&mut world, Own::RegisterEnds(true));
    assert!(world.phase() == Phase::Serving && world.neighbour.named && world.sockets == 1);
    // The other plugin's end costs our session.
    does(&mut world, Own::PredecessorEnds(5));
    world.happens(Happening::Passes(5));
    assert_eq!(world.phase(), Phase::Ending);
    world.benign_until_registered(false, true);
    assert_eq!(world.sockets, 2);
}
