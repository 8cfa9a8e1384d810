//! Damaged and hostile bytes give errors or bundles, never a panic. The manifest is made to agree with the damage, so that sums do not hide it.

use crate::fixture::*;
use qhx_bundle::{manifest::MANIFEST_FILE, *};

/// A few random changes: bits, bytes, tokens that parsers care about, pieces removed or doubled, the end cut off.
fn mutate(bytes: &mut Vec<u8>, within: usize, random: &mut Random) {
    let tokens: [&[u8]; 12] = [b"{", b"}", b"[", b"]", b"\"", b",", b"-1", b"1e999", b"18446744073709551615", b"null", b"\\u0000", b"../"];
    for _ in 0..1 + random.below(4) {
        let end = within.min(bytes.len());
        if end == 0 {
            return;
        }
        let at = random.below(end);
        let span = at..(at + 1 + random.below(20)).min(end);
        match random.below(8) {
            0..=2 => bytes[at] ^= 1 << random.below(8),
            3 => bytes[at] = random.next() as u8,
            4 => drop(bytes.splice(at..at, tokens[random.below(tokens.len())].iter().copied())),
            5 => drop(bytes.drain(span)),
            6 => bytes.extend_from_within(span),
            _ => bytes.truncate(at.max(end / 2)),
        }
    }
}

fn survives(file: &str, within: usize, rounds: u64) {
    let usual = Files::usual();
    let mut opened = 0;
    for seed in 0..rounds {
        let mut files = usual.clone();
        let mut content = files.get(file).clone();
        mutate(&mut content, within, &mut Random(seed));
        if file == MANIFEST_FILE {
            *files.get(file) = content;
        } else {
            files.replace(file, content);
        }
        if let Ok(bundle) = files.open() {
            opened += 1;
            let weights = bundle.weights();
            for program in bundle.programs().values() {
                for name in program.weights.keys() {
                    weights.declared(program, name).unwrap();
                }
            }
        }
    }
    assert!(opened < rounds, "no change was ever noticed");
}

#[test]
fn manifest() {
    survives(MANIFEST_FILE, usize::MAX, 2000);
}

#[test]
fn weight_header() {
    survives(WEIGHTS, 1500, 2000);
}

#[test]
fn program() {
    survives(PROGRAM, usize::MAX, 2000);
}

#[test]
fn noise() {
    for seed in 0..2000 {
        let mut random = Random(seed);
        let length = random.below(200);
        let bytes = random.bytes(length);
        let _ = safetensors::read_header(&bytes);
        let _ = Manifest::from_json(&String::from_utf8_lossy(&bytes));
    }
}
