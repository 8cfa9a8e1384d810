//! Any bytes as an image file: decoded, scaled by both rules, cut into patches.
#![no_main]

use libfuzzer_sys::fuzz_target;
use qhx_bundle::media::{ImageFrontEnd, PatchOrder, Patches, Placeholder, Resize};
use qhx_runtime::media::{Image, Picture};

fuzz_target!(|file: &[u8]| {
    let Ok(picture) = Picture::decode("fuzz", file) else { return };
    assert_eq!(picture.rgb().len(), picture.width() * picture.height() * 3);
    let area = Resize::Area { min_pixels: 1024, max_pixels: 16384, max_aspect: 200.0 };
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
        let Ok(image) = Image::from_picture("fuzz", &picture, &front_end) else { continue };
        let patches = image.patches();
        assert_eq!(patches.len(), image.grid().count() * image.patch_numbers());
        assert!(patches.iter().all(|n| (-1.0..=1.0).contains(n)));
        let (index, _) = image.interpolation_taps().expect("there is a table");
        assert!(index.iter().all(|&row| (0..25).contains(&row)));
    }
});
