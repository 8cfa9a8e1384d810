//! Whether a word was meant as a model: for a single argument that could be a prompt.

use qhx::{Places, is_repository, suggestions};
use std::path::Path;

/// How the names of published checkpoints begin.
const FAMILIES: [&str; 12] =
    ["smol", "smollm", "tinyllama", "llama", "qwen", "phi", "phimoe", "gemma", "mistral", "mixtral", "deepseek", "gpt"];
/// What files of models end in.
const ENDINGS: [&str; 3] = [".gguf", ".safetensors", ".json"];
/// Whether an argument that names no model was meant as one, and not as a prompt: it has the shape of a path, of a file or of a checkpoint's name, or is close to the
/// name of a model that is there.
pub(crate) fn looks_like_model(argument: &str, places: &Places) -> bool {
    let begins_as_path = ["./", "../", "/", "~/", ".\\", "..\\"].iter().any(|start| argument.starts_with(start)) || has_drive(argument);
    let ends_as_file = ENDINGS.iter().any(|ending| argument.to_ascii_lowercase().ends_with(ending));
    if argument.contains(char::is_whitespace) {
        // A sentence may mention a file; a file with spaces in its name is given by its path.
        return begins_as_path && ends_as_file;
    }
    begins_as_path
        || ends_as_file
        || is_repository(argument)
        || is_checkpoint_name(argument)
        || !suggestions(Path::new(argument), places).is_empty()
}

/// A family, alone or with a version, or a name with a size in it: `smol`, `qwen3`, `Phi-3-mini`, `my-model-1.5b-instruct`.
fn is_checkpoint_name(word: &str) -> bool {
    let word = word.to_ascii_lowercase();
    let is_name = word.chars().all(|c| c.is_ascii_alphanumeric() || "._-:".contains(c)) && !word.ends_with(['.', ':']);
    let of_family = |family: &&str| word.strip_prefix(*family).is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_alphabetic()));
    let parts: Vec<&str> = word.split(['-', '_', ':']).collect();
    let is_size = |part: &&str| part.strip_suffix(['b', 'm']).is_some_and(|number| number.parse::<f64>().is_ok());
    let tells = |part: &&str| is_size(part) || ["instruct", "gguf"].contains(part);
    is_name && (FAMILIES.iter().any(of_family) || parts.len() > 1 && parts.iter().any(tells))
}

fn has_drive(argument: &str) -> bool {
    matches!(argument.as_bytes(), [drive, b':', b'\\' | b'/', ..] if drive.is_ascii_alphabetic())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_told_from_prompts() {
        for model in [
            "./missing.gguf",
            "../x",
            "/models/x",
            "~/x",
            "C:\\x",
            "missing.GGUF",
            "model.safetensors",
            "./my model.gguf",
            "org/name",
            "HuggingFaceTB/SmolLM2-135M",
            "models/smol/",
            "smol",
            "SmolLM2",
            "SmolLM2-135M-Instruct",
            "qwen3",
            "qwen2.5:0.5b",
            "Phi-3-mini",
            "gemma-3-1b-it",
            "llama",
            "my-model-1.5b",
            "x-instruct",
            "buitlin",
            "built",
        ] {
            assert!(looks_like_model(model, &Places::none()), "{model}");
        }
        for prompt in [
            "hello",
            "Hello",
            "Hi!",
            "Hello.",
            "What is 2+2?",
            "What is in ./model.gguf",
            "1/2",
            "2+2",
            "and/or?",
            "philosophy",
            "llamas",
            "smoldering",
            "Paris",
            "well-known",
            "",
            "a",
            "don't",
            "/ is a path",
            "Grüße",
            "smol?",
            "15b",
            "1b",
        ] {
            assert!(!looks_like_model(prompt, &Places::none()), "{prompt}");
        }
    }
}
