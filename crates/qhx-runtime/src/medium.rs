//! An image or a sound that goes with a prompt: read, checked and ready for a tower.
//!
//! Between the front ends, which know files, and the encoders, which know programs.

use crate::{Error, features::Features};
use qhx_bundle::{
    Digest,
    media::{AudioFrontEnd, ImageFrontEnd, Media},
};
use qhx_ir::{Generator, InputData};
use qhx_media::{Frames, Image, MediaKind, Sound};
use qhx_text::Attachment;
use std::{fmt, path::Path, sync::Arc};

/// An image or a sound, ready for the tower of the model whose front end made it. Clones share it.
#[derive(Clone)]
pub struct Medium(Arc<Inner>);

struct Inner {
    name: String,
    front_end: FrontEnd,
    content: Content,
    digest: Digest,
}

enum Content {
    Image(Box<Image>),
    Audio(Frames),
    /// What its tower would make.
    Staged(Features),
}

/// How a medium is made ready: parameters of the bundle.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum FrontEnd {
    Image(ImageFrontEnd),
    Audio(AudioFrontEnd),
}

impl FrontEnd {
    /// The front ends of a model.
    pub(crate) fn all(media: &Media) -> impl Iterator<Item = Self> {
        let image = media.image.clone().map(Self::Image);
        image.into_iter().chain(media.audio.clone().map(Self::Audio))
    }

    pub(crate) fn kind(&self) -> MediaKind {
        match self {
            Self::Image(_) => MediaKind::Image,
            Self::Audio(_) => MediaKind::Audio,
        }
    }

    pub(crate) fn program(&self) -> &str {
        match self {
            Self::Image(front_end) => &front_end.program,
            Self::Audio(front_end) => &front_end.program,
        }
    }

    /// Whether it makes the numbers of an input.
    pub(crate) fn makes(&self, generator: &Generator) -> bool {
        match (self, generator) {
            (Self::Image(front_end), Generator::InterpolationIndex | Generator::InterpolationFactor) => front_end.position_side.is_some(),
            (Self::Image(_), Generator::Patches | Generator::PatchGrid | Generator::PatchColumns | Generator::PatchRows) => true,
            (Self::Audio(_), Generator::Frames) => true,
            _ => false,
        }
    }
}

impl Medium {
    /// Reads an image or a sound from a file, by the front ends of `model`. A model that does not take it is an error.
    pub fn open(kind: MediaKind, path: &Path, model: &str, media: &Media) -> Result<Self, Error> {
        let name = path.display().to_string();
        match kind {
            MediaKind::Image => {
                let front_end = image_front_end(model, media)?;
                Ok(Self::image(name, Image::open(path, front_end)?, front_end))
            }
            MediaKind::Audio => {
                let front_end = audio_front_end(model, media)?;
                Self::sound(name, &Sound::open(path, front_end)?, front_end)
            }
        }
    }

    /// Decodes the bytes of an image or sound file. `name` is for errors.
    pub fn decode(kind: MediaKind, name: &str, bytes: Vec<u8>, model: &str, media: &Media) -> Result<Self, Error> {
        match kind {
            MediaKind::Image => {
                let front_end = image_front_end(model, media)?;
                Ok(Self::image(name, Image::decode(name, &bytes, front_end)?, front_end))
            }
            MediaKind::Audio => {
                let front_end = audio_front_end(model, media)?;
                Self::sound(name, &Sound::decode(name, bytes, front_end)?, front_end)
            }
        }
    }

    /// Reads a sound from a file and cuts it into pieces that the model takes.
    pub fn open_split(path: &Path, model: &str, media: &Media) -> Result<Vec<Self>, Error> {
        let front_end = audio_front_end(model, media)?;
        let pieces = Sound::open(path, front_end)?.split(front_end);
        pieces.iter().map(|piece| Self::sound(path.display().to_string(), piece, front_end)).collect()
    }

    /// An image that `front_end` made ready.
    pub fn image(name: impl Into<String>, image: Image, front_end: &ImageFrontEnd) -> Self {
        let digest = image.digest();
        Self(Arc::new(Inner {
            name: name.into(),
            front_end: FrontEnd::Image(front_end.clone()),
            content: Content::Image(Box::new(image)),
            digest,
        }))
    }

    /// A sound at the rate of `front_end`, short enough for it.
    pub fn sound(name: impl Into<String>, sound: &Sound, front_end: &AudioFrontEnd) -> Result<Self, Error> {
        let frames = sound.frames(front_end)?;
        let digest = frames.digest();
        let front_end = FrontEnd::Audio(front_end.clone());
        Ok(Self(Arc::new(Inner { name: name.into(), front_end, content: Content::Audio(frames), digest })))
    }

    /// One of which it is known what its tower makes: the same to sessions as the original.
    pub(crate) fn staged(
        kind: MediaKind,
        name: String,
        features: Features,
        digest: Digest,
        model: &str,
        media: &Media,
    ) -> Result<Self, Error> {
        let front_end = match kind {
            MediaKind::Image => FrontEnd::Image(image_front_end(model, media)?.clone()),
            MediaKind::Audio => FrontEnd::Audio(audio_front_end(model, media)?.clone()),
        };
        Ok(Self(Arc::new(Inner { name, front_end, content: Content::Staged(features), digest })))
    }

