//! What a program that embeds qhx does: it opens a bundle, converses, streams, and is told clearly what its build leaves out.

use qhx::{
    Error, Model, Places,
    media::{MediaProblem, Picture},
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let bundle = std::env::args().nth(1).ok_or("usage: embedder BUNDLE")?;
    let model = Model::options().places(Places::none()).threads(2).context(256).open(bundle)?;
    let mut chat = model.chat().max_tokens(24);
    let mut streamed = String::new();
    for piece in chat.stream("What is the capital of France?")? {
        streamed += &piece?;
    }
    assert_eq!(streamed, "The capital of France is Paris.");
    assert!(chat.ask("What is the capital of Italy?")?.text.contains("Rome"));
    assert!(!model.complete("Once")?.ids.is_empty());

    let png = Picture::decode("a.png", b"\x89PNG\r\n\x1a\n").expect_err("no decoder is built");
    assert!(matches!(png.problem, MediaProblem::NotBuilt { .. }), "{png}");
    let npu = Model::options().places(Places::none()).device("npu".parse()?).open(std::env::args().nth(1).unwrap_or_default());
    assert!(npu.is_err_and(|error| error.to_string().contains("feature `npu`")));
    assert!(matches!(Model::open("builtin").err(), Some(Error::NotFound(_))));
    println!("{streamed}");
    Ok(())
}
