"""Qwen3: q/k norms, grouped queries, head size independent of the width. Sharded files; transformers-5 configuration."""

from families import Family, Vocabulary


def config(vocab: Vocabulary, *, size: int, hidden: int, ffn: int, layers: int, heads: int, kv: int, head_dim: int,
           tied: bool) -> dict:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": vocab["<|endoftext|>"],
        "dtype": "float32",
        "eos_token_id": vocab["<|im_end|>"],
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": ffn,
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": 4096,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv,
        "pad_token_id": None,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "transformers_version": "5.22.2",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": size,
    }


FAMILY = Family(
    model_class="Qwen3ForCausalLM",
    pipeline="qwen",
    template="qwen3.jinja",
    template_home="tokenizer_config.json",
    tokenizer_config={
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    },
    eos=["<|im_end|>", "<|endoftext|>"],
    variants={
        "base": lambda vocab: config(
            vocab, size=383, hidden=80, ffn=116, layers=3, heads=3, kv=1, head_dim=26, tied=False),
        "other": lambda vocab: config(
            vocab, size=369, hidden=52, ffn=70, layers=4, heads=6, kv=3, head_dim=18, tied=True),
    },
    merges={"other": 75},
    shard_bytes=300_000,
)
