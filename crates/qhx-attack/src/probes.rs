//! A probe hands any bytes to one reader and checks what comes back. It panics where something is wrong; fuzzers and harnesses notice that.

use qhx_bundle::{
    Manifest,
    media::{AudioFrontEnd, ImageFrontEnd, PatchOrder, Patches, Placeholder, Resize},
};
use qhx_forge::read::{Checkpoint, Mapping, gguf as container, gguf_tokenizer, safetensors};
use qhx_runtime::{
    media::{Image, Picture, Sound},
    text::{Chat, ChatTemplate, Message, SpecialTokens, Tokenizer},
};
use serde_json::json;

/// Accepted, with what came of it; or refused, with the message.
pub type Outcome = Result<String, String>;

/// What a fuzz target calls.
pub type Probe = fn(&[u8]) -> Outcome;

/// All probes, by the names of their fuzz targets.
pub const PROBES: [(&str, Probe); 8] = [
    ("gguf", gguf),
    ("image", image),
    ("manifest", manifest),
    ("multipart", multipart),
    ("safetensors_header", safetensors_header),
    ("sound", sound),
    ("template", template),
    ("tokenizer", tokenizer),
];

/// What files and forms are called in messages.
const NAME: &str = "input";

/// A GGUF file: container, tokenizer, configuration, and every number of every tensor.
pub fn gguf(file: &[u8]) -> Outcome {
    let parsed = container::parse(file).map_err(|problem| format!("{problem:?}"))?;
    let _ = gguf_tokenizer::build(&parsed.metadata);
    let checkpoint = Checkpoint::from_gguf(Mapping::from_bytes(NAME, file.to_vec())).map_err(refused)?;
    for info in checkpoint.tensors.tensors() {
        let tensor = checkpoint.tensors.tensor(&info.name).expect("it is in the list");
        let mut numbers = vec![0.0; info.rows() * info.columns()];
        tensor.read_f32(0..info.rows(), &mut numbers).expect("all rows can be read");
    }
    Ok(format!("{} tensors", checkpoint.tensors.tensors().len()))
}

/// An image file: decoded, scaled by both rules of size, cut into patches.
pub fn image(file: &[u8]) -> Outcome {
    let picture = Picture::decode(NAME, file).map_err(refused)?;
    assert_eq!(picture.rgb().len(), picture.width() * picture.height() * 3, "as many levels as pixels");
    let area = Resize::Area { min_pixels: 1024, max_pixels: 16384, max_aspect: 200.0 };
    let mut told = format!("{}x{}", picture.width(), picture.height());
    for (resize, order) in [(area, PatchOrder::ChannelFirst), (Resize::Budget { max_soft_rows: 7 }, PatchOrder::ChannelLast)] {
        let front_end = ImageFrontEnd {
            program: "vision".into(),
            placeholder: Placeholder { token: 0, begin: None, end: None },
            resize,
            rescale: 1.0 / 255.0,
            mean: [0.5; 3],
            std: [0.5; 3],
            patches: Patches { size: 8, block: 2, temporal: 2, order },
            position_side: Some(5),
            trained_size: None,
        };
        let Ok(image) = Image::from_picture(NAME, &picture, &front_end) else { continue };
        let patches = image.patches();
        assert_eq!(patches.len(), image.grid().count() * image.patch_numbers(), "as many numbers as patches have");
        assert!(patches.iter().all(|number| (-1.0..=1.0).contains(number)), "levels stay between black and white");
        let (index, _) = image.interpolation_taps().expect("there is a table");
        assert!(index.iter().all(|&row| (0..25).contains(&row)), "taps lie in the table");
        told += &format!(" {:?}", image.grid());
    }
    Ok(told)
}

/// A bundle's manifest. What is accepted comes back the same after writing, but for the last digit of decimal numbers.
pub fn manifest(text: &[u8]) -> Outcome {
    let text = std::str::from_utf8(text).map_err(refused)?;
    let manifest = Manifest::from_json(text).map_err(refused)?;
    let written = manifest.to_json().expect("a checked manifest can be written");
    let read = Manifest::from_json(&written).expect("and read again");
    // Only these two fields, which inform, have decimal numbers.
    let without_decimals = |mut manifest: Manifest| {
        manifest.generation = None;
        manifest.chat.template_arguments.clear();
        manifest
    };
    assert_eq!(without_decimals(read), without_decimals(manifest));
    Ok(written)
}

