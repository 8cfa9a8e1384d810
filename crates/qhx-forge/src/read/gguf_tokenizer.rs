//! The tokenizer that a GGUF file carries, as a Hugging Face `tokenizer.json`.
//!
//! GGUF metadata has the vocabulary, token types, merges or scores, and the *name* of a pre-tokenizer; the rest (normaliser, regular
//! expression, decoder, template) follows from the name. Two kinds are read: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`).
//! A pre-tokenizer that is not known is refused: guessing one would silently change the ids of many texts.

use super::gguf_metadata::{Array, Metadata, Value as Meta};
use super::{Problem, malformed, shown, unsupported};
use serde_json::{Map, Value, json};
use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};

/// What a GGUF file says about text.
#[derive(Clone, Debug)]
pub struct GgufTokenizer {
    /// A complete `tokenizer.json`.
    pub tokenizer_json: Vec<u8>,
    /// The matching `tokenizer_config.json`.
    pub tokenizer_config: Value,
    /// The token that begins a text.
    pub bos: Option<u32>,
    /// The tokens that end an answer, the main one first.
    pub eos: Vec<u32>,
    /// Whether `bos` is put before every text.
    pub add_bos: bool,
    /// The Jinja template of conversations.
    pub chat_template: Option<String>,
    /// How many tokens there are.
    pub vocab_size: usize,
}

/// Tokens that end an answer wherever a model has them, besides those that the metadata names.
const END_OF_ANSWER: [&str; 9] =
    ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>", "<EOT>", "</s>"];

/// The longest token, in characters, that is looked at for merges. Splitting a longer one would cost more than any real vocabulary.
const MAX_PIECE: usize = 1024;

/// Builds the tokenizer from a file's metadata.
pub fn build(metadata: &Metadata) -> Result<GgufTokenizer, Problem> {
    let vocabulary = Vocabulary::read(metadata)?;
    let kind = metadata.text("tokenizer.ggml.model")?.unwrap_or_default();
    let special = SpecialTokens::read(metadata, &vocabulary, kind)?;
    let pipeline = match kind {
        "gpt2" => byte_level(metadata, &vocabulary)?,
        "llama" => sentence_piece(metadata, &vocabulary, &special)?,
        "" => malformed!("it has no tokenizer (`tokenizer.ggml.model` is missing)"),
        other => unsupported!(
            "the tokenizer is of the kind `{}`; qhx reads `gpt2` and `llama` from GGUF files. Forge from the Hugging Face folder instead",
            shown(other)
        ),
    };
    let add_bos = metadata.boolean("tokenizer.ggml.add_bos_token")?.unwrap_or(pipeline.add_bos);
    let add_eos = metadata.boolean("tokenizer.ggml.add_eos_token")?.unwrap_or(false);
    let chat_template = metadata.text("tokenizer.chat_template")?.map(str::to_string);

    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": vocabulary.added_tokens(),
        "normalizer": pipeline.normalizer,
        "pre_tokenizer": pipeline.pre_tokenizer,
        "post_processor": post_processor(&vocabulary, &special, add_bos, add_eos)?,
        "decoder": pipeline.decoder,
        "model": pipeline.model,
    });
    let token = |id: Option<u32>| id.map(|id| vocabulary.tokens[id as usize].as_str());
    let tokenizer_config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        "bos_token": token(special.bos),
        "eos_token": token(special.eos),
        "unk_token": token(special.unknown),
        "pad_token": token(special.padding),
        "chat_template": chat_template,
    });
    Ok(GgufTokenizer {
        tokenizer_json: serde_json::to_vec(&tokenizer).map_err(|e| Problem::Malformed(format!("the tokenizer: {e}")))?,
        tokenizer_config,
        bos: special.bos,
        eos: special.ends,
        add_bos,
        chat_template,
        vocab_size: vocabulary.tokens.len(),
    })
}

/// The parts of a `tokenizer.json` that depend on the kind.
struct Pipeline {
    normalizer: Value,
    pre_tokenizer: Value,
    decoder: Value,
    model: Value,
    /// Whether texts begin with the bos token when the file does not say.
    add_bos: bool,
}

// ---------------------------------------------------------------------------------------------------------------- byte-level BPE

/// What the name of a pre-tokenizer stands for.
struct PreTokenizer {
    steps: Vec<Value>,
    normalizer: Value,
    /// Take a word that is itself a token as it is, without going through its merges.
    ignore_merges: bool,
    add_bos: bool,
}

