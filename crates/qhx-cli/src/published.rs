//! `qhx_generate`: one answer from a manifest, with arguments in the order that published bundles document.

use crate::{
    answer::{check_complete, stream_answer, tell_cost},
    environment,
    failure::Failure,
    flags::MAX_TOKENS,
    input::Input,
    interrupt::Interrupt,
    load::load_model,
    media::MediaFlags,
    output,
};
use qhx_bundle::{Bundle, BundleError, OpenOptions};
use qhx_runtime::{
    DeviceChoice, GenerateOptions, LoadOptions, MediaKind, Piece, generate,
    registry::{NpuLibraries, NpuSettings},
};
use std::{
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
    time::Instant,
};

const USAGE: &str = "usage: qhx_generate MANIFEST libQnnHtp.so libQnnSystem.so ARTIFACTS_ROOT MAX_NEW \"PROMPT\" [MEDIA]

  MANIFEST        a manifest in an arch folder, for example v81/my-model.json
  ARTIFACTS_ROOT  the folder with the files that it names
  MAX_NEW         the most tokens to generate
  PROMPT          text, templated as the manifest's chat.mode says; integers separated by commas are token ids
  MEDIA           an image or a sound

Example:
  qhx_generate my-model/v81/my-model-vlm.json ./libQnnHtp.so ./libQnnSystem.so my-model/v81 64 \"Describe this image.\" photo.jpg
";

pub(crate) fn run(arguments: &[OsString], interrupt: &Interrupt) -> Result<(), Failure> {
    if arguments.iter().any(|argument| argument == "--help" || argument == "-h") {
        return output::print(USAGE);
    }
    let wrong = || Failure::usage(format!("expected 6 or 7 arguments, found {}", arguments.len())).hint(USAGE.trim_end());
    let [manifest, htp, system, root, max_new, prompt, media @ ..] = arguments else { return Err(wrong()) };
    if media.len() > 1 {
        return Err(wrong());
    }
    let max_new = text(max_new, "MAX_NEW")?;
    let wrong = || Failure::usage(format!("MAX_NEW is {max_new:?}, expected a number of tokens from 0 to {MAX_TOKENS}"));
    let max_new = max_new.parse().ok().filter(|&tokens: &u64| tokens <= MAX_TOKENS).ok_or_else(wrong)? as usize;
    let prompt = text(prompt, "PROMPT")?;

    let started = Instant::now();
    let bundle = open(Path::new(manifest), Path::new(root), interrupt)?;
    let files = media.iter().map(|file| Ok((MediaKind::of_file(Path::new(file))?, PathBuf::from(file))));
    let flags = MediaFlags { files: files.collect::<Result<Vec<_>, Failure>>()?, split: false };
    let mut input = match ids(prompt)? {
        Some(ids) => Input::of_ids(ids),
        None => Input::of_text(&bundle, prompt.to_owned(), None)?,
    };
    input.attach(&flags, &bundle)?;
    let libraries = NpuLibraries::Files { htp: htp.into(), system: system.into() };
    let npu = NpuSettings { libraries: Some(libraries), ..environment::npu()? };
    let options = LoadOptions {
        device: DeviceChoice::Npu,
        npu,
        instructions: environment::instructions()?,
        media: input.media(),
        ..LoadOptions::default()
    };
    let model = load_model(&bundle, &options)?;
    let load_time = started.elapsed();
    let mut session = model.session()?;
    let prompt = input.prompt(&model)?;
    let options = GenerateOptions { max_new, ..GenerateOptions::default() };
    let answer = |on_piece: &mut dyn FnMut(Piece<'_>)| generate(&mut session, &prompt, &options, interrupt.cancel(), on_piece);
    let generation = stream_answer(&model, interrupt, answer)?;
    let timing = &generation.timing;
    output::note(&format!(
        "prompt {} tokens, generated {}, prefill {:.1} ms, decode {:.1} ms",
        timing.prompt_tokens, timing.generated_tokens, timing.prefill_ms, timing.decode_ms
    ));
    tell_cost(&generation, Some(load_time));
    check_complete(&generation)
}

fn open(manifest: &Path, root: &Path, interrupt: &Interrupt) -> Result<Bundle, Failure> {
    let options = OpenOptions { cache_dir: environment::places().cache, cancel: Some(interrupt.flag()), ..OpenOptions::default() };
    Bundle::open_in(manifest, root, &options).map_err(|error| match &error {
        BundleError::File { .. } if manifest.parent().is_some_and(|beside| beside != root) => {
            let hint = "ARTIFACTS_ROOT is the folder with the files that the manifest names, usually the manifest's own";
            Failure::from(error).hint(hint)
        }
        _ => error.into(),
    })
}

/// The ids of a prompt that is nothing but integers separated by commas.
fn ids(prompt: &str) -> Result<Option<Vec<u32>>, Failure> {
    let parts: Vec<&str> = prompt.split(',').map(str::trim).collect();
    if !parts.iter().all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit())) {
        return Ok(None);
    }
    let id = |part: &&str| part.parse().map_err(|_| Failure::usage(format!("PROMPT: {part} is not a token id (0 to {})", u32::MAX)));
    parts.iter().map(id).collect::<Result<_, _>>().map(Some)
}

fn text<'a>(argument: &'a OsStr, name: &str) -> Result<&'a str, Failure> {
    let text = argument.to_str().ok_or_else(|| Failure::usage(format!("{name} is not valid UTF-8: {argument:?}")))?;
    if text.is_empty() { Err(Failure::usage(format!("{name} is empty"))) } else { Ok(text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_integers_and_commas_and_nothing_else() {
        assert_eq!(ids("1, 2,3").unwrap(), Some(vec![1, 2, 3]));
        assert_eq!(ids("7").unwrap(), Some(vec![7]));
        for text in ["1,2,", "1;2", "-1", "1,2 and 3", "", "one"] {
            assert_eq!(ids(text).unwrap(), None, "{text}");
        }
        assert!(ids("1,99999999999").is_err());
    }
}
