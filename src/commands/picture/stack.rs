//! Wide machines in two rows of packages, the lower one upside down, so that the GPUs of both face the NVSwitches.

use super::Picture;
use super::layout::{Canvas, Home, Shape, row};

/// The widest row of packages, where it can be helped: on a common screen its texts are still read.
const WIDEST: i64 = 2000;

/// How many packages are in the upper row; all of them where the picture is narrow enough.
///
/// Direct links keep to one row (their tracks are below it), and so do several planes (a bar would be in the way of
/// another's links from below).
pub(super) fn split(picture: &Picture<'_>, homes: &[Home]) -> usize {
    if row(homes) <= WIDEST || !picture.links.is_empty() || picture.planes.len() > 1 {
        return homes.len();
    }
    let widest = |upper: usize| {
        let (upper, lower) = homes.split_at(upper.min(homes.len()));
        row(upper).max(row(lower))
    };
    (1..=homes.len()).min_by_key(|upper| (widest(*upper), homes.len() - upper)).unwrap_or(homes.len())
}

/// Moves a row that was placed at `top` to `to`, and with `turn` upside down.
pub(super) fn put_below(row: Canvas, canvas: &mut Canvas, top: i64, to: i64, height: i64, turn: bool) {
    let moved = |y: i64| if turn { to + height - (y - top) } else { y - top + to };
    let mut frames = row.frames;
    let mut shapes = row.shapes;
    for (shape, is_frame) in frames.iter_mut().map(|s| (s, true)).chain(shapes.iter_mut().map(|s| (s, false))) {
        let first = if turn { shape.rect.bottom() } else { shape.rect.y };
        let y = moved(first);
        let by = match turn && is_frame {
            // Its texts are at its head; now that is below.
            true => y + shape.rect.height - head(shape) - shape.rect.y,
            false => y - shape.rect.y,
        };
        shape.rect.y = y;
        shape.texts.iter_mut().for_each(|text| text.y += by);
    }
    canvas.gpus.extend(row.gpus.into_iter().map(|(gpu, mut rect)| {
        rect.y = moved(if turn { rect.bottom() } else { rect.y });
        (gpu, rect)
    }));
    let wires = row.wires.into_iter();
    canvas.wires.extend(wires.map(|points| points.into_iter().map(|(x, y)| (x, moved(y))).collect()));
    canvas.frames.extend(frames);
    canvas.shapes.extend(shapes);
}

/// How much of a frame's top its texts take, with the same air below as above.
fn head(frame: &Shape) -> i64 {
    let last = frame.texts.iter().map(|text| text.y).max().unwrap_or(frame.rect.y);
    last + 10 - frame.rect.y
}
