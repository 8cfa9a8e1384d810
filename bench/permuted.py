"""A Llama-style GGUF file as f32 weights with permuted channels: a Hugging Face checkpoint and a GGUF file of the same numbers.

The weights of a quantised file lie on the grid of its blocks, which favours quantisers with the same blocks. Permuting channels takes them off that grid and
leaves the model the same function: the channels of the residual stream, those inside each feed-forward layer, and those of each value head, which the output
projection reads in the same order. Channels of queries and keys stay, because rotary embeddings pair them.
"""

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
# Kinds of tokens in GGUF.
CONTROL, USER_DEFINED = 3, 4


class Source:
    """A GGUF file of a Llama-style model with a tied head and the SmolLM tokenizer; `weights` have Hugging Face's names and layout, in f32."""

    def __init__(self, path: Path):
        self.reader = gguf.GGUFReader(path)
        self.facts = {name: field.contents() for name, field in self.reader.fields.items()}
        kind = self.facts.get("general.architecture"), self.facts.get("tokenizer.ggml.pre")
        if kind != ("llama", "smollm"):
            raise ValueError(f"{path}: expected a llama model with the smollm tokenizer, found {kind[0]} with {kind[1]}")
        self.layers = self.facts["llama.block_count"]
        self.heads = self.facts["llama.attention.head_count"]
        self.value_heads = self.facts["llama.attention.head_count_kv"]
        self.weights = {}
        for tensor in self.reader.tensors:
            name = hugging_face_name(tensor.name)
            weight = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            self.weights[name] = halves(weight, self.rotary_heads(name)) if self.rotary_heads(name) else weight

    def rotary_heads(self, name: str):
        """How many heads the rows of a projection have whose channels are rotated; otherwise none."""
        return {"q_proj": self.heads, "k_proj": self.value_heads}.get(name.split(".")[-2])

    def permuted(self, seed: int) -> dict:
        """The weights with permuted channels."""
        random = np.random.default_rng(seed)
        old = self.weights
        channels = random.permutation(old["model.norm.weight"].size)
        new = {"model.norm.weight": old["model.norm.weight"][channels], "model.embed_tokens.weight": old["model.embed_tokens.weight"][:, channels]}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            inner = random.permutation(old[f"{prefix}mlp.gate_proj.weight"].shape[0])
            values, outputs = self.value_permutations(random, old[f"{prefix}self_attn.v_proj.weight"].shape[0] // self.value_heads)
            rows = {"v_proj": values, "o_proj": channels, "gate_proj": inner, "up_proj": inner, "down_proj": channels}
            columns = {"o_proj": outputs, "down_proj": inner}
            for name in (f"{prefix}{name}.weight" for name in LAYER_NAMES.values()):
                weight, kind = old[name], name.split(".")[-2]
                if weight.ndim == 1:
                    new[name] = weight[channels]
                else:
                    new[name] = weight[rows.get(kind, slice(None))][:, columns.get(kind, channels)]
        if new.keys() != old.keys():
            raise ValueError(f"unexpected tensors: {', '.join(sorted(new.keys() ^ old.keys()))}")
        return {name: np.ascontiguousarray(weight) for name, weight in new.items()}

    def value_permutations(self, random, size: int):
        """The rows of the value projection, and the columns of the output projection that read them."""
        heads = [random.permutation(size) for _ in range(self.value_heads)]
        group = self.heads // self.value_heads
        values = np.concatenate([head * size + order for head, order in enumerate(heads)])
        return values, np.concatenate([head * size + heads[head // group] for head in range(self.heads)])

    def write_checkpoint(self, folder: Path, weights: dict):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config(), indent=2))
        self.tokenizer().save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(self.tokenizer_config(), indent=2))

    def config(self) -> dict:
        facts, embedding = self.facts, self.weights["model.embed_tokens.weight"]
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "vocab_size": embedding.shape[0],
            "hidden_size": embedding.shape[1],
            "intermediate_size": facts["llama.feed_forward_length"],
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.value_heads,
            "max_position_embeddings": facts["llama.context_length"],
            "rope_theta": facts["llama.rope.freq_base"],
            "rms_norm_eps": round(facts["llama.attention.layer_norm_rms_epsilon"], 12),
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
            "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        }

    def tokenizer(self) -> Tokenizer:
        facts = self.facts
        texts = facts["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
        tokenizer = Tokenizer(models.BPE({text: id for id, text in enumerate(texts)}, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
        tokenizer.decoder = decoders.ByteLevel()
        for text, kind in zip(texts, facts["tokenizer.ggml.token_type"], strict=True):
            if kind == CONTROL:
                tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True)])
            elif kind == USER_DEFINED:
                tokenizer.add_tokens([AddedToken(text, normalized=False)])
        return tokenizer

    def tokenizer_config(self) -> dict:
        texts, facts = self.facts["tokenizer.ggml.tokens"], self.facts
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        special = {name: texts[facts[f"tokenizer.ggml.{key}_token_id"]] for name, key in names.items()}
        return {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": facts["tokenizer.chat_template"], **special}

    def write_gguf(self, path: Path, weights: dict):
        """The same weights as a GGUF file in f32, with the tokenizer of this one."""
        writer = gguf.GGUFWriter(path, self.facts["general.architecture"])
        skipped = {"general.architecture", "general.file_type", "general.quantization_version"}
        for name, field in self.reader.fields.items():
            if name not in skipped and not name.startswith("GGUF."):
                sub_type = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(name, field.contents(), field.types[0], sub_type)
        writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        for tensor in self.reader.tensors:
            name = hugging_face_name(tensor.name)
            heads = self.rotary_heads(name)
            writer.add_tensor(tensor.name, interleaved(weights[name], heads) if heads else weights[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def hugging_face_name(name: str) -> str:
    """The checkpoint's name of a tensor in GGUF."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
    return f"{OUTER_NAMES[parts[0]]}.weight"


def halves(weight, heads: int):
    """Rows of rotated pairs next to each other, as GGUF has them, to one half of a head after the other, as Hugging Face has them."""
    return np.ascontiguousarray(weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape))


def interleaved(weight, heads: int):
    """The reverse of `halves`."""
    return np.ascontiguousarray(weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape))
