//! Questions about an image: `cargo run --release --package qhx --example image -- demo/qwen3-vl demo/media/scene-07.png "Describe this image."`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [reference, file, questions @ ..] = &arguments[..] else {
        return Err("usage: image MODEL FILE QUESTION…".into());
    };
    let model = qhx::Model::open(reference)?;
    println!("{} takes {}", model.name(), model.takes());
    let mut chat = model.chat();
    chat.image(file)?;
    for question in questions {
        // Only the first question carries the image; the others are about the same conversation.
        println!("{question}\n  {}", chat.ask(question)?.text);
    }
    Ok(())
}
