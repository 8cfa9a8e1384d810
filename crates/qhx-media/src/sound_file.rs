//! Decoding sound files to one channel of samples.

use super::{MediaProblem, sniff::SoundFormat, sound};
use std::io::{self, Cursor};
use symphonia::{
    core::{
        codecs::audio::{AudioDecoder, AudioDecoderOptions},
        errors::Error,
        formats::{FormatOptions, FormatReader, Track, TrackType, probe::Hint},
        io::MediaSourceStream,
        meta::MetadataOptions,
    },
    default::{get_codecs, get_probe},
};

/// Louder than any recording, where 1.0 is full scale: such numbers are no samples.
const LOUDEST: f32 = 65_536.0;
/// What recorders write as the length of a WAV file that has no end yet, and more.
const UNKNOWN_LENGTH: u32 = 0x7fff_0000;
/// The format tag of a WAV header with a mask of speaker positions, one for each channel.
const EXTENSIBLE: u16 = 0xfffe;
/// The most channels of a WAV file: as many positions as such a mask can name.
const MAX_WAV_CHANNELS: u16 = 18;

/// Samples per second and the mean of all channels.
pub(super) fn decode(mut bytes: Vec<u8>) -> Result<(u32, Vec<f32>), MediaProblem> {
    let format = SoundFormat::of(&bytes)?;
    let problem = |e| problem(format, e);
    let is_cut = match format {
        SoundFormat::Ogg => ends_inside_a_page(&bytes),
        SoundFormat::Wav => !settle_wav_header(&mut bytes)?,
        SoundFormat::Flac | SoundFormat::Mp3 => false,
    };
    if is_cut {
        return Err(MediaProblem::Truncated { format: format.name(), content: "sound" });
    }
    let stream = MediaSourceStream::new(Box::new(Cursor::new(bytes)), Default::default());
    let options = (FormatOptions::default(), MetadataOptions::default());
    let mut reader = get_probe().probe(&Hint::new(), stream, options.0, options.1).map_err(problem)?;
    let Some(track) = reader.default_track(TrackType::Audio).cloned() else {
        return Err(MediaProblem::Unsupported { format: format.name(), reason: "it has no sound track".into() });
    };
    let Some(parameters) = track.codec_params.as_ref().and_then(|p| p.audio()) else {
        return Err(MediaProblem::Unsupported { format: format.name(), reason: "its coding is not known".into() });
    };
    let options = AudioDecoderOptions::default().verify(true);
    let mut decoder = get_codecs().make_audio_decoder(parameters, &options).map_err(|_| not_decoded(format))?;
    let (rate, samples) = read(format, reader.as_mut(), decoder.as_mut(), &track)?;
    if decoder.finalize().verify_ok == Some(false) {
        return Err(MediaProblem::Damaged { format: format.name(), reason: "its checksum does not fit the sound".into() });
    }
    Ok((rate, samples))
}

fn read(
    format: SoundFormat,
    reader: &mut dyn FormatReader,
    decoder: &mut dyn AudioDecoder,
    track: &Track,
) -> Result<(u32, Vec<f32>), MediaProblem> {
    let problem = |e| problem(format, e);
    let (mut rate, mut samples, mut interleaved) = (None, Vec::new(), Vec::<f32>::new());
    while let Some(packet) = reader.next_packet().map_err(problem)? {
        if packet.track_id != track.id {
            continue;
        }
        let buffer = match decoder.decode(&packet) {
            Ok(buffer) => buffer,
            // The first packets of a recording that was cut refer to sound before the cut; players pass over them, too.
            Err(Error::DecodeError(_)) if format == SoundFormat::Mp3 => continue,
            Err(e) => return Err(problem(e)),
        };
        let spec = buffer.spec();
        let channels = spec.channels().count();
        if channels == 0 || buffer.frames() == 0 {
            continue;
        }
        if *rate.get_or_insert(spec.rate()) != spec.rate() {
            return Err(MediaProblem::Unsupported { format: format.name(), reason: "its sampling rate changes on the way".into() });
        }
        sound::check_samples(samples.len() + buffer.frames())?;
        buffer.copy_to_vec_interleaved(&mut interleaved);
        samples.extend(interleaved.chunks_exact(channels).map(|all| all.iter().sum::<f32>() / channels as f32));
    }
    check(format, track, &samples)?;
    match rate {
        Some(rate) => Ok((rate, samples)),
        None => Err(MediaProblem::NoSamples { format: format.name() }),
    }
}

