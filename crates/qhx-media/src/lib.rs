//! The front ends: from the bytes of an image or a sound to what a tower takes.
//!
//! Pure functions of the file and of the front end's parameters, which the bundle carries
//! ([`ImageFrontEnd`](qhx_bundle::media::ImageFrontEnd), [`AudioFrontEnd`](qhx_bundle::media::AudioFrontEnd)). Nothing here knows programs,
//! sessions or tokens: callers ask an [`Image`] or a [`Sound`] for the numbers that a program's inputs name.
//!
//! The decoders of image files are behind the feature `image`, those of sound files behind `sound`; both are on by default. Without them a
//! file is an error ([`MediaProblem::NotBuilt`]), and pixels and samples that are there already ([`Picture::from_rgb`],
//! [`Sound::from_samples`]) are taken as ever.
//!
//! ```no_run
//! # fn show(media: &qhx_bundle::media::Media) -> Result<(), Box<dyn std::error::Error>> {
//! use qhx_media::{Image, Sound};
//! if let Some(front_end) = &media.image {
//!     let image = Image::open("photo.jpg".as_ref(), front_end)?;
//!     println!("{} soft rows, {} x {}", image.soft_rows(), image.blocks().rows, image.blocks().columns);
//!     let (patches, grid) = (image.patches(), image.patch_grid());
//! }
//! if let Some(front_end) = &media.audio {
//!     let sound = Sound::open("clip.wav".as_ref(), front_end)?;
//!     for piece in sound.split(front_end) {
//!         let frames = piece.frames(front_end)?;
//!         println!("{} frames of {} numbers", frames.count(), frames.bins());
//!     }
//! }
//! # Ok(())
//! # }
//! ```

mod error;
mod file;
mod fourier;
mod image;
#[cfg(feature = "image")]
mod image_file;
#[cfg(feature = "image")]
mod jpeg;
mod kind;
mod mel;
#[cfg(feature = "image")]
mod orientation;
mod picture;
mod resample;
mod resize;
mod size;
mod sniff;
mod sound;
#[cfg(feature = "sound")]
mod sound_file;
mod split;

pub use error::{MediaError, MediaProblem};
pub use image::{Grid, Image};
pub use kind::MediaKind;
pub use mel::Frames;
pub use picture::Picture;
pub use sound::Sound;

/// The largest image file that is read, in bytes.
pub const MAX_IMAGE_BYTES: u64 = 256 << 20;

/// The largest sound file that is read, in bytes.
pub const MAX_SOUND_BYTES: u64 = 1 << 30;

/// The most pixels that an image may have: 1 GiB at 6 bytes a pixel. Checked before anything of that size is allocated.
pub const MAX_PIXELS: u64 = (1 << 30) / 6;

/// The longest side that an image may have, in pixels.
pub const MAX_SIDE: u64 = 1 << 20;

/// The most samples of a decoded sound (all channels mixed to one), before and after its rate is changed.
pub const MAX_SAMPLES: usize = 1 << 28;

/// The sampling rates that are understood, in hertz.
pub const SAMPLING_RATES: std::ops::RangeInclusive<u32> = 1_000..=768_000;
