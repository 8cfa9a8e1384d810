//! The folder of which messages may name files: paths that lead out of it, links, pipes, devices, names with a beginning in common.

use super::{ask, messages};
use crate::{
    classes::{Bench, Case, Outcome},
    files::{empty_folder, repository},
    http::post,
    random::Random,
    seeds::Seeds,
    server::Client,
};
use serde_json::json;
use std::{fs, io, path::Path, process::Command, sync::Once};

const FILE: &str = "path";
/// Whoever names these files, or a link to them, is answered.
const GOOD: [&str; 2] = ["good.png", "good.wav"];

pub(super) fn make(_: &Seeds, random: &mut Random) -> Case {
    let names = [
        "good.png",
        "good.wav",
        "sub",
        "..",
        ".",
        "",
        "media",
        "media-other",
        "secret.png",
        "out.png",
        "folder-out",
        "inner.png",
        "pipe",
        "zero",
        "full",
        "loop",
        "large.png",
        "folder.png",
        "closed.png",
        "GOOD.PNG",
        "good.png ",
        "good.png\0",
        "~",
        "*",
        "%2e%2e",
        "..\\",
        "C:",
        "\u{202e}",
    ];
    let path = match random.below(10) {
        0 => random
            .word(&["/etc/passwd", "/dev/zero", "/dev/stdin", "/proc/self/mem", "file:///etc/passwd", "/", "", "//", "\\\\host\\a"])
            .to_owned(),
        1 => "sub/../".repeat(random.length(3000)) + "good.png",
        2 => "../".repeat(random.length(50)) + "etc/passwd",
        3 => random.word(&["x", "../", "\u{e9}"]).repeat(random.length(100_000)),
        4 => random.pick(&GOOD).to_string(),
        5 => random.word(&["sub/../good.png", "./good.png", "inner.png", "sub/inner.png", "sub//../sub/./inner.png"]).to_owned(),
        number => {
            let parts: Vec<&str> = (0..random.length(4)).map(|_| random.word(&names)).collect();
            // {media}: where the folder is.
            let root = random.word(&["{media}/", "/", "./", "{media}-other/"]);
            if number == 6 { format!("{root}{}", parts.join("/")) } else { parts.join("/") }
        }
    };
    Case::of(FILE, path.into_bytes())
}

/// Makes the folder, and what is outside of it.
fn prepare(folder: &Path, media: &Path) -> io::Result<()> {
    let files = repository().join("fixtures/media/files");
    for place in [folder, media, &media.join("sub"), &media.join("folder.png"), &folder.join("media-other")] {
        empty_folder(place)?;
    }
    fs::copy(files.join("rgb.png"), media.join("good.png"))?;
    fs::copy(files.join("s16.wav"), media.join("good.wav"))?;
    fs::copy(files.join("rgb.png"), folder.join("media-other/secret.png"))?;
    fs::File::create(media.join("large.png"))?.set_len(1 << 40)?;
    let run = |program: &str, arguments: &[&str]| Command::new(program).args(arguments).current_dir(media).status().map(drop);
    for (target, link) in [
        ("../media-other/secret.png", "out.png"),
        ("../media-other", "folder-out"),
        ("good.png", "inner.png"),
        ("../good.png", "sub/inner.png"),
        ("/dev/zero", "zero"),
        ("/dev/full", "full"),
        ("loop", "loop"),
    ] {
        run("ln", &["-s", target, link])?;
    }
    run("mkfifo", &["pipe"])
}

pub(super) fn attempt(case: &Case, bench: &Bench) -> Outcome {
    static PREPARED: Once = Once::new();
    let (folder, model) = (bench.scratch.join("shared"), bench.bundles.join("gemma4"));
    let media = folder.join("media");
    PREPARED.call_once(|| prepare(&folder, &media).unwrap_or_else(|error| panic!("the folder of media cannot be made: {error}")));
    let path = case.text(FILE).replace("{media}", &media.to_string_lossy());
    let kind = if path.ends_with(".wav") { "audio" } else { "image" };
    let part = match path.len() % 2 {
        0 => json!({ "type": kind, "path": path }),
        _ => json!({ "type": format!("{kind}_url"), format!("{kind}_url"): { "url": path } }),
    };
    let mut asked = messages();
    asked[0]["content"] = json!([part, { "type": "text", "text": "Look." }]);
    let request = post("/v1/chat/completions", &json!({ "messages": asked, "max_tokens": 1 }));
    let arguments = [model.as_os_str(), "--media".as_ref(), media.as_os_str()];
    let told = ask(bench, &arguments, "", &request, Client::Waits);
    // Where it really is, by the system's own account.
    let real = media.join(&path).canonicalize().ok().filter(|real| media.canonicalize().is_ok_and(|media| real.starts_with(media)));
    let is_good = real.and_then(|real| Some(GOOD.contains(&real.file_name()?.to_str()?))) == Some(true);
    assert_eq!(told.is_ok(), is_good, "{path:?} was answered {told:?}");
    told
}