/// Whether all of the sound is there, and is sound.
fn check(format: SoundFormat, track: &Track, samples: &[f32]) -> Result<(), MediaProblem> {
    let missing = track.num_frames.unwrap_or(0).saturating_sub(samples.len() as u64);
    let is_cut = match format {
        SoundFormat::Flac => missing > 0,
        // Only encoders that write their delay write the exact length; the last packet may be lost to silence.
        SoundFormat::Mp3 => track.delay.is_some() && missing > 2 * 1152,
        SoundFormat::Ogg | SoundFormat::Wav => false,
    };
    if is_cut {
        return Err(MediaProblem::Truncated { format: format.name(), content: "sound" });
    }
    match samples.iter().position(|s| !s.is_finite() || s.abs() > LOUDEST) {
        Some(at) => {
            let reason = format!("sample {at} is {}, where 1.0 is full scale", samples[at]);
            Err(MediaProblem::Damaged { format: format.name(), reason })
        }
        None => Ok(()),
    }
}

/// Whether a WAV file has all the sound that it says it has. A recorder that did not know the length beforehand says a length beyond two gigabytes, or
/// none at all: then the true one is written into `bytes`. The decoder's arithmetic overflows where there are very many
/// channels, and where an extensible header does not name as many speaker positions as channels: the former are refused, and the latter, which do not matter here, are
/// overwritten.
fn settle_wav_header(bytes: &mut [u8]) -> Result<bool, MediaProblem> {
    let file = bytes.len();
    let length_at = |bytes: &[u8], at: usize| bytes.get(at..).and_then(|rest| rest.first_chunk()).map(|b| u32::from_le_bytes(*b));
    let mut at = 12;
    while let (Some(name), Some(length)) = (bytes.get(at..at + 4), length_at(bytes, at + 4)) {
        let content = at + 8;
        if name != b"data" {
            if name == b"fmt " {
                settle_channels(&mut bytes[content..content.saturating_add(length as usize).min(file)])?;
            }
            at = content.saturating_add(length as usize).saturating_add(length as usize & 1);
            continue;
        }
        let is_unknown = length >= UNKNOWN_LENGTH || (length == 0 && length_at(bytes, 4) == Some(0));
        if is_unknown && let (Ok(whole), Ok(rest)) = (u32::try_from(file - 8), u32::try_from(file - content)) {
            bytes[4..8].copy_from_slice(&whole.to_le_bytes());
            bytes[at + 4..content].copy_from_slice(&rest.to_le_bytes());
        }
        return Ok(is_unknown || length as usize <= file - content);
    }
    // No sound at all: the decoder says what is wrong.
    Ok(true)
}

/// Checks the number of channels of a `fmt ` chunk and gives an extensible one a mask with as many speaker positions.
fn settle_channels(chunk: &mut [u8]) -> Result<(), MediaProblem> {
    let &mut [tag_low, tag_high, low, high, ..] = chunk else { return Ok(()) };
    let channels = u16::from_le_bytes([low, high]);
    if channels > MAX_WAV_CHANNELS {
        let reason = format!("it has {channels} channels; at most {MAX_WAV_CHANNELS} can be read");
        return Err(MediaProblem::Unsupported { format: SoundFormat::Wav.name(), reason });
    }
    if u16::from_le_bytes([tag_low, tag_high]) == EXTENSIBLE
        && let Some(mask) = chunk.get_mut(20..24)
    {
        mask.copy_from_slice(&((1u32 << channels) - 1).to_le_bytes());
    }
    Ok(())
}

