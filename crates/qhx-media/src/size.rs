//! The size to which an image is scaled, by each of the rules.

use super::{MediaProblem, picture};
use qhx_bundle::media::{Patches, Resize};

/// Rows and columns of pixels after scaling: multiples of patch size times block.
///
/// The arithmetic is that of the models' own preprocessing, in 64-bit floats and step by step: a token more or less is another prompt.
pub(super) fn scaled(rule: Resize, patches: Patches, height: usize, width: usize) -> Result<(usize, usize), MediaProblem> {
    let side = patches.size * patches.block;
    let (h, w) = (height as u64, width as u64);
    let (height, width) = match rule {
        Resize::Area { min_pixels, max_pixels, max_aspect } => area(side as u64, [min_pixels, max_pixels], max_aspect, h, w)?,
        Resize::Budget { max_soft_rows } => budget(patches, max_soft_rows, h, w)?,
        Resize::Fixed { height, width } => (height as u64, width as u64),
    };
    picture::check_pixels(width, height)?;
    Ok((height as usize, width as usize))
}

fn area(side: u64, [min_pixels, max_pixels]: [u64; 2], max_aspect: f64, h: u64, w: u64) -> Result<(u64, u64), MediaProblem> {
    let aspect = h.max(w) as f64 / h.min(w) as f64;
    if aspect > max_aspect {
        return Err(MediaProblem::Aspect { width: w, height: h, aspect, most: max_aspect });
    }
    let (height, width, unit, pixels) = (h as f64, w as f64, side as f64, (h * w) as f64);
    let nearest = |length: f64| (length / unit).round_ties_even() as u64 * side;
    let found = nearest(height).saturating_mul(nearest(width));
    if found > max_pixels {
        let shrink = (pixels / max_pixels as f64).sqrt();
        let below = |length: f64| side.max((length / shrink / unit).floor() as u64 * side);
        return Ok((below(height), below(width)));
    }
    if found < min_pixels {
        let grow = (min_pixels as f64 / pixels).sqrt();
        let above = |length: f64| (length * grow / unit).ceil() as u64 * side;
        return Ok((above(height), above(width)));
    }
    Ok((nearest(height), nearest(width)))
}

fn budget(patches: Patches, max_soft_rows: usize, h: u64, w: u64) -> Result<(u64, u64), MediaProblem> {
    let side = (patches.size * patches.block) as u64;
    let most_pixels = max_soft_rows as u64 * side * side;
    let factor = (most_pixels as f64 / (h * w) as f64).sqrt();
    let below = |length: u64| (factor * length as f64 / side as f64).floor() as u64 * side;
    // A strip too thin for a block becomes one block high, and as many long as its shape and the budget allow.
    let strip = |long: u64, short: u64| (long / short).min(max_soft_rows as u64) * side;
    match (below(h), below(w)) {
        (0, 0) => Err(MediaProblem::NothingLeft { width: w, height: h, max_soft_rows, block: side as usize }),
        (0, _) => Ok((side, strip(w, h))),
        (_, 0) => Ok((strip(h, w), side)),
        both => Ok(both),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qhx_bundle::media::PatchOrder;

    const PATCHES: Patches = Patches { size: 16, block: 2, temporal: 2, order: PatchOrder::ChannelFirst };

    #[test]
    fn halves_go_to_the_even_multiple_and_areas_are_bounded() {
        let rule = Resize::Area { min_pixels: 65536, max_pixels: 1 << 20, max_aspect: 200.0 };
        let size = |h, w| scaled(rule, PATCHES, h, w);
        assert_eq!(size(432, 464).expect("within"), (448, 448), "13.5 and 14.5 both go to 14");
        assert_eq!(size(1, 1).expect("grown"), (256, 256));
        assert_eq!(size(4000, 3000).expect("shrunk"), (1152, 864));
        assert!(size(1, 200).is_ok());
        let error = size(1, 201).expect_err("too long").to_string();
        assert_eq!(error, "is 201 x 1: one side is 201.0 times the other, and this model takes at most 200 times; crop it");
    }

    #[test]
    fn a_budget_is_filled_and_strips_become_one_block_high() {
        let size = |h, w| scaled(Resize::Budget { max_soft_rows: 280 }, Patches { block: 3, ..PATCHES }, h, w);
        assert_eq!(size(1, 1).expect("grown"), (768, 768));
        assert_eq!(size(1, 100_000).expect("a strip"), (48, 280 * 48));
        assert_eq!(size(300, 1).expect("a strip"), (280 * 48, 48));
        let nothing = scaled(Resize::Budget { max_soft_rows: 1 }, PATCHES, 100, 99);
        assert!(matches!(nothing, Ok((_, 32))), "{nothing:?}");
    }

    #[test]
    fn no_rule_makes_more_pixels_than_are_decoded() {
        let rule = Resize::Area { min_pixels: 1 << 28, max_pixels: 1 << 28, max_aspect: 1e18 };
        assert!(matches!(scaled(rule, PATCHES, 100, 100), Err(MediaProblem::TooManyPixels { .. })));
        let fixed = Resize::Fixed { height: 512, width: 1024 };
        assert_eq!(scaled(fixed, PATCHES, 3, 5).expect("always"), (512, 1024));
    }
}
