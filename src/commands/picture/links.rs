//! Where the NVLinks of a picture run: down from a GPU, along a track of their own, up to the other GPU.
//!
//! Links inside a package keep inside of it, those between packages run below; NVSwitch planes are bars below all.

use std::collections::BTreeMap;

use super::layout::{Canvas, Kind, Rect, Shape, Text};
use super::text::{Style, width};
use super::{Link, Picture};

/// The least room for one end of a link at a GPU.
pub(super) const PORT: i64 = 15;
/// From one track to the next: a count's height and air.
pub(super) const TRACK: i64 = 20;
/// The height of a plane's bar.
const PLANE: i64 = 34;
/// From the last track to a plane: room for the counts.
const ABOVE_PLANE: i64 = 44;

/// NVLinks as drawn.
pub(super) struct Strand {
    /// Corners, two or four of them.
    pub points: Vec<(i64, i64)>,
    pub count: u32,
    pub kind: StrandKind,
    /// How many, and the box around it.
    pub label: (Text, Rect),
}

/// What a strand joins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StrandKind {
    /// GPUs of one package, or a GPU and a plane.
    Near,
    /// GPUs of two packages.
    Crossing,
    /// Allocated GPUs.
    Allocated,
}

/// A link with its ends and its track; x of the left end first.
struct Route {
    link: Link,
    left: i64,
    right: i64,
    crossing: bool,
    track: i64,
}

/// The number of link ends at each GPU.
pub(super) fn ports(picture: &Picture<'_>) -> Vec<i64> {
    let mut ports: Vec<i64> = picture.gpus.iter().map(|face| i64::from(face.switch_links > 0)).collect();
    for place in picture.links.iter().flat_map(|link| [link.a, link.b]) {
        if let Some(ports) = ports.get_mut(place) {
            *ports += 1;
        }
    }
    ports
}

/// The routes of a picture whose GPUs have their places.
pub(super) struct Routes {
    routes: Vec<Route>,
    planes: Vec<(u32, Vec<(usize, i64)>)>,
    /// Tracks inside the packages, and below them.
    pub inner: i64,
    pub crossing: i64,
}

impl Routes {
    /// Gives each link its ends and its track. `home` maps a GPU to its box.
    pub fn new(picture: &Picture<'_>, canvas: &Canvas, home: &BTreeMap<usize, usize>) -> Self {
        let x = |place: usize| canvas.gpus.get(&place).map_or(0, |rect| rect.x);
        // The ends at each GPU from left to right: links to the left, the farthest last; the plane; links to the
        // right, the farthest first. So two links from the same GPU to the same side never cross.
        let mut ends: BTreeMap<usize, Vec<(i64, Option<usize>)>> = BTreeMap::new();
        for (number, link) in picture.links.iter().enumerate() {
            let far = i64::from(home.get(&link.a) != home.get(&link.b)) << 32;
            let distance = far + (x(link.a) - x(link.b)).abs();
            for (here, there) in [(link.a, link.b), (link.b, link.a)] {
                let key = if x(there) < x(here) { distance - (1 << 40) } else { (1 << 40) - distance };
                ends.entry(here).or_default().push((key, Some(number)));
            }
        }
        for place in picture.planes.values().flat_map(|plane| &plane.gpus) {
            ends.entry(*place).or_default().push((0, None));
        }
        let mut at: BTreeMap<(usize, Option<usize>), i64> = BTreeMap::new();
        for (place, mut ends) in ends {
            ends.sort_unstable();
            let Some(rect) = canvas.gpus.get(&place) else { continue };
            let room = i64::try_from(ends.len()).unwrap_or(i64::MAX - 1) + 1;
            for ((_, link), number) in ends.into_iter().zip(1..) {
                at.insert((place, link), rect.x + rect.width * number / room);
            }
        }
        let route = |(number, link): (usize, &Link)| {
            let (a, b) = (at.get(&(link.a, Some(number)))?, at.get(&(link.b, Some(number)))?);
            let crossing = home.get(&link.a) != home.get(&link.b);
            Some(Route { link: *link, left: *a.min(b), right: *a.max(b), crossing, track: 0 })
        };
        let mut routes: Vec<Route> = picture.links.iter().enumerate().filter_map(route).collect();
        let inner = give_tracks(&mut routes, false);
        let crossing = give_tracks(&mut routes, true);
        let port = |place: &usize| Some((*place, *at.get(&(*place, None))?));
        let planes = picture.planes.iter();
        let planes = planes.map(|(number, plane)| (*number, plane.gpus.iter().filter_map(port).collect())).collect();
        Self { routes, planes, inner, crossing }
    }

