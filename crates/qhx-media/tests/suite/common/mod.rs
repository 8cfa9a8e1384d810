//! What the oracle recorded about images and sounds, and the pictures and sounds that it was asked about.

use qhx_bundle::{
    Digest,
    media::{ImageFrontEnd, PatchOrder, Patches, Placeholder, Resize},
};
use qhx_media::Picture;
use serde_json::Value;
use std::{collections::BTreeMap, fs, path::PathBuf};

pub(crate) fn folder() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "..", "..", "fixtures", "media"].iter().collect()
}

pub(crate) fn file(name: &str) -> Vec<u8> {
    fs::read(folder().join("files").join(name)).expect("the fixture has the file")
}

/// A section of `cases.json`.
pub(crate) fn cases(section: &str) -> Vec<Value> {
    let text = fs::read_to_string(folder().join("cases.json")).expect("the fixture has cases");
    let all: Value = serde_json::from_str(&text).expect("they are JSON");
    all[section].as_array().expect("the section is a list").clone()
}

pub(crate) fn numbers() -> BTreeMap<String, Vec<f32>> {
    let file = fs::read(folder().join("numbers.safetensors")).expect("the fixture has numbers");
    let tensors = qhx_bundle::safetensors::read_header(&file).expect("they are tensors").tensors;
    let number = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().expect("four bytes"));
    tensors.into_iter().map(|(name, tensor)| (name, file[tensor.range].chunks_exact(4).map(number).collect())).collect()
}

pub(crate) fn size(case: &Value, field: &str) -> usize {
    case[field].as_u64().unwrap_or_else(|| panic!("{case} has {field}")) as usize
}

/// Two numbers.
pub(crate) fn pair(case: &Value, field: &str) -> (usize, usize) {
    let at = |i: usize| case[field][i].as_u64().expect("a number") as usize;
    (at(0), at(1))
}

pub(crate) fn list(case: &Value, field: &str) -> Vec<f64> {
    case[field].as_array().expect("a list").iter().map(|n| n.as_f64().expect("of numbers")).collect()
}

pub(crate) fn text<'a>(case: &'a Value, field: &str) -> &'a str {
    case[field].as_str().unwrap_or_else(|| panic!("{case} has {field}"))
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    Digest::of(bytes).as_bytes().iter().map(|b| format!("{b:02x}")).collect()
}

pub(crate) fn worst(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, |worst, d| if d > worst || d.is_nan() { d } else { worst })
}

/// The front end of a rule in `cases.json`.
pub(crate) fn image_front_end(rule: &str) -> ImageFrontEnd {
    let text = fs::read_to_string(folder().join("cases.json")).expect("the fixture has cases");
    let all: Value = serde_json::from_str(&text).expect("they are JSON");
    let rule = &all["rules"][rule];
    let of_area = rule["kind"] == "area";
    let number = |field: &str| rule[field].as_u64().expect("a number");
    let resize = if of_area {
        Resize::Area { min_pixels: number("min_pixels"), max_pixels: number("max_pixels"), max_aspect: 200.0 }
    } else {
        Resize::Budget { max_soft_rows: number("max_soft_rows") as usize }
    };
    let order = if of_area { PatchOrder::ChannelFirst } else { PatchOrder::ChannelLast };
    let patches = Patches { size: size(rule, "size"), block: size(rule, "block"), temporal: if of_area { 2 } else { 1 }, order };
    ImageFrontEnd { resize, patches, ..fixed(1, 1) }
}

/// A front end that scales to one size and cuts single pixels.
pub(crate) fn fixed(height: usize, width: usize) -> ImageFrontEnd {
    ImageFrontEnd {
        program: "vision".into(),
        placeholder: Placeholder { token: 0, begin: None, end: None },
        resize: Resize::Fixed { height, width },
        rescale: 1.0 / 255.0,
        mean: [0.0; 3],
        std: [1.0; 3],
        patches: Patches { size: 1, block: 1, temporal: 1, order: PatchOrder::ChannelLast },
        position_side: None,
        trained_size: None,
    }
}

/// The oracle's picture of this size: noise, slopes and full contrast in a pattern of squares.
pub(crate) fn picture(height: usize, width: usize) -> Picture {
    let mut rgb = Vec::with_capacity(height * width * 3);
    for y in 0..height as u32 {
        for x in 0..width as u32 {
            for c in 0..3u32 {
                rgb.push(match ((x >> 3) + (y >> 3)) % 3 {
                    0 => noise(x, y, c) as u8,
                    1 => (x * 2 + y * 3 + c * 40) as u8,
                    _ if (x + y + c) & 4 != 0 => 255,
                    _ => 0,
                });
            }
        }
    }
    Picture::from_rgb("the oracle's picture", width, height, rgb).expect("all pixels are there")
}

fn noise(x: u32, y: u32, c: u32) -> u32 {
    let mut noise = x.wrapping_mul(73_856_093) ^ y.wrapping_mul(19_349_663) ^ c.wrapping_mul(83_492_791);
    noise ^= noise >> 13;
    noise = noise.wrapping_mul(0x5bd1_e995);
    noise ^ noise >> 15
}

/// The oracle's sound of this kind and length.
pub(crate) fn sound(kind: &str, count: usize) -> Vec<f32> {
    let triangle = |n: u32, step: u32| ((n.wrapping_mul(step) >> 16) as i32 - 32_768).abs() - 16_384;
    let sample = |n: u32| {
        let mut noise = n.wrapping_mul(2_654_435_761);
        noise ^= noise >> 15;
        noise = noise.wrapping_mul(0x2c1b_3c6d);
        noise ^= noise >> 12;
        let noise = (noise >> 16) as i32 - 32_768;
        let (low, high) = (triangle(n, 118_111_601), triangle(n, 805_306_368));
        let signal = match kind {
            "mixed" => low.div_euclid(2) + high.div_euclid(4) + noise.div_euclid(16),
            "tonal" => low * 2 - 1,
            "quiet" => noise.div_euclid(512),
            "bursts" if (n / 4000) % 2 == 0 => low + noise.div_euclid(4),
            _ => 0,
        };
        signal.clamp(-32_768, 32_767) as f32 / 32_768.0
    };
    (0..count as u32).map(sample).collect()
}
