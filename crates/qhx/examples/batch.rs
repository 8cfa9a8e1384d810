//! Many prompts at once: `cargo run --release --package qhx --example batch -- [MODEL] [PROMPT…]`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let model = qhx::Model::options().sessions(8).open(arguments.next().unwrap_or_else(|| "builtin".into()))?;
    let mut prompts: Vec<String> = arguments.collect();
    if prompts.is_empty() {
        prompts = ["The capital of France is", "The capital of Italy is", "Once", "There was a"].map(String::from).to_vec();
    }
    // All of them begin here; each step of the model then works on all that are running.
    let begun = prompts.iter().map(|prompt| model.completion(prompt).max_tokens(48).stream());
    let answers = begun.collect::<Result<Vec<_>, _>>()?;
    for (prompt, answer) in prompts.iter().zip(answers) {
        println!("{prompt}{}", answer.answer()?.text);
    }
    let stats = model.engine()?.stats();
    println!("[{} rows in {} steps]", stats.rows, stats.steps);
    Ok(())
}