    /// Draws all of it: tracks inside packages from `inner` down, those below from `below`. Returns where it ends.
    pub fn draw(&self, picture: &Picture<'_>, canvas: &mut Canvas, inner: i64, below: i64) -> i64 {
        let from = canvas.leaves + canvas.leaf_height;
        let track = |route: &Route| if route.crossing { below } else { inner } + route.track * TRACK + TRACK / 2;
        // What comes down where, and how deep: a count keeps clear of it.
        let mut drops: Vec<(i64, i64)> = Vec::new();
        for route in &self.routes {
            drops.extend([(route.left, track(route)), (route.right, track(route))]);
        }
        drops.extend(self.planes.iter().flat_map(|(_, ports)| ports.iter().map(|(_, x)| (*x, i64::MAX))));
        let mut order: Vec<&Route> = self.routes.iter().collect();
        // The deepest first: where lines cross, the shorter one is on top.
        order.sort_by_key(|route| (std::cmp::Reverse(track(route)), route.left));
        for route in order {
            let y = track(route);
            let kind = picture.kind_of(route.link);
            let points = vec![(route.left, from), (route.left, y), (route.right, y), (route.right, from)];
            let text = format!("NV{}", route.link.count);
            let x = clear(route, y, width(&text, Style::Count) / 2 + 6, &drops);
            canvas.strands.push(Strand { points, count: route.link.count, kind, label: label(&text, x, y) });
        }
        let bottom = if self.crossing > 0 { below + self.crossing * TRACK } else { below };
        self.draw_planes(picture, canvas, bottom)
    }

    fn draw_planes(&self, picture: &Picture<'_>, canvas: &mut Canvas, mut bottom: i64) -> i64 {
        for (number, ports) in &self.planes {
            let rects = || ports.iter().filter_map(|(place, _)| canvas.gpus.get(place));
            let (Some(left), Some(right)) =
                (rects().map(|rect| rect.x).min(), rects().map(|rect| rect.x + rect.width).max())
            else {
                continue;
            };
            let Some(plane) = picture.planes.get(number) else { continue };
            let name = picture.plane_name(*number, plane);
            let least = width(&name, Style::Heading) + 16;
            let (middle, wide) = ((left + right) / 2, (right - left).max(least));
            let rect = Rect { x: middle - wide / 2, y: bottom + ABOVE_PLANE, width: wide, height: PLANE };
            let text = Text::centred(&name, Style::Heading, middle, rect.y + 22);
            for (place, x) in ports {
                let count = picture.switch_links(*place);
                let (_, kind) = picture.kinds_of_gpu(*place);
                let Some(gpu) = canvas.gpus.get(place) else { continue };
                let (from, to, at) = match gpu.y > rect.y {
                    true => (gpu.y, rect.bottom(), rect.bottom() + 20),
                    false => (gpu.bottom(), rect.y, rect.y - 20),
                };
                let points = vec![(*x, from), (*x, to)];
                let label = label(&format!("NV{count}"), *x, at);
                canvas.strands.push(Strand { points, count, kind, label });
            }
            canvas.shapes.push(Shape { rect, kind: Kind::Plane, texts: vec![text], tooltip: String::new() });
            bottom = rect.bottom();
        }
        bottom
    }
}

/// A count in the middle of its box.
fn label(text: &str, x: i64, y: i64) -> (Text, Rect) {
    let wide = width(text, Style::Count) + 6;
    (Text::centred(text, Style::Count, x, y + 4), Rect { x: x - wide / 2, y: y - 8, width: wide, height: 16 })
}

/// Where on its track a link's count stands: as near the middle as nothing that comes down goes through it.
fn clear(route: &Route, y: i64, half: i64, drops: &[(i64, i64)]) -> i64 {
    let middle = (route.left + route.right) / 2;
    let free = |x: i64| {
        (route.left + half..=route.right - half).contains(&x)
            && !drops.iter().any(|(drop, depth)| *depth > y && (drop - x).abs() < half)
    };
    let candidates = (0..(route.right - route.left) / 2).flat_map(|away| [middle - away, middle + away]);
    candidates.into_iter().find(|x| free(*x)).unwrap_or(middle)
}

/// The shortest links get the nearest tracks; two on one track keep apart. Returns how many tracks there are.
fn give_tracks(routes: &mut [Route], crossing: bool) -> i64 {
    let mut chosen: Vec<&mut Route> = routes.iter_mut().filter(|route| route.crossing == crossing).collect();
    chosen.sort_by_key(|route| (route.right - route.left, route.left, route.link.a, route.link.b));
    let mut tracks: Vec<Vec<(i64, i64)>> = Vec::new();
    for route in chosen {
        // As wide as its count at least.
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
