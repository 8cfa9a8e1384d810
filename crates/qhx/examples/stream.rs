//! An answer as an iterator, stopped after its first sentence: `cargo run --release --package qhx --example stream -- [MODEL] [PROMPT]`.

use std::io::{self, Write};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let model = qhx::Model::open(arguments.next().unwrap_or_else(|| "builtin".into()))?;
    let prompt = arguments.next().unwrap_or_else(|| "Tell me a story.".into());
    let mut chat = model.chat().temperature(0.7).seed(1);
    for piece in chat.stream(&prompt)? {
        let piece = piece?;
        print!("{piece}");
        io::stdout().flush()?;
        if piece.contains('.') {
            // Leaving the loop drops the stream, which stops the model.
            break;
        }
    }
    println!();
    Ok(())
}