    /// What its tower makes, where that is known.
    pub(crate) fn features(&self) -> Option<&Features> {
        match &self.0.content {
            Content::Staged(features) => Some(features),
            Content::Image(_) | Content::Audio(_) => None,
        }
    }

    /// What it is.
    pub fn kind(&self) -> MediaKind {
        self.0.front_end.kind()
    }

    /// The file's name, or what else it was called.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Equal for media that are the same to a tower.
    pub fn digest(&self) -> Digest {
        self.0.digest
    }

    /// The program that makes soft rows of it.
    pub fn program(&self) -> &str {
        self.0.front_end.program()
    }

    /// Rows of the tower's call: patches or frames.
    pub fn rows(&self) -> usize {
        match &self.0.content {
            Content::Image(image) => image.grid().count(),
            Content::Audio(frames) => frames.count(),
            // No tower is called.
            Content::Staged(_) => 1,
        }
    }

    /// Rows and columns of the soft rows that an image becomes.
    pub(crate) fn grid(&self) -> Option<[usize; 2]> {
        match &self.0.content {
            Content::Image(image) => Some([image.blocks().rows, image.blocks().columns]),
            Content::Audio(_) => None,
            Content::Staged(features) => features.grid,
        }
    }

    pub(crate) fn is_for(&self, front_end: &FrontEnd) -> bool {
        self.0.front_end == *front_end
    }

    /// The numbers that a tower with these inputs takes.
    pub fn numbers<'a>(&self, generators: impl Iterator<Item = &'a Generator>) -> Vec<MediumNumbers<'_>> {
        use MediumNumbers as Numbers;
        let numbers = |generator: &Generator| match (&self.0.content, generator) {
            (Content::Image(image), Generator::Patches) => Numbers::F32(image.patches()),
            (Content::Image(image), Generator::PatchGrid) => Numbers::I32(image.patch_grid()),
            (Content::Image(image), Generator::PatchColumns) => Numbers::I32(image.patch_columns()),
            (Content::Image(image), Generator::PatchRows) => Numbers::I32(image.patch_rows()),
            (Content::Image(image), Generator::InterpolationIndex) => Numbers::I32(image.interpolation_taps().unwrap_or_default().0),
            (Content::Image(image), Generator::InterpolationFactor) => Numbers::F32(image.interpolation_taps().unwrap_or_default().1),
            (Content::Audio(frames), Generator::Frames) => Numbers::Lent(frames.numbers()),
            // Towers with other inputs are refused at load; an empty input would be refused by the call's own check.
            _ => Numbers::I32(Vec::new()),
        };
        generators.map(numbers).collect()
    }
}

/// The numbers of an input that a medium makes.
#[derive(Clone, Debug)]
pub enum MediumNumbers<'a> {
    /// Made for the call.
    F32(Vec<f32>),
    /// Places, made for the call.
    I32(Vec<i32>),
    /// The medium's own.
    Lent(&'a [f32]),
}

impl MediumNumbers<'_> {
    /// For a call.
    pub fn lend(&self) -> InputData<'_> {
        match self {
            Self::F32(numbers) => InputData::F32(numbers),
            Self::I32(numbers) => InputData::I32(numbers),
            Self::Lent(numbers) => InputData::F32(numbers),
        }
    }
}

impl Attachment for Medium {
    fn part_type(&self) -> &'static str {
        self.kind().part_type()
    }
}

impl PartialEq for Medium {
    fn eq(&self, other: &Self) -> bool {
        (self.kind(), self.digest()) == (other.kind(), other.digest())
    }
}

impl Eq for Medium {}

impl fmt::Debug for Medium {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Medium({} {}, {} rows)", self.kind(), self.name(), self.rows())
    }
}

fn image_front_end<'a>(model: &str, media: &'a Media) -> Result<&'a ImageFrontEnd, Error> {
    media.image.as_ref().ok_or_else(|| not_taken(MediaKind::Image, model, media))
}

fn audio_front_end<'a>(model: &str, media: &'a Media) -> Result<&'a AudioFrontEnd, Error> {
    media.audio.as_ref().ok_or_else(|| not_taken(MediaKind::Audio, model, media))
}

fn not_taken(kind: MediaKind, model: &str, media: &Media) -> Error {
    let kinds = FrontEnd::all(media).map(|front_end| front_end.kind());
    Error::NotTaken { model: model.to_owned(), kind, takes: takes(kinds) }
}

/// `text only`, `text and images` …
pub(crate) fn takes(kinds: impl Iterator<Item = MediaKind>) -> String {
    let names: Vec<_> = std::iter::once("text").chain(kinds.map(MediaKind::plural)).collect();
    match &names[..] {
        [most @ .., last] if !most.is_empty() => format!("{} and {last}", most.join(", ")),
        _ => "text only".to_owned(),
    }
}
