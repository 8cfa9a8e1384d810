//! A sound as one stream of samples at the rate that its front end wants.

use super::{Frames, MAX_SAMPLES, MAX_SOUND_BYTES, MediaError, MediaProblem, file, mel, resample, split};
use qhx_bundle::media::AudioFrontEnd;
use std::{fmt, path::Path};

/// Samples of a sound, all channels mixed to one, at the front end's rate, with 1.0 as full scale.
#[derive(Clone, PartialEq)]
pub struct Sound {
    name: String,
    rate: u32,
    samples: Vec<f32>,
}

impl Sound {
    /// Decodes a sound file and brings it to the front end's rate.
    pub fn open(path: &Path, front_end: &AudioFrontEnd) -> Result<Self, MediaError> {
        let name = path.display().to_string();
        match file::read(path, MAX_SOUND_BYTES).and_then(|bytes| decode(bytes, front_end.sampling_rate)) {
            Ok(samples) => Ok(Self { name, rate: front_end.sampling_rate, samples }),
            Err(problem) => Err(problem.of(name)),
        }
    }

    /// Decodes the bytes of a sound file and brings it to the front end's rate. `name` is for errors.
    pub fn decode(name: &str, bytes: Vec<u8>, front_end: &AudioFrontEnd) -> Result<Self, MediaError> {
        file::check_length(&bytes, MAX_SOUND_BYTES).map_err(|p| p.of(name))?;
        let samples = decode(bytes, front_end.sampling_rate).map_err(|p| p.of(name))?;
        Ok(Self { name: name.into(), rate: front_end.sampling_rate, samples })
    }

    /// Samples that are there already, one channel at `rate`; brought to the front end's rate. `name` is for errors.
    pub fn from_samples(name: &str, rate: u32, samples: Vec<f32>, front_end: &AudioFrontEnd) -> Result<Self, MediaError> {
        let samples = resample::to_rate(samples, rate, front_end.sampling_rate).map_err(|p| p.of(name))?;
        Ok(Self { name: name.into(), rate: front_end.sampling_rate, samples })
    }

    /// The samples.
    pub fn samples(&self) -> &[f32] {
        &self.samples
    }

    /// Its length.
    pub fn seconds(&self) -> f64 {
        self.samples.len() as f64 / f64::from(self.rate)
    }

    /// The sound in pieces that the model takes, cut where it is quiet. A sound that is short enough is its only piece.
    pub fn split(&self, front_end: &AudioFrontEnd) -> Vec<Self> {
        let piece =
            |range: std::ops::Range<usize>| Self { name: self.name.clone(), rate: self.rate, samples: self.samples[range].to_vec() };
        split::pieces(&self.samples, front_end).into_iter().map(piece).collect()
    }

    /// What the tower takes: log-mel frames. A sound longer than the model takes is an error: see [`Sound::split`].
    pub fn frames(&self, front_end: &AudioFrontEnd) -> Result<Frames, MediaError> {
        mel::frames(&self.samples, front_end).map_err(|p| p.of(self.name.clone()))
    }
}

impl fmt::Debug for Sound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sound({}, {:.2} s)", self.name, self.seconds())
    }
}

#[cfg(feature = "sound")]
fn decode(bytes: Vec<u8>, rate: u32) -> Result<Vec<f32>, MediaProblem> {
    let (found, samples) = crate::sound_file::decode(bytes)?;
    resample::to_rate(samples, found, rate)
}

/// Says what the file is, since that is all this build can do with it.
#[cfg(not(feature = "sound"))]
fn decode(bytes: Vec<u8>, _: u32) -> Result<Vec<f32>, MediaProblem> {
    crate::sniff::SoundFormat::of(&bytes)?;
    Err(MediaProblem::NotBuilt { content: "sound" })
}

/// An error unless this many samples may be kept.
pub(super) fn check_samples(count: usize) -> Result<(), MediaProblem> {
    if count <= MAX_SAMPLES { Ok(()) } else { Err(MediaProblem::TooManySamples) }
}
