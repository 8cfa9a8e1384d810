"""Writes a GGUF file with random weights in the shape of a configuration, to compare speed (not answers) with llama.cpp.

usage: peer_gguf.py CONFIG.json Q8_0|Q4_0|F16 OUT.gguf      (needs PyPI gguf and numpy)

Text program only. Names and dimensions are llama.cpp's; matrices get the requested type, vectors, routers and convolutions f32. As in the files that its own quantise function makes, the output head (or the table where it is the head, too) of a Q4_0 file is
Q6_K, or Q8_0 where rows are no multiple of 256.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy
from gguf import GGMLQuantizationType as Type

DEVIATION = 0.02


class Model:
    """The contents of a file: settings go straight to the writer, tensors are collected as (name, shape, type, fill)."""

    def __init__(self, out: Path, architecture: str, matrix: Type, config: dict):
        self.writer = gguf.GGUFWriter(out, architecture)
        self.matrix_type, self.config, self.tensors, self.deepstack = matrix, config, [], 0

    def matrix(self, name: str, *shape: int, type: Type | None = None):
        """A weight of `[.., outputs, inputs]`."""
        self.tensors.append((f"{name}.weight", shape, self.matrix_type if type is None else type, None))

    def head(self, name: str, outputs: int, inputs: int):
        """The output head."""
        finer = Type.Q6_K if inputs % 256 == 0 else Type.Q8_0
        self.matrix(name, outputs, inputs, type=finer if self.matrix_type == Type.Q4_0 else None)

    def vector(self, name: str, length: int, fill: float = 1.0):
        self.tensors.append((name, (length,), Type.F32, numpy.full(length, fill, numpy.float32)))

    def norm(self, name: str, length: int):
        self.vector(f"{name}.weight", length)

    def bias(self, name: str, length: int):
        self.vector(f"{name}.bias", length, 0.0)

    def common(self):
        """Settings common to all architectures, and a vocabulary of made-up words."""
        config, add = self.config, self.writer
        add.add_block_count(config["num_hidden_layers"])
        add.add_context_length(config["max_position_embeddings"])
        add.add_embedding_length(config["hidden_size"])
        add.add_feed_forward_length(config["intermediate_size"])
        add.add_head_count(config["num_attention_heads"])
        add.add_head_count_kv(config["num_key_value_heads"])
        add.add_layer_norm_rms_eps(config["rms_norm_eps"])
        size = config["vocab_size"]
        special = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
        add.add_tokenizer_model("llama")
        add.add_tokenizer_pre("default")
        add.add_token_list(special + [f"word{i}" for i in range(size - len(special))])
        add.add_token_scores([-float(i) for i in range(size)])
        add.add_token_types([2, 3, 3] + [6] * 256 + [1] * (size - len(special)))
        add.add_bos_token_id(1)
        add.add_eos_token_id(2)
        add.add_unk_token_id(0)
        add.add_vocab_size(size)

    def heads(self, dim: int, theta: float):
        self.writer.add_key_length(dim)
        self.writer.add_value_length(dim)
        self.writer.add_rope_freq_base(theta)

    def attention(self, layer: str, heads: int, kv_heads: int, dim: int, *, bias: bool = False, head_norms: bool = False, own_kv: bool = True):
        hidden = self.config["hidden_size"]
        parts = {"q": heads * dim} | ({"k": kv_heads * dim, "v": kv_heads * dim} if own_kv else {})
        for part, outputs in parts.items():
            self.matrix(f"{layer}attn_{part}", outputs, hidden)
            if bias:
                self.bias(f"{layer}attn_{part}", outputs)
            if head_norms and part != "v":
                self.norm(f"{layer}attn_{part}_norm", dim)

    def ffn(self, layer: str):
        hidden, inner = self.config["hidden_size"], self.config["intermediate_size"]
        self.matrix(f"{layer}ffn_gate", inner, hidden)
        self.matrix(f"{layer}ffn_up", inner, hidden)
        self.matrix(f"{layer}ffn_down", hidden, inner)

    def write(self):
        """Writes everything; matrices are blocks from one long random sequence."""
        for name, shape, type, fill in self.tensors:
            rows, columns = int(numpy.prod(shape[:-1])), shape[-1]
            block, size = gguf.GGML_QUANT_SIZES[type]
            whole = type in (Type.F32, Type.F16)
            stored = shape if whole else (*shape[:-1], columns // block * size)
            number = numpy.dtype({Type.F32: numpy.float32, Type.F16: numpy.float16}.get(type, numpy.uint8))
            self.writer.add_tensor_info(name, stored, number, rows * columns // block * size, None if whole else type)
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_ti_data_to_file()
        file, pools, drawn = self.writer.fout[0], {}, 0
        file.write(bytes(-file.tell() % 32))
        for name, shape, type, fill in self.tensors:
            block, size = gguf.GGML_QUANT_SIZES[type]
            count = int(numpy.prod(shape)) // block
            if fill is not None:
                file.write(fill.tobytes())
            else:
                if type not in pools:
                    pools[type] = random_blocks(type)
                pool = pools[type]
                left, at = count, drawn % len(pool)
                while left:
                    taken = pool[at : at + left]
                    file.write(taken.tobytes())
                    left, at = left - len(taken), 0
                drawn += count + 7919
            file.write(bytes(-(count * size) % 32))
        self.writer.close()


def random_blocks(type: Type) -> numpy.ndarray:
    """Tens of millions of random numbers as rows of stored blocks."""
    random, (block, size) = numpy.random.default_rng(1234), gguf.GGML_QUANT_SIZES[type]
    if type in (Type.F32, Type.F16):
        numbers = random.standard_normal(1 << 24, numpy.float32) * DEVIATION
        return numbers.astype(numpy.float16 if type == Type.F16 else numpy.float32).reshape(-1, 1)
    blocks = numpy.frombuffer(random.bytes(size << 20), numpy.uint8).reshape(-1, size).copy()
    # Quants are uniformly distributed. The scale of a block is in its first two bytes; Q6_K has it in the last two, after 16 factors of a byte each.
    largest = {Type.Q8_0: 127, Type.Q4_0: 8, Type.Q6_K: 32 * 64}[type]
    place = slice(-2, None) if type == Type.Q6_K else slice(2)
    if type == Type.Q6_K:
        blocks[:, -18:-2] = 64
    blocks[:, place] = numpy.array([DEVIATION * 3**0.5 / largest], numpy.float16).view(numpy.uint8)
    return blocks


def phimoe(model: Model):
    config = model.config
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    model.heads(dim, config["rope_theta"])
    model.writer.add_rope_dimension_count(dim)
    model.writer.add_rope_scaling_orig_ctx_len(config["max_position_embeddings"])
    model.writer.add_expert_count(experts)
    model.writer.add_expert_used_count(config["num_experts_per_tok"])
    model.matrix("token_embd", config["vocab_size"], hidden)
    model.head("output", config["vocab_size"], hidden)
    model.bias("output", config["vocab_size"])
    model.norm("output_norm", hidden)
    model.bias("output_norm", hidden)
    for layer in (f"blk.{i}." for i in range(config["num_hidden_layers"])):
        for norm in ("attn_norm", "ffn_norm"):
            model.norm(layer + norm, hidden)
            model.bias(layer + norm, hidden)
        model.attention(layer, heads, kv_heads, dim, bias=True)
        model.matrix(f"{layer}attn_output", hidden, heads * dim)
        model.bias(f"{layer}attn_output", hidden)
        model.matrix(f"{layer}ffn_gate_inp", experts, hidden, type=Type.F32)
        model.matrix(f"{layer}ffn_gate_exps", experts, inner, hidden)
        model.matrix(f"{layer}ffn_up_exps", experts, inner, hidden)
        model.matrix(f"{layer}ffn_down_exps", experts, hidden, inner)


def qwen35(model: Model):
    config, rope = model.config, model.config["rope_parameters"]
    hidden, heads, kv_heads, dim = (config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    key_heads, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    value_heads, value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    keys, values, taps, every = key_heads * key_dim, value_heads * value_dim, config["linear_conv_kernel_dim"], config["full_attention_interval"]
    model.heads(dim, rope["rope_theta"])
    add = model.writer
    add.add_rope_dimension_count(int(dim * rope["partial_rotary_factor"]))
    add.add_rope_dimension_sections([*rope["mrope_section"], 0])
    add.add_ssm_conv_kernel(taps)
    add.add_ssm_state_size(key_dim)
    add.add_ssm_group_count(key_heads)
    add.add_ssm_time_step_rank(value_heads)
    add.add_ssm_inner_size(values)
    add.add_full_attention_interval(every)
    model.head("token_embd", config["vocab_size"], hidden)
    model.norm("output_norm", hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"blk.{i}."
        model.norm(f"{layer}attn_norm", hidden)
        model.norm(f"{layer}post_attention_norm", hidden)
        if (i + 1) % every == 0:
            model.matrix(f"{layer}attn_q", 2 * heads * dim, hidden)
            model.matrix(f"{layer}attn_k", kv_heads * dim, hidden)
            model.matrix(f"{layer}attn_v", kv_heads * dim, hidden)
            model.matrix(f"{layer}attn_output", hidden, heads * dim)
            model.norm(f"{layer}attn_q_norm", dim)
            model.norm(f"{layer}attn_k_norm", dim)
        else:
            model.matrix(f"{layer}attn_qkv", 2 * keys + values, hidden)
            model.matrix(f"{layer}attn_gate", values, hidden)
            model.matrix(f"{layer}ssm_conv1d", 2 * keys + values, taps, type=Type.F32)
            model.vector(f"{layer}ssm_dt.bias", value_heads, 0.0)
            model.vector(f"{layer}ssm_a", value_heads, -1.0)
            model.matrix(f"{layer}ssm_beta", value_heads, hidden)
            model.matrix(f"{layer}ssm_alpha", value_heads, hidden)
            model.norm(f"{layer}ssm_norm", value_dim)
            model.matrix(f"{layer}ssm_out", hidden, values)
        model.ffn(layer)


def gemma4(model: Model):
    config = model.config
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    layers, small, large = config["num_hidden_layers"], config["head_dim"], config["global_head_dim"]
    per_layer, own = config["hidden_size_per_layer_input"], layers - config["num_kv_shared_layers"]
    sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
    rope = config["rope_parameters"]
    model.heads(large, rope["full_attention"]["rope_theta"])
    add = model.writer
    add.add_key_length_swa(small)
    add.add_value_length_swa(small)
    add.add_sliding_window(config["sliding_window"])
    add.add_sliding_window_pattern(sliding)
    add.add_shared_kv_layers(config["num_kv_shared_layers"])
    add.add_embedding_length_per_layer_input(per_layer)
    add.add_final_logit_softcapping(config["final_logit_softcapping"])
    add.add_rope_dimension_count(large)
    add.add_rope_dimension_count_swa(small)
    add.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    model.head("token_embd", config["vocab_size"], hidden)
    model.matrix("per_layer_token_embd", config["vocab_size"], per_layer * layers)
    # llama.cpp's own converter keeps this one in f16.
    model.matrix("per_layer_model_proj", per_layer * layers, hidden, type=Type.F16)
    model.norm("per_layer_proj_norm", per_layer)
    model.norm("output_norm", hidden)
    turning = int(large * rope["full_attention"]["partial_rotary_factor"]) // 2
    still = numpy.full(large // 2, 1e30, numpy.float32)
    still[:turning] = 1
    model.tensors.append(("rope_freqs.weight", still.shape, Type.F32, still))
    for i in range(layers):
        layer, dim = f"blk.{i}.", small if sliding[i] else large
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm"):
            model.norm(layer + norm, hidden)
        model.attention(layer, heads, kv_heads, dim, head_norms=True, own_kv=i < own)
        model.matrix(f"{layer}attn_output", hidden, heads * dim)
        model.norm(f"{layer}layer_output_scale", 1)
        model.ffn(layer)
        model.matrix(f"{layer}inp_gate", per_layer, hidden)
        model.matrix(f"{layer}proj", hidden, per_layer)


def qwen3vl(model: Model):
    config = model.config
    hidden, heads, kv_heads, dim = (config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    model.heads(dim, config["rope_theta"])
    model.writer.add_rope_dimension_sections([*config["rope_scaling"]["mrope_section"], 0])
    model.writer.add_num_deepstack_layers(model.deepstack)
    model.head("token_embd", config["vocab_size"], hidden)
    model.norm("output_norm", hidden)
    for layer in (f"blk.{i}." for i in range(config["num_hidden_layers"])):
        model.norm(f"{layer}attn_norm", hidden)
        model.norm(f"{layer}ffn_norm", hidden)
        model.attention(layer, heads, kv_heads, dim, head_norms=True)
        model.matrix(f"{layer}attn_output", hidden, heads * dim)
        model.ffn(layer)


def llama(model: Model):
    config = model.config
    hidden, heads, kv_heads, dim = (config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    model.heads(dim, config["rope_theta"])
    model.writer.add_rope_dimension_count(dim)
    model.head("token_embd", config["vocab_size"], hidden)
    model.norm("output_norm", hidden)
    for layer in (f"blk.{i}." for i in range(config["num_hidden_layers"])):
        model.norm(f"{layer}attn_norm", hidden)
        model.norm(f"{layer}ffn_norm", hidden)
        model.attention(layer, heads, kv_heads, dim)
        model.matrix(f"{layer}attn_output", hidden, heads * dim)
        model.ffn(layer)


FAMILIES = {"llama": llama, "phimoe": phimoe, "qwen3_5": qwen35, "gemma4": gemma4, "qwen3_vl": qwen3vl}


def write(config: dict, quants: str, out: Path):
    """Writes the file."""
    family = FAMILIES[config["model_type"]]
    model = Model(out, family.__name__, Type[quants], config.get("text_config", config))
    model.deepstack = len(config.get("vision_config", {}).get("deepstack_visual_indexes", []))
    model.common()
    family(model)
    model.writer.add_file_type({"F16": 1, "Q4_0": 2, "Q8_0": 7}[quants])
    model.writer.add_quantization_version(2)
    model.write()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    write(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2], Path(sys.argv[3]))
