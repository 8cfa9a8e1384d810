//! How long files take before their towers: `front_ends QHX.json FILE…`, with a bundle's manifest. Medians in milliseconds.

use qhx_bundle::media::Media;
use qhx_media::{Image, MediaKind, Picture, Sound};
use std::{error::Error, hint::black_box, path::Path, time::Instant};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let manifest = std::fs::read(arguments.next().ok_or("usage: front_ends QHX.json FILE…")?)?;
    let mut manifest: serde_json::Value = serde_json::from_slice(&manifest)?;
    let media: Media = serde_json::from_value(manifest["media"].take())?;
    for file in arguments {
        let path = Path::new(&file);
        match (MediaKind::of_file(path)?, &media) {
            (MediaKind::Image, Media { image: Some(front_end), .. }) => {
                let picture = Picture::open(path)?;
                let image = Image::from_picture(&file, &picture, front_end)?;
                let decoded = milliseconds(|| Picture::open(path))?;
                let scaled = milliseconds(|| Image::from_picture(&file, &picture, front_end))?;
                let cut = milliseconds(|| Ok::<_, Box<dyn Error>>((image.patches(), image.patch_grid(), image.interpolation_taps())))?;
                println!("{file}: decoded {decoded:.2}, scaled {scaled:.2}, cut {cut:.2} ({image:?})");
            }
            (MediaKind::Audio, Media { audio: Some(front_end), .. }) => {
                let sound = Sound::open(path, front_end)?;
                let decoded = milliseconds(|| Sound::open(path, front_end))?;
                let frames = milliseconds(|| sound.frames(front_end))?;
                println!("{file}: decoded {decoded:.2}, frames {frames:.2} ({:?})", sound.frames(front_end)?);
            }
            (kind, _) => println!("{file}: the model takes no {}", kind.plural()),
        }
    }
    Ok(())
}

fn milliseconds<T, E>(run: impl Fn() -> Result<T, E>) -> Result<f64, E> {
    let mut all = Vec::new();
    for _ in 0..21 {
        let began = Instant::now();
        black_box(run()?);
        all.push(began.elapsed().as_secs_f64() * 1e3);
    }
    all.sort_by(f64::total_cmp);
    Ok(all[all.len() / 2])
}
