//! Images and sounds.

use super::{Bench, Case, Outcome, refused};
use crate::{mutate::mutate_bytes, random::Random, seeds::Seeds};
use qhx_bundle::media::{AudioFrontEnd, ImageFrontEnd, PatchOrder, Patches, Placeholder, Resize};
use qhx_runtime::media::{Image, Picture, Sound};

const FILE: &str = "medium";

pub(super) fn make(seeds: &Seeds, random: &mut Random) -> Case {
    let mut file = random.pick(&seeds.media).clone();
    let other = random.pick(&seeds.media).clone();
    let within = if random.one_in(2) { 128 } else { file.len() };
    mutate_bytes(&mut file, within, &other, random);
    let flag = random.word(&["--image", "--audio"]);
    Case::of(FILE, file)
        .command(&format!("generate {{bundles}}/gemma4 {flag} {{case}}/{FILE} --user Look. --max-new 1 --context 128 --json"))
}

pub(super) fn attempt(case: &Case, _: &Bench) -> Outcome {
    let file = case.file(FILE);
    match Picture::decode(FILE, file) {
        Ok(picture) => patches(&picture),
        Err(not_an_image) => frames(file).map_err(|not_a_sound| format!("{not_an_image}; {not_a_sound}")),
    }
}

/// An image in patches, by both rules of size.
fn patches(picture: &Picture) -> Outcome {
    assert_eq!(picture.rgb().len(), picture.width() * picture.height() * 3, "as many levels as pixels");
    let area = Resize::Area { min_pixels: 1024, max_pixels: 16384, max_aspect: 200.0 };
    let mut told = format!("{}x{}", picture.width(), picture.height());
    for (resize, order) in [(area, PatchOrder::ChannelFirst), (Resize::Budget { max_soft_rows: 7 }, PatchOrder::ChannelLast)] {
        let front_end = ImageFrontEnd {
            program: "vision".into(),
            placeholder: Placeholder { token: 0, begin: None, end: None },
            resize,
            rescale: 1.0 / 255.0,
            mean: [0.5; 3],
            std: [0.5; 3],
            patches: Patches { size: 8, block: 2, temporal: 2, order },
            position_side: Some(5),
            trained_size: None,
        };
        let image = Image::from_picture(FILE, picture, &front_end).map_err(refused)?;
        let patches = image.patches();
        assert_eq!(patches.len(), image.grid().count() * image.patch_numbers(), "as many numbers as patches have");
        assert!(patches.iter().all(|number| (-1.0..=1.0).contains(number)), "levels stay between black and white");
        told += &format!(" {:?}", image.grid());
    }
    Ok(told)
}

/// A sound in frames, in pieces of a quarter of a second.
fn frames(file: &[u8]) -> Outcome {
    let front_end = AudioFrontEnd { max_samples: 4_000, ..AudioFrontEnd::default() };
    let sound = Sound::decode(FILE, file.to_vec(), &front_end).map_err(refused)?;
    let pieces = sound.split(&front_end);
    assert_eq!(pieces.iter().map(|piece| piece.samples().len()).sum::<usize>(), sound.samples().len(), "pieces are the whole");
    for piece in pieces.iter().take(20) {
        if let Ok(frames) = piece.frames(&front_end) {
            assert!(frames.numbers().iter().all(|number| number.is_finite()), "frames are numbers");
        }
    }
    Ok(format!("{} samples", sound.samples().len()))
}
