//! A rule of one's own for the choice of tokens: `cargo run --release --package qhx --example logit_processor -- [MODEL] [PROMPT]`.

use qhx::LogitProcessor;

/// Forbids every token whose text has a certain letter in it.
struct Without {
    forbidden: Vec<u32>,
}

impl Without {
    fn letter(letter: char, model: &qhx::Model) -> Result<Self, qhx::Error> {
        let ids = 0..model.runtime().vocabulary().ids as u32;
        let texts = ids.map(|id| Ok((id, model.detokenize(&[id])?))).collect::<Result<Vec<_>, qhx::Error>>()?;
        Ok(Self { forbidden: texts.into_iter().filter(|(_, text)| text.contains(letter)).map(|(id, _)| id).collect() })
    }
}

impl LogitProcessor for Without {
    fn process(&mut self, _: &[u32], logits: &mut [f32]) {
        for &id in &self.forbidden {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let model = qhx::Model::open(arguments.next().unwrap_or_else(|| "builtin".into()))?;
    let prompt = arguments.next().unwrap_or_else(|| "Once".into());
    let plain = model.completion(&prompt).max_tokens(40).answer()?;
    println!("{prompt}{}\n", plain.text);
    let without = model.completion(&prompt).max_tokens(40).processor(Without::letter('w', &model)?).answer()?;
    assert!(!without.text.contains('w'));
    println!("{prompt}{}", without.text);
    Ok(())
}
