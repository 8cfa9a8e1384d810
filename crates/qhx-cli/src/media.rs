//! Images and sounds on the command line: flags in their order, files from content parts, and windows of a long sound.

use crate::failure::Failure;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, value_parser};
use qhx_bundle::{Bundle, files};
use qhx_runtime::{MediaKind, Medium, staged_media, text::Message};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// `--image` and `--audio` in the order in which they are given, and `--split`.
#[derive(Default)]
pub(crate) struct MediaFlags {
    pub(crate) files: Vec<(MediaKind, PathBuf)>,
    pub(crate) split: bool,
}

const FLAGS: [(&str, MediaKind); 2] = [("image", MediaKind::Image), ("audio", MediaKind::Audio)];

// Written out, not derived: a derived struct forgets which of two flags came first.
impl Args for MediaFlags {
    fn augment_args(command: Command) -> Command {
        let file = |name: &'static str, help: &'static str| {
            let arg = Arg::new(name).long(name).value_name("FILE").help(help).help_heading("Media");
            arg.action(ArgAction::Append).value_parser(value_parser!(PathBuf))
        };
        let split = Arg::new("split").long("split").action(ArgAction::SetTrue).help_heading("Media");
        command
            .arg(file("image", "Image (PNG, JPEG, WebP, GIF) placed before the text; may be repeated; order relative to --audio is kept"))
            .arg(file("audio", "Sound (WAV, FLAC, MP3, Ogg) placed before the text; may be repeated; order relative to --image is kept"))
            .arg(split.help("Split a sound of any length into windows, answer each, and join the answers"))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for MediaFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut flags = Self::default();
        flags.update_from_arg_matches(matches)?;
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        let mut files: Vec<(usize, MediaKind, PathBuf)> = Vec::new();
        for (name, kind) in FLAGS {
            let values = matches.get_many::<PathBuf>(name).into_iter().flatten();
            let indices = matches.indices_of(name).into_iter().flatten();
            files.extend(indices.zip(values).map(|(index, path)| (index, kind, path.clone())));
        }
        files.sort_by_key(|(index, ..)| *index);
        self.files = files.into_iter().map(|(_, kind, path)| (kind, path)).collect();
        self.split = matches.get_flag("split");
        Ok(())
    }
}

impl MediaFlags {
    /// Whether a sound is given: then the prompt may be absent.
    pub(crate) fn has_sound(&self) -> bool {
        self.files.iter().any(|(kind, _)| *kind == MediaKind::Audio)
    }

    /// The media, ready for the bundle's towers; where the manifest has staged what towers make, that.
    pub(crate) fn open(&self, bundle: &Bundle) -> Result<Vec<Medium>, Failure> {
        if let (Some(staged), Some(folder)) = (&bundle.manifest().fixture_dir, bundle.folder()) {
            return Ok(staged_media(folder, staged, name(bundle), &bundle.manifest().media)?);
        }
        self.files.iter().map(|(kind, path)| open(*kind, path, bundle)).collect()
    }

    /// With `--split`: the windows of the one sound.
    pub(crate) fn windows(&self, bundle: &Bundle) -> Result<Option<Vec<Medium>>, Failure> {
        match &self.files[..] {
            _ if !self.split => Ok(None),
            [(MediaKind::Audio, path)] => Ok(Some(Medium::open_split(path, name(bundle), &bundle.manifest().media)?)),
            _ => Err(Failure::usage("--split goes with one --audio and no --image")
                .hint("qhx run MODEL --audio long.mp3 --split \"Transcribe.\"")),
        }
    }
}

/// Reads a file for the bundle's towers.
pub(crate) fn open(kind: MediaKind, path: &Path, bundle: &Bundle) -> Result<Medium, Failure> {
    Ok(Medium::open(kind, path, name(bundle), &bundle.manifest().media)?)
}

fn name(bundle: &Bundle) -> &str {
    &bundle.manifest().model.name
}