fn byte_level(metadata: &Metadata, vocabulary: &Vocabulary) -> Result<Pipeline, Problem> {
    let name = metadata.text("tokenizer.ggml.pre")?.unwrap_or("default");
    let pre = pre_tokenizer(name)?;
    let Some(merges) = metadata.texts("tokenizer.ggml.merges")? else {
        malformed!("it has a byte-level tokenizer but no merges (`tokenizer.ggml.merges`)");
    };
    let mut pairs = Vec::with_capacity(merges.len());
    for (i, merge) in merges.iter().enumerate() {
        // A space can only be the separator, except as the first character of the left part.
        let separator = merge.char_indices().skip(1).find(|(_, c)| *c == ' ').map(|(at, _)| at);
        let Some((left, right)) = separator.map(|at| (&merge[..at], &merge[at + 1..])).filter(|(_, right)| !right.is_empty()) else {
            malformed!("merge {i} is `{}` and not two parts with a space between them", shown(merge));
        };
        let whole = [left, right].concat();
        for part in [left, right, &whole] {
            if !vocabulary.ids.contains_key(part) {
                malformed!("merge {i} is `{}` but `{}` is not a token", shown(merge), shown(part));
            }
        }
        pairs.push(json!([left, right]));
    }
    Ok(Pipeline {
        normalizer: pre.normalizer,
        pre_tokenizer: json!({ "type": "Sequence", "pretokenizers": pre.steps }),
        decoder: json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false }),
        model: json!({
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": pre.ignore_merges,
            "vocab": vocabulary.json(),
            "merges": pairs,
        }),
        add_bos: pre.add_bos,
    })
}

fn pre_tokenizer(name: &str) -> Result<PreTokenizer, Problem> {
    let split = |regex: &str| json!({ "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated", "invert": false });
    let bytes = || json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false });
    // Words with one leading space, numbers, other signs, white space except before a word.
    let words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
    // The newer family: contractions in any case, a word takes any one sign before it; they differ in numbers and in combining marks.
    let newer = |numbers: &str, letters: &str, marks: &str| {
        split(&format!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{numbers}| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ))
    };
    let nfc = || json!({ "type": "NFC" });
    let (steps, normalizer, ignore_merges, add_bos) = match name {
        "default" => {
            let steps = vec![split(r"[\p{P}\$\+<=>\^~\|]+"), split(words), split(r"\p{N}+"), split("[0-9][0-9][0-9]"), bytes()];
            (steps, Value::Null, false, false)
        }
        "gpt-2" => (vec![split(words), bytes()], Value::Null, false, false),
        "smollm" => (vec![split(r"\p{N}"), split(words), bytes()], Value::Null, false, false),
        "llama-bpe" | "llama3" | "llama-v3" => (vec![newer(r"\p{N}{1,3}", r"\p{L}", ""), bytes()], Value::Null, true, true),
        "qwen2" => (vec![newer(r"\p{N}", r"\p{L}", ""), bytes()], nfc(), false, false),
        "qwen35" => (vec![newer(r"\p{N}", r"[\p{L}\p{M}]", r"\p{M}"), bytes()], nfc(), false, false),
        other => unsupported!(
            "the pre-tokenizer `{}` (`tokenizer.ggml.pre`) is not known; known are default, gpt-2, smollm, llama-bpe, qwen2 and qwen35. \
             Forge from the Hugging Face folder instead, which has its own tokenizer.json",
            shown(other)
        ),
    };
    Ok(PreTokenizer { steps, normalizer, ignore_merges, add_bos })
}

// ---------------------------------------------------------------------------------------------------------------- SentencePiece BPE