/// A form as browsers send it: a line with its content type, then its body.
pub fn multipart(request: &[u8]) -> Outcome {
    let end = request.iter().position(|&byte| byte == b'\n').unwrap_or(request.len());
    let (kind, body) = (String::from_utf8_lossy(&request[..end]), request.get(end + 1..).unwrap_or_default());
    let fields = qhx_server::form_fields(&kind, body)?;
    let bytes: usize = fields.iter().map(|(name, bytes)| name.len() / "\u{fffd}".len() + bytes).sum();
    assert!(bytes <= body.len(), "fields lie within their form, and not within each other");
    Ok(format!("{fields:?}"))
}

/// A safetensors file, for the forge's reader and for the bundle's.
pub fn safetensors_header(file: &[u8]) -> Outcome {
    let of_bundle = qhx_bundle::safetensors::read_header(file).map(|header| header.tensors.len());
    let tensors = safetensors::parse_header(file).map_err(|problem| format!("{problem:?}"))?;
    let mut covered = 0;
    for tensor in &tensors {
        let bytes = file.get(tensor.range.clone()).expect("a tensor lies within its file");
        let numbers = tensor.info.rows() * tensor.info.columns();
        assert_eq!(numbers * tensor.info.source_type.block().1, bytes.len(), "a tensor is as long as its shape");
        covered += bytes.len();
    }
    assert!(covered < file.len(), "tensors cannot cover the header");
    Ok(format!("{} tensors, {of_bundle:?}", tensors.len()))
}

/// A sound file: decoded, brought to another rate, split into pieces of a quarter of a second, turned into frames.
pub fn sound(file: &[u8]) -> Outcome {
    let front_end = AudioFrontEnd { max_samples: 4_000, ..AudioFrontEnd::default() };
    let sound = Sound::decode(NAME, file.to_vec(), &front_end).map_err(refused)?;
    let pieces = sound.split(&front_end);
    assert_eq!(pieces.iter().map(|piece| piece.samples().len()).sum::<usize>(), sound.samples().len(), "pieces are the whole");
    for piece in pieces.iter().take(20) {
        if let Ok(frames) = piece.frames(&front_end) {
            assert!(frames.numbers().iter().all(|number| number.is_finite()), "frames are numbers");
        }
    }
    Ok(format!("{} samples", sound.samples().len()))
}

/// A chat template: compiled, and rendered with a conversation that stays the same.
pub fn template(source: &[u8]) -> Outcome {
    let source = String::from_utf8_lossy(source);
    let template = ChatTemplate::new(&source, [("bos_token", "<s>"), ("eos_token", "</s>")]).map_err(refused)?;
    let mut chat = Chat::new(vec![
        Message::new("system", "Be brief."),
        Message::new("user", "Hello\nthere"),
        Message::new("assistant", "Hi"),
        Message::new("user", "Bye"),
    ]);
    chat.now = Some(1_700_000_000);
    let plain = template.render(&chat).map_err(refused);
    chat.tools = Some(json!([{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]));
    chat.without_system = true;
    let with_tools = template.render(&chat).map_err(refused);
    match (plain, with_tools) {
        (Err(reason), Err(_)) => Err(reason),
        (one, other) => Ok(format!("{one:?} {other:?}")),
    }
}

/// A `tokenizer.json`: read, and used for texts that are hard to cut.
pub fn tokenizer(file: &[u8]) -> Outcome {
    let tokenizer = Tokenizer::from_bytes(file).map_err(refused)?;
    let texts = [
        "Hello, world!",
        "",
        " \t\n\r\u{a0}",
        "<|im_start|>user\n<s></s>",
        "naïve 日本語 👩‍👩‍👧 e\u{301}\u{0}",
        &"ab ".repeat(700),
        &"a".repeat(4000),
    ];
    let mut told = String::new();
    for text in texts {
        for special in [SpecialTokens::Parse, SpecialTokens::AsText] {
            let ids = match tokenizer.encode(text, true, special) {
                Ok(ids) => ids,
                Err(error) => {
                    told += &error.to_string();
                    continue;
                }
            };
            let decoded = tokenizer.decode(&ids, true).map_err(refused);
            told += &format!("{} {} ", ids.len(), decoded.map_or_else(|reason| reason, |text| text.len().to_string()));
        }
    }
    let mut streamed = tokenizer.detokenizer(false);
    for id in [0, 1, 2, 77, 300, u32::MAX] {
        let _ = streamed.push(id);
    }
    let _ = streamed.flush();
    Ok(told)
}

/// The message of any error.
fn refused(error: impl std::fmt::Display) -> String {
    error.to_string()
}