/// Opens the media that a message's content names by their paths. Templates see parts of type `image` and `audio` without paths.
pub(crate) fn open_parts(message: &mut Message, bundle: &Bundle) -> Result<(), Failure> {
    let mut media = Vec::new();
    if let Some(Value::Array(parts)) = message.fields_mut().get_mut("content") {
        for (place, part) in parts.iter_mut().enumerate() {
            let in_part = |failure: Failure| failure.within(&format!("content part {}", place + 1));
            if let Some((kind, path)) = medium_of(part).map_err(in_part)? {
                media.push(open_part(kind, &path, bundle).map_err(in_part)?);
                *part = json!({ "type": if kind == MediaKind::Image { "image" } else { "audio" } });
            }
        }
    }
    message.media = media;
    Ok(())
}

/// Opens a file that a file names: a regular one, never a pipe or a device.
fn open_part(kind: MediaKind, path: &Path, bundle: &Bundle) -> Result<Medium, Failure> {
    // What the model takes is told before what the file is.
    if path.exists() && !path.is_file() {
        files::open(path)?;
    }
    open(kind, path, bundle)
}

/// The kind and the file of a part that is no text. `image_url` and the like may name a file as well.
fn medium_of(part: &Value) -> Result<Option<(MediaKind, PathBuf)>, Failure> {
    let (kind, field) = match part["type"].as_str() {
        Some("text") => return Ok(None),
        Some("image") => (MediaKind::Image, "image"),
        Some("image_url") => (MediaKind::Image, "image_url"),
        Some("audio") => (MediaKind::Audio, "audio"),
        Some("audio_url") => (MediaKind::Audio, "audio_url"),
        other => {
            let found = other.unwrap_or_default();
            return Err(
                Failure::work(format!("unknown type `{found}`")).hint("known types are `text`, and `image` and `audio` with a `path`")
            );
        }
    };
    let place = [&part["path"], &part["url"], &part[field], &part[field]["path"], &part[field]["url"]].into_iter().find_map(Value::as_str);
    let place = place.ok_or_else(|| Failure::work(format!("a part of type `{field}` needs a `path`")))?;
    let path = place.strip_prefix("file://").unwrap_or(place);
    if path.contains("://") || path.starts_with("data:") {
        let shown: String = path.chars().take(60).collect();
        return Err(Failure::work(format!("`{shown}` is not a file")).hint("qhx reads only local files: save it and give its path"));
    }
    Ok(Some((kind, path.into())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &[&str]) -> MediaFlags {
        let command = MediaFlags::augment_args(Command::new("test"));
        MediaFlags::from_arg_matches(&command.get_matches_from([&["test"], arguments].concat())).unwrap()
    }

    #[test]
    fn the_order_of_flags_is_kept() {
        let flags = parse(&["--image", "a", "--audio", "b", "--image=c", "--split"]);
        let expected = [(MediaKind::Image, "a"), (MediaKind::Audio, "b"), (MediaKind::Image, "c")].map(|(k, p)| (k, PathBuf::from(p)));
        assert_eq!(flags.files, expected);
        assert!(flags.split && flags.has_sound());
        assert!(parse(&[]).files.is_empty());
    }

    #[test]
    fn parts_name_files_in_several_ways() {
        let image = Some((MediaKind::Image, PathBuf::from("a b.png")));
        for part in [
            json!({"type": "image", "path": "a b.png"}),
            json!({"type": "image", "image": "a b.png"}),
            json!({"type": "image", "url": "file://a b.png"}),
            json!({"type": "image_url", "image_url": {"url": "a b.png"}}),
        ] {
            assert_eq!(medium_of(&part).unwrap(), image, "{part}");
        }
        assert_eq!(medium_of(&json!({"type": "text", "text": "x"})).unwrap(), None);
        assert_eq!(medium_of(&json!({"type": "audio", "path": "x.wav"})).unwrap(), Some((MediaKind::Audio, "x.wav".into())));
        for (part, expected) in [
            (json!({"type": "video", "path": "x"}), "unknown type `video`"),
            (json!({"type": "image"}), "needs a `path`"),
            (json!({"type": "image_url", "image_url": {"url": "https://host/x.png"}}), "is not a file"),
            (json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}), "is not a file"),
        ] {
            let failure = medium_of(&part).unwrap_err();
            assert!(failure.message().contains(expected), "{}", failure.message());
        }
    }
}
