//! Images become the oracle's patches: sizes, scaled pixels, patch order, positions.

use crate::common::{cases, fixed, image_front_end, list, numbers, pair, picture, sha256, size, text, worst};
use qhx_bundle::media::{ImageFrontEnd, PatchOrder, Patches};
use qhx_media::{Grid, Image, MediaProblem};

#[test]
fn every_size_becomes_the_oracles() {
    let mut refused = 0;
    for case in cases("sizes") {
        let front_end = image_front_end(text(&case, "rule"));
        let side = front_end.patches.size * front_end.patches.block;
        let rows = case["rows"].as_array().expect("rows");
        assert!(rows.len() > 200);
        for row in rows {
            let row: Vec<usize> = row.as_array().expect("a row").iter().map(|n| n.as_u64().expect("a number") as usize).collect();
            let found = Image::scaled_size("image", row[0], row[1], &front_end);
            match (found, &row[2..]) {
                (Ok(Grid { rows, columns }), &[height, width, tokens]) => {
                    assert_eq!((rows, columns), (height, width), "{row:?} by {:?}", front_end.resize);
                    assert_eq!(rows / side * (columns / side), tokens);
                }
                (Err(e), []) => {
                    assert!(matches!(e.problem, MediaProblem::Aspect { .. } | MediaProblem::NothingLeft { .. }), "{e}");
                    refused += 1;
                }
                (found, _) => panic!("{row:?} by {:?}: {found:?}", front_end.resize),
            }
        }
    }
    assert!(refused > 10, "the oracle refuses some: {refused}");
}

#[test]
fn scaled_pixels_are_the_oracles_bit_for_bit() {
    let cases = cases("resized");
    assert!(cases.len() >= 60);
    for case in &cases {
        let ((from_height, from_width), (height, width)) = (pair(case, "from"), pair(case, "to"));
        let image = Image::from_picture("image", &picture(from_height, from_width), &fixed(height, width)).expect("an image");
        assert_eq!(sha256(image.scaled_rgb()), text(case, "sha256"), "{from_height} x {from_width} to {height} x {width}");
    }
}

#[test]
fn patches_are_the_oracles() {
    let numbers = numbers();
    for (number, case) in cases("processed").iter().enumerate() {
        let channels = |field: &str| -> [f64; 3] { list(case, field).try_into().expect("three channels") };
        let front_end = ImageFrontEnd { mean: channels("mean"), std: channels("std"), ..image_front_end(text(case, "rule")) };
        let (height, width) = pair(case, "from");
        let image = Image::from_picture("image", &picture(height, width), &front_end).expect("an image");
        assert_eq!(image.grid(), Grid { rows: size(case, "rows"), columns: size(case, "columns") }, "{case}");
        assert_eq!(image.soft_rows() * front_end.patches.block.pow(2), image.grid().count());
        let (patches, length) = (image.patches(), image.patch_numbers());
        assert_eq!(patches.len(), image.grid().count() * length);
        let ends = [&patches[..length], &patches[patches.len() - length..]].concat();
        assert!(worst(&ends, &numbers[&format!("processed.{number}")]) < 1e-6, "{case}");
        let levels: Vec<u8> = patches
            .iter()
            .enumerate()
            .map(|(i, number)| {
                let channel = match front_end.patches.order {
                    PatchOrder::ChannelFirst => i % length / (length / 3),
                    PatchOrder::ChannelLast => i % 3,
                };
                ((f64::from(*number) * front_end.std[channel] + front_end.mean[channel]) * 255.0).round_ties_even() as u8
            })
            .collect();
        assert_eq!(sha256(&levels), text(case, "levels_sha256"), "{case}");
    }
}

#[test]
fn places_and_interpolation_are_the_oracles() {
    let numbers = numbers();
    let bytes = |all: &[i32]| -> Vec<u8> { all.iter().flat_map(|n| n.to_le_bytes()).collect() };
    for (number, case) in cases("grids").iter().enumerate() {
        let (rows, columns) = (size(case, "rows"), size(case, "columns"));
        let patches = Patches { size: 1, block: size(case, "block"), temporal: 1, order: PatchOrder::ChannelFirst };
        let front_end = ImageFrontEnd { patches, position_side: Some(size(case, "side")), ..fixed(rows, columns) };
        let image = Image::from_picture("image", &picture(9, 9), &front_end).expect("an image");
        assert_eq!(sha256(&bytes(&image.patch_rows())), text(case, "rows_sha256"), "{case}");
        assert_eq!(sha256(&bytes(&image.patch_columns())), text(case, "columns_sha256"), "{case}");
        assert_eq!(image.patch_grid(), [image.patch_rows(), image.patch_columns()].concat());
        let (index, factor) = image.interpolation_taps().expect("there is a table");
        assert_eq!(sha256(&bytes(&index)), text(case, "index_sha256"), "{case}");
        let expected = &numbers[&format!("grid.{number}.factor")];
        assert_eq!(worst(&factor[..expected.len()], expected), 0.0, "{case}");
        let factor: Vec<u8> = factor.iter().flat_map(|n| n.to_le_bytes()).collect();
        assert_eq!(sha256(&factor), text(case, "factor_sha256"), "{case}");
    }
}

#[test]
fn all_copies_along_time_and_orders_hold_the_same_pixels() {
    let of = |order, temporal| {
        let patches = Patches { size: 4, block: 2, temporal, order };
        Image::from_picture("image", &picture(16, 24), &ImageFrontEnd { patches, ..fixed(16, 24) }).expect("an image").patches()
    };
    let (first, last) = (of(PatchOrder::ChannelFirst, 3), of(PatchOrder::ChannelLast, 3));
    for (first, last) in first.chunks_exact(144).zip(last.chunks_exact(144)) {
        for (c, t, pixel) in (0..144).map(|i| (i / 48, i / 16 % 3, i % 16)) {
            assert_eq!(first[(c * 3 + t) * 16 + pixel], last[(t * 16 + pixel) * 3 + c]);
        }
    }
}

#[test]
fn equal_pictures_have_equal_digests() {
    let digest = |height, width| Image::from_picture("image", &picture(64, 48), &fixed(height, width)).expect("an image").digest();
    assert_eq!(digest(32, 48), digest(32, 48));
    assert_ne!(digest(32, 48), digest(48, 32));
}
