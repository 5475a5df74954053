//! The paths of the NVLinks in a picture: down from a GPU, along a track of their own, up to the other GPU.
//!
//! Links inside a package stay inside of it, those between packages run below; NVSwitch planes are bars below all.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::kinds::{Kind, LineKind};
use super::layout::{Layout, Line, Rect, Shape};
use super::text::{Style, width};
use super::{Link, Picture};

/// The least width for one end of a link at a GPU.
pub(super) const PORT: i64 = 15;
/// The distance from one track to the next: a count's height and some space.
pub(super) const TRACK: i64 = 20;
const PLANE: i64 = 34;
/// The distance from the last track to a plane: room for the counts.
const ABOVE_PLANE: i64 = 44;

/// A link with its ends and its track; x of the left end first.
struct Route<'a> {
    link: &'a Link,
    left: i64,
    right: i64,
    track: i64,
}

/// The routes of a picture whose GPUs have their places.
pub(super) struct Routes<'a> {
    routes: Vec<Route<'a>>,
    /// The places at which the links of a GPU to its plane come down.
    ports: BTreeMap<usize, i64>,
    /// The number of tracks inside the packages, and of those below them.
    pub inner: i64,
    crossing: i64,
}

impl<'a> Routes<'a> {
    /// Gives each link its ends and its track.
    pub fn new(picture: &'a Picture, gpus: &BTreeMap<usize, Rect>) -> Self {
        let x = |place: usize| gpus.get(&place).map_or(0, |rect| rect.x);
        // The ends at each GPU from left to right: links to the left, the farthest last; the plane; links to the right,
        // the farthest first. So two links from the same GPU to the same side never cross.
        let mut ends: BTreeMap<usize, Vec<(i64, Option<usize>)>> = BTreeMap::new();
        for (number, link) in picture.links.iter().enumerate() {
            let distance = (i64::from(link.crosses) << 32) + (x(link.a) - x(link.b)).abs();
            for (here, there) in [(link.a, link.b), (link.b, link.a)] {
                let key = if x(there) < x(here) { distance - (1 << 40) } else { (1 << 40) - distance };
                ends.entry(here).or_default().push((key, Some(number)));
            }
        }
        for port in picture.planes.iter().flat_map(|plane| &plane.ports) {
            ends.entry(port.gpu).or_default().push((0, None));
        }
        let mut at: BTreeMap<(usize, Option<usize>), i64> = BTreeMap::new();
        for (place, mut ends) in ends {
            ends.sort_unstable();
            let Some(rect) = gpus.get(&place) else { continue };
            let room = (1..).zip(&ends).last().map_or(1, |(count, _)| count + 1);
            for ((_, link), number) in ends.into_iter().zip(1..) {
                at.insert((place, link), rect.x + rect.width * number / room);
            }
        }
        let route = |(number, link): (usize, &'a Link)| {
            let (a, b) = (at.get(&(link.a, Some(number)))?, at.get(&(link.b, Some(number)))?);
            Some(Route { link, left: *a.min(b), right: *a.max(b), track: 0 })
        };
        let mut routes: Vec<Route<'_>> = picture.links.iter().enumerate().filter_map(route).collect();
        let inner = give_tracks(&mut routes, false);
        let crossing = give_tracks(&mut routes, true);
        let ports = at.into_iter().filter(|((_, link), _)| link.is_none()).map(|((gpu, _), x)| (gpu, x)).collect();
        Self { routes, ports, inner, crossing }
    }