/// Whether the last page of an Ogg file promises more bytes than there are.
fn ends_inside_a_page(bytes: &[u8]) -> bool {
    const HEADER: usize = 27;
    let mut rest = bytes;
    while rest.starts_with(b"OggS") {
        let Some(&segments) = rest.get(HEADER - 1) else { return true };
        let Some(lengths) = rest.get(HEADER..HEADER + usize::from(segments)) else { return true };
        let page = HEADER + lengths.len() + lengths.iter().map(|&n| usize::from(n)).sum::<usize>();
        match rest.get(page..) {
            Some(after) => rest = after,
            None => return true,
        }
    }
    false
}

fn not_decoded(format: SoundFormat) -> MediaProblem {
    let reason = match format {
        SoundFormat::Ogg => "its sound is not coded as Vorbis or FLAC (voice messages are often Opus); convert it to WAV, FLAC or MP3",
        _ => "its coding is not known; convert it to plain PCM or to FLAC",
    };
    MediaProblem::Unsupported { format: format.name(), reason: reason.into() }
}

/// What a decoder's error means to the file's owner.
fn problem(format: SoundFormat, error: Error) -> MediaProblem {
    let format = format.name();
    match error {
        Error::IoError(e) if e.kind() == io::ErrorKind::UnexpectedEof => MediaProblem::Truncated { format, content: "sound" },
        Error::Unsupported(what) => MediaProblem::Unsupported { format, reason: what.into() },
        Error::ResetRequired => MediaProblem::Unsupported { format, reason: "it holds several recordings, one after the other".into() },
        other => MediaProblem::Damaged { format, reason: other.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with an extensible header, any number of channels and any mask; two samples in each channel.
    fn extensible(channels: u16, mask: u32) -> Vec<u8> {
        let pcm = [1, 0, 0, 0, 0, 0, 0x10, 0, 0x80, 0, 0, 0xaa, 0, 0x38, 0x9b, 0x71];
        let (block, data) = (channels.wrapping_mul(2), u32::from(channels) * 4);
        let format = [
            &EXTENSIBLE.to_le_bytes()[..],
            &channels.to_le_bytes(),
            &16_000u32.to_le_bytes(),
            &(16_000 * u32::from(block)).to_le_bytes(),
            &block.to_le_bytes(),
            &[16, 0, 22, 0, 16, 0],
            &mask.to_le_bytes(),
            &pcm,
        ]
        .concat();
        let head = [b"WAVEfmt \x28\0\0\0", &format[..], b"data", &data.to_le_bytes(), &vec![1; data as usize]].concat();
        [b"RIFF", &(head.len() as u32).to_le_bytes()[..], &head].concat()
    }

    #[test]
    fn a_channel_mask_that_does_not_match_the_channels_does_no_harm() {
        for mask in [0, 1, 3, 0x8000_0000, u32::MAX, 0x3ffff] {
            for channels in [1, 2, 5, MAX_WAV_CHANNELS] {
                let (rate, samples) = decode(extensible(channels, mask)).unwrap();
                assert_eq!((rate, samples.len()), (16_000, 2), "{channels} channels, {mask:#x}");
            }
            for channels in [0, MAX_WAV_CHANNELS + 1, 32, 33, 130, u16::MAX] {
                assert!(decode(extensible(channels, mask)).is_err(), "{channels} channels, {mask:#x}");
            }
        }
    }

    #[test]
    fn more_channels_than_can_be_read_are_refused() {
        for channels in [MAX_WAV_CHANNELS + 1, 0x4001, u16::MAX] {
            let mut plain = extensible(channels, 0);
            plain[20] = 1;
            plain[21] = 0;
            let problem = decode(plain).unwrap_err().to_string();
            assert!(problem.contains(&format!("it has {channels} channels; at most 18")), "{problem}");
        }
    }

    #[test]
    fn ogg_pages_are_walked_to_the_end() {
        let page = [b"OggS".as_slice(), &[0; 22], &[2, 3, 1, 9, 9, 9, 9]].concat();
        let file = [page.clone(), page.clone()].concat();
        assert!(!ends_inside_a_page(&file));
        assert!(!ends_inside_a_page(&[&file[..], b"junk"].concat()));
        for end in page.len() + 4..file.len() {
            assert!(ends_inside_a_page(&file[..end]), "{end}");
        }
    }
}
