//! A conversation at the terminal: `cargo run --release --package qhx --example chat -- [MODEL]`.

use std::io::{self, BufRead, Write};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let reference = std::env::args().nth(1).unwrap_or_else(|| "builtin".into());
    let model = qhx::Model::open(reference)?;
    let mut chat = model.chat().max_tokens(512);
    println!("{}: an empty line leaves", model.name());
    for line in io::stdin().lock().lines() {
        let line = line?;
        if line.trim().is_empty() {
            break;
        }
        let answer = chat.ask_with(line.trim(), |piece| {
            print!("{piece}");
            // A terminal that is gone is noticed at the next line.
            let _ = io::stdout().flush();
        })?;
        println!("\n[{:.1} tokens/s]", answer.timing.decode_tokens_per_second);
    }
    Ok(())
}