    /// Draws all routes from the GPUs' bottom, `from`: tracks inside packages from `inner` down, the others from
    /// `below`. Returns the bottom.
    pub fn draw(&self, picture: &Picture, layout: &mut Layout, from: i64, inner: i64, below: i64) -> i64 {
        let below = if self.crossing > 0 { below + 8 } else { below };
        let track = |route: &Route<'_>| {
            let top = if route.link.crosses { below } else { inner };
            top + route.track * TRACK + TRACK / 2
        };
        // The lines that come down, with their depths: a count keeps clear of them.
        let mut drops: Vec<(i64, i64)> = self.ports.values().map(|x| (*x, i64::MAX)).collect();
        drops.extend(self.routes.iter().flat_map(|route| [(route.left, track(route)), (route.right, track(route))]));
        let mut order: Vec<&Route<'_>> = self.routes.iter().collect();
        // The deepest come first: where lines cross, the shorter one is on top.
        order.sort_by_key(|route| (Reverse(track(route)), route.left));
        for route in order {
            let y = track(route);
            let points = vec![(route.left, from), (route.left, y), (route.right, y), (route.right, from)];
            layout.add_links(points, route.link.count, route.link.kind, |half| (clear(route, y, half, &drops), y));
        }
        let mut bottom = below + self.crossing * TRACK;
        for plane in &picture.planes {
            let ports = plane
                .ports
                .iter()
                .filter_map(|port| Some((port, *self.ports.get(&port.gpu)?, *layout.gpus.get(&port.gpu)?)));
            let ports: Vec<_> = ports.collect();
            let left = ports.iter().map(|(.., gpu)| gpu.x).min();
            let right = ports.iter().map(|(.., gpu)| gpu.right()).max();
            let Some((left, right)) = left.zip(right) else { continue };
            let wide = (right - left).max(width(&plane.name, Style::Heading) + 16);
            let rect = Rect { x: (left + right - wide) / 2, y: bottom + ABOVE_PLANE, width: wide, height: PLANE };
            for (port, x, gpu) in ports {
                let (from, to, at) = match gpu.y > rect.y {
                    true => (gpu.y, rect.bottom(), rect.bottom() + 20),
                    false => (gpu.bottom(), rect.y, rect.y - 20),
                };
                layout.add_links(vec![(x, from), (x, to)], port.count, port.kind, |_| (x, at));
            }
            layout.add_shape(rect, Kind::Plane, &plane.name);
            bottom = rect.bottom();
        }
        bottom
    }
}

impl Layout {
    /// Adds a line of NVLinks; `middle` is that of the box with their count, given half of its width and some space.
    fn add_links(
        &mut self,
        points: Vec<(i64, i64)>,
        count: u32,
        kind: LineKind,
        middle: impl FnOnce(i64) -> (i64, i64),
    ) {
        let text = format!("NV{count}");
        let wide = width(&text, Style::Count) + 8;
        let (x, y) = middle(wide / 2 + 3);
        self.lines.push(Line { points, kind, count });
        self.add_shape(Rect { x: x - wide / 2, y: y - 8, width: wide, height: 16 }, Kind::Count(kind), &text);
    }

    pub fn add_shape(&mut self, rect: Rect, kind: Kind, text: &str) {
        self.shapes.push(Shape {
            rect,
            kind,
            lines: text.lines().map(str::to_owned).collect(),
            tooltip: String::new(),
            turned: false,
            gpu: None,
        });
    }
}

/// The place of a link's count on its track: as near the middle as possible without a line that comes down through it.
fn clear(route: &Route<'_>, y: i64, half: i64, drops: &[(i64, i64)]) -> i64 {
    let middle = (route.left + route.right) / 2;
    let free = |x: i64| {
        (route.left + half..=route.right - half).contains(&x)
            && !drops.iter().any(|(drop, depth)| *depth > y && (drop - x).abs() < half)
    };
    let candidates = (0..(route.right - route.left) / 2).flat_map(|away| [middle - away, middle + away]);
    candidates.into_iter().find(|x| free(*x)).unwrap_or(middle)
}

/// Gives tracks to the links: the shortest get the nearest; two on one track keep apart. Returns the number of tracks.
fn give_tracks(routes: &mut [Route<'_>], crosses: bool) -> i64 {
    let mut chosen: Vec<&mut Route<'_>> = routes.iter_mut().filter(|route| route.link.crosses == crosses).collect();
    chosen.sort_by_key(|route| (route.right - route.left, route.left, route.link.a, route.link.b));
    let mut tracks: Vec<Vec<(i64, i64)>> = Vec::new();
    for route in chosen {
        // A route is at least as wide as its count.
        let half = ((route.right - route.left) / 2).max(24) + 4;
        let middle = (route.left + route.right) / 2;
        let (left, right) = (middle - half, middle + half);
        let fits = |track: &Vec<(i64, i64)>| track.iter().all(|(from, to)| right <= *from || *to <= left);
        let number = tracks.iter().position(fits).unwrap_or(tracks.len());
        match tracks.get_mut(number) {
            Some(track) => track.push((left, right)),
            None => tracks.push(vec![(left, right)]),
        }
        route.track = i64::try_from(number).unwrap_or(i64::from(u16::MAX));
    }
    i64::try_from(tracks.len()).unwrap_or(i64::from(u16::MAX))
}
