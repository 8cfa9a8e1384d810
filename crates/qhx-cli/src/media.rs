//! Images and sounds on the command line: flags in their order, and windows of a long sound.

use crate::failure::Failure;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, value_parser};
use qhx::{messages::open_medium, windows};
use qhx_bundle::Bundle;
use qhx_runtime::{MediaKind, Medium, staged_media};
use std::path::PathBuf;

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
            return Ok(staged_media(folder, staged, &bundle.manifest().model.name, &bundle.manifest().media)?);
        }
        self.files.iter().map(|(kind, path)| Ok(open_medium(*kind, path, bundle)?)).collect()
    }

    /// With `--split`: the windows of the one sound.
    pub(crate) fn windows(&self, bundle: &Bundle) -> Result<Option<Vec<Medium>>, Failure> {
        match &self.files[..] {
            _ if !self.split => Ok(None),
            [(MediaKind::Audio, path)] => Ok(Some(windows::open(path, bundle)?)),
            _ => Err(Failure::usage("--split goes with one --audio and no --image")
                .hint("qhx run MODEL --audio long.mp3 --split \"Transcribe.\"")),
        }
    }
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
}