fn sentence_piece(metadata: &Metadata, vocabulary: &Vocabulary, special: &SpecialTokens) -> Result<Pipeline, Problem> {
    let scores = match metadata.get("tokenizer.ggml.scores") {
        Some(Meta::Array(Array::F32(scores))) => scores,
        Some(_) => malformed!("`tokenizer.ggml.scores` should be a list of 32-bit floats"),
        None => malformed!("it has a SentencePiece tokenizer but no scores (`tokenizer.ggml.scores`)"),
    };
    if scores.len() != vocabulary.tokens.len() {
        malformed!("it has {} tokens but {} scores", vocabulary.tokens.len(), scores.len());
    }
    if let Some(id) = scores.iter().position(|score| score.is_nan()) {
        malformed!("the score of token {id} is not a number");
    }
    let space_prefix = metadata.boolean("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let byte_fallback = vocabulary.types.contains(&TokenType::Byte);

    let mut normalizers = vec![json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" })];
    let mut decoders = vec![
        json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    if space_prefix {
        normalizers.insert(0, json!({ "type": "Prepend", "prepend": "▁" }));
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    Ok(Pipeline {
        normalizer: json!({ "type": "Sequence", "normalizers": normalizers }),
        pre_tokenizer: Value::Null,
        decoder: json!({ "type": "Sequence", "decoders": decoders }),
        model: json!({
            "type": "BPE",
            "dropout": null,
            "unk_token": special.unknown.map(|id| vocabulary.tokens[id as usize].as_str()),
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": true,
            "byte_fallback": byte_fallback,
            "ignore_merges": false,
            "vocab": vocabulary.json(),
            "merges": merges_from_scores(vocabulary, scores)?,
        }),
        add_bos: true,
    })
}

/// SentencePiece joins the two neighbours that make the piece of the highest score; a merge list says the same when it has every way to cut each
/// piece into two pieces, best piece first. Ties are ordered as in the conversion that transformers does.
fn merges_from_scores(vocabulary: &Vocabulary, scores: &[f32]) -> Result<Vec<Value>, Problem> {
    struct Merge<'a> {
        left: &'a str,
        right: &'a str,
        score: f32,
        lengths: (usize, usize),
    }
    let normal = |piece: &str| vocabulary.ids.get(piece).copied().filter(|&id| vocabulary.types[id as usize] == TokenType::Normal);
    let mut merges = Vec::new();
    for (id, piece) in vocabulary.tokens.iter().enumerate() {
        if vocabulary.types[id] != TokenType::Normal {
            continue;
        }
        let characters = piece.chars().count();
        if characters > MAX_PIECE {
            malformed!("token {id} has {characters} characters; at most {MAX_PIECE} are possible");
        }
        let mut cuts = Vec::new();
        for (cut, (at, _)) in piece.char_indices().enumerate().skip(1) {
            let (left, right) = piece.split_at(at);
            if let (Some(left_id), Some(right_id)) = (normal(left), normal(right)) {
                cuts.push(((left_id, right_id), Merge { left, right, score: scores[id], lengths: (cut, characters - cut) }));
            }
        }
        cuts.sort_by_key(|(ids, _)| *ids);
        merges.extend(cuts.into_iter().map(|(_, merge)| merge));
    }
    // Stable, and 0 equals −0; no score is NaN.
    merges.sort_by(|a, b| b.score.partial_cmp(&a.score).unwrap_or(Ordering::Equal).then(b.lengths.cmp(&a.lengths)));
    Ok(merges.into_iter().map(|merge| json!([merge.left, merge.right])).collect())
}

// ---------------------------------------------------------------------------------------------------------------- vocabulary

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TokenType {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

struct Vocabulary {
    tokens: Vec<String>,
    types: Vec<TokenType>,
    ids: HashMap<String, u32>,
}

impl Vocabulary {
    fn read(metadata: &Metadata) -> Result<Self, Problem> {
        let Some(tokens) = metadata.texts("tokenizer.ggml.tokens")? else {
            malformed!("it has no vocabulary (`tokenizer.ggml.tokens`)");
        };
        let types = match metadata.get("tokenizer.ggml.token_type") {
            None => vec![TokenType::Normal; tokens.len()],
            Some(Meta::Array(Array::I32(numbers))) => numbers.iter().map(|&n| token_type(n)).collect(),
            Some(Meta::Array(Array::U32(numbers))) => numbers.iter().map(|&n| token_type(n as i32)).collect(),
            Some(_) => malformed!("`tokenizer.ggml.token_type` should be a list of 32-bit whole numbers"),
        };
        if types.len() != tokens.len() {
            malformed!("it has {} tokens but {} token types", tokens.len(), types.len());
        }
        let mut ids = HashMap::with_capacity(tokens.len());
        let mut named = Vec::with_capacity(tokens.len());
        for (id, token) in tokens.iter().enumerate() {
            // An empty token can never be found in a text, but its place in the vocabulary needs a name.
            let token = if token.is_empty() { format!("[EMPTY_{id}]") } else { token.clone() };
            if let Some(other) = ids.insert(token.clone(), id as u32) {
                malformed!("tokens {other} and {id} are both `{}`", shown(&token));
            }
            named.push(token);
        }
        Ok(Self { tokens: named, types, ids })
    }

    fn json(&self) -> Value {
        Value::Object(self.tokens.iter().enumerate().map(|(id, token)| (token.clone(), json!(id))).collect::<Map<_, _>>())
    }

    /// Tokens that are found in the text before anything else: special ones and those that a user added.
    fn added_tokens(&self) -> Vec<Value> {
        let added = |(id, token): (usize, &String)| {
            let special = match self.types[id] {
                TokenType::Control | TokenType::Unknown => true,
                TokenType::UserDefined => false,
                TokenType::Normal | TokenType::Unused | TokenType::Byte => return None,
            };
            let text = json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": special,
            });
            Some(text)
        };
        self.tokens.iter().enumerate().filter_map(added).collect()
    }
}

fn token_type(number: i32) -> TokenType {
    match number {
        2 => TokenType::Unknown,
        3 => TokenType::Control,
        4 => TokenType::UserDefined,
        5 => TokenType::Unused,
        6 => TokenType::Byte,
        _ => TokenType::Normal,
    }
}

/// The tokens with a role.
struct SpecialTokens {
    bos: Option<u32>,
    eos: Option<u32>,
    unknown: Option<u32>,
    padding: Option<u32>,
    /// All that end an answer.
    ends: Vec<u32>,
}

impl SpecialTokens {
    fn read(metadata: &Metadata, vocabulary: &Vocabulary, kind: &str) -> Result<Self, Problem> {
        let count = vocabulary.tokens.len();
        // SentencePiece has these ids by convention where a file does not say.
        let convention = |id: u32| (kind == "llama" && (id as usize) < count).then_some(id);
        let id = |name: &str| metadata.unsigned(&format!("tokenizer.ggml.{name}_token_id"));
        // These two matter for every text: a wrong one is an error.
        let checked = |name: &str| match id(name)? {
            Some(id) if id >= count as u64 => malformed!("the {name} token is {id} but there are only {count} tokens"),
            id => Ok(id.map(|id| id as u32)),
        };
        // Some published files have nonsense in these: then there is none.
        let lenient = |name: &str| Ok::<_, Problem>(id(name)?.filter(|&id| id < count as u64).map(|id| id as u32));

        let bos = checked("bos")?.or(convention(1));
        let eos = checked("eos")?.or(convention(2));
        let mut ends = Vec::new();
        let by_text = END_OF_ANSWER.iter().filter_map(|text| vocabulary.ids.get(*text).copied());
        let by_text = by_text.filter(|&id| matches!(vocabulary.types[id as usize], TokenType::Control));
        let mut seen = HashSet::new();
        for id in [eos, lenient("eot")?, lenient("eom")?].into_iter().flatten().chain(by_text) {
            if seen.insert(id) {
                ends.push(id);
            }
        }
        Ok(Self { bos, eos, unknown: lenient("unknown")?.or(convention(0)), padding: lenient("padding")?, ends })
    }
}

/// Puts the beginning and end tokens around a text where the file asks for them.
fn post_processor(vocabulary: &Vocabulary, special: &SpecialTokens, add_bos: bool, add_eos: bool) -> Result<Value, Problem> {
    let mut special_tokens = Map::new();
    let mut role = |wanted: bool, id: Option<u32>, name: &str| match (wanted, id) {
        (false, _) => Ok(None),
        (true, None) => malformed!("`tokenizer.ggml.add_{name}_token` is set but the file names no {name} token"),
        (true, Some(id)) => {
            let token = &vocabulary.tokens[id as usize];
            special_tokens.insert(token.clone(), json!({ "id": token, "ids": [id], "tokens": [token] }));
            Ok(Some(token.clone()))
        }
    };
    let (bos, eos) = (role(add_bos, special.bos, "bos")?, role(add_eos, special.eos, "eos")?);
    if bos.is_none() && eos.is_none() {
        return Ok(Value::Null);
    }
    let around = |sequence: &str, type_id: u32| {
        let token = |token: &String| json!({ "SpecialToken": { "id": token, "type_id": type_id } });
        let text = json!({ "Sequence": { "id": sequence, "type_id": type_id } });
        bos.iter().map(token).chain([text]).chain(eos.iter().map(token)).collect::<Vec<_>>()
    };
    Ok(json!({
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0).into_iter().chain(around("B", 1)).collect::<Vec<_>>(),
        "special_tokens": special_tokens,
    }))
}

#[cfg(test)]
mod tests;
