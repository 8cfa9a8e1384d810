"""Writes a Llama or Qwen3 checkpoint folder as GGUF, following the conventions of llama.cpp's converter.

    python oracle/make_gguf.py                                         the committed files, from fixtures/
    python oracle/make_gguf.py CHECKPOINT OUT.gguf [--type F16]
"""

import argparse
import json
import math
import sys
from pathlib import Path

sys.dont_write_bytecode = True

import gguf
import numpy
from gguf import GGMLQuantizationType as Type
from gguf import TokenType
from safetensors.numpy import load_file

REPOSITORY = Path(__file__).resolve().parent.parent
COMMITTED = {"llama": "llama-gguf", "qwen3": "qwen3-gguf"}
TYPES = {"F32": gguf.LlamaFileType.ALL_F32, "F16": gguf.LlamaFileType.MOSTLY_F16, "BF16": gguf.LlamaFileType.MOSTLY_BF16,
         "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0, "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
         "Q4_1": gguf.LlamaFileType.MOSTLY_Q4_1, "Q5_0": gguf.LlamaFileType.MOSTLY_Q5_0,
         "Q5_1": gguf.LlamaFileType.MOSTLY_Q5_1}
ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3}


def convert(checkpoint: Path, out: Path, type_name: str) -> None:
    """The whole conversion: dimensions, vocabulary, tensors."""
    config = read_json(checkpoint / "config.json")
    name = config["model_type"]
    if name not in ARCHITECTURES:
        raise SystemExit(f"{checkpoint}: model_type {name!r}; this script converts {', '.join(ARCHITECTURES)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(out, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[name]])
    writer.add_type("model")
    writer.add_name(f"tiny {name}")
    writer.add_file_type(TYPES[type_name])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_dimensions(writer, config)
    add_vocabulary(writer, checkpoint, config)
    add_tensors(writer, checkpoint, config, Type[type_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{out}: {name}, {type_name}, {out.stat().st_size / 1e6:.2f} MB")


def add_dimensions(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope(config)["rope_theta"])
    if config["model_type"] == "llama":
        writer.add_rope_dimension_count(head_size(config))
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])


def add_tensors(writer: gguf.GGUFWriter, checkpoint: Path, config: dict, tensor_type: Type) -> None:
    """Matrices in the requested type if their row length allows it, norms always in f32."""
    names = gguf.get_tensor_name_map(ARCHITECTURES[config["model_type"]], config["num_hidden_layers"])
    factors = llama3_factors(config)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    for file in sorted(checkpoint.glob("model*.safetensors")):
        for name, values in load_file(file).items():
            if config["model_type"] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
                heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
                values = interleave_halves(values, heads)
            target = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if target is None:
                raise SystemExit(f"{file}: GGUF has no name for {name}")
            add_tensor(writer, target, values, tensor_type)


def add_tensor(writer: gguf.GGUFWriter, name: str, values: numpy.ndarray, tensor_type: Type) -> None:
    if values.ndim == 1 or tensor_type == Type.F32:
        writer.add_tensor(name, values.astype(numpy.float32))
        return
    block, _ = gguf.GGML_QUANT_SIZES[tensor_type]
    if values.shape[-1] % block:
        tensor_type = Type.F16
    writer.add_tensor(name, gguf.quants.quantize(values, tensor_type), raw_dtype=tensor_type)


def interleave_halves(values: numpy.ndarray, heads: int) -> numpy.ndarray:
    """Rows of each head reordered from (first half, second half) to pairs: llama.cpp rotates neighbours in this architecture."""
    rows = values.shape[0]
    return values.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)


def llama3_factors(config: dict) -> numpy.ndarray | None:
    """The divisors of the rotary frequencies under Llama 3's scaling, or None without it."""
    scaling = rope(config)
    if scaling["rope_type"] != "llama3":
        return None
    size = head_size(config)
    wavelengths = 2 * math.pi * scaling["rope_theta"] ** (numpy.arange(0, size, 2) / size)
    length, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = numpy.clip((length / wavelengths - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(numpy.float32)


def add_vocabulary(writer: gguf.GGUFWriter, checkpoint: Path, config: dict) -> None:
    """Tokens up to the model's vocabulary size, padded with fillers; special ids; the chat template."""
    described = read_json(checkpoint / "tokenizer.json")
    settings = read_json(checkpoint / "tokenizer_config.json")
    added = {token["id"]: token for token in described["added_tokens"]}
    texts = {index: text for text, index in described["model"]["vocab"].items()}
    texts |= {index: token["content"] for index, token in added.items()}
    size = config["vocab_size"]
    tokens = [texts.get(index, f"[PAD{index}]") for index in range(size)]
    types = [token_type(index, texts, added) for index in range(size)]
    if config["model_type"] == "llama":
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores(sentencepiece_scores(types))
        writer.add_token_types(types)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges([" ".join(pair) for pair in described["model"]["merges"]])
    ids = {text: index for index, text in texts.items()}
    for field, add in [("bos_token", writer.add_bos_token_id), ("eos_token", writer.add_eos_token_id),
                       ("unk_token", writer.add_unk_token_id), ("pad_token", writer.add_pad_token_id)]:
        if settings.get(field) is not None:
            add(ids[settings[field]])
    writer.add_add_bos_token(settings["add_bos_token"])
    if config["model_type"] == "llama":
        writer.add_add_eos_token(settings["add_eos_token"])
    file = checkpoint / "chat_template.jinja"
    writer.add_chat_template(file.read_text(encoding="utf-8") if file.exists() else settings["chat_template"])


def token_type(index: int, texts: dict[int, str], added: dict[int, dict]) -> TokenType:
    text = texts.get(index)
    if text is None:
        return TokenType.UNUSED
    if text == "<unk>":
        return TokenType.UNKNOWN
    if index in added:
        return TokenType.CONTROL if added[index]["special"] else TokenType.USER_DEFINED
    return TokenType.BYTE if len(text) == 6 and text.startswith("<0x") else TokenType.NORMAL


def sentencepiece_scores(types: list[TokenType]) -> list[float]:
    """SentencePiece scores BPE pieces by their negative rank and everything else by 0; fillers score too low to be chosen."""
    scores, rank = [], 0
    for token_kind in types:
        if token_kind == TokenType.NORMAL:
            scores.append(-float(rank))
            rank += 1
        else:
            scores.append(-10000.0 if token_kind == TokenType.UNUSED else 0.0)
    return scores


def rope(config: dict) -> dict:
    """The rotary settings from either style of configuration, merged."""
    published = {"rope_theta": config.get("rope_theta"), "rope_type": "default"} | (config.get("rope_scaling") or {})
    return config.get("rope_parameters") or published


def head_size(config: dict) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def read_json(file: Path) -> dict:
    return json.loads(file.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", help="checkpoint folder (default: the committed fixtures)")
    parser.add_argument("out", type=Path, nargs="?", help="file to write")
    parser.add_argument("--type", choices=TYPES, default="F32", help="type of the matrices (default F32)")
    arguments = parser.parse_args()
    if arguments.checkpoint is None:
        for source, target in COMMITTED.items():
            convert(REPOSITORY / "fixtures" / source, REPOSITORY / "fixtures" / target / "model.gguf", arguments.type)
    elif arguments.out is None:
        parser.error("OUT.gguf is missing")
    else:
        convert(arguments.checkpoint, arguments.out, arguments.type)


if __name__ == "__main__":
    main()
