"""Llama: the plain decoder. Variant `other` adds the frequency scaling of Llama 3 and an explicit head size."""

from families import Family, Vocabulary

LLAMA3_SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}


def config(vocab: Vocabulary, *, size: int, hidden: int, ffn: int, layers: int, heads: int, kv: int, theta: float,
           tied: bool, **options) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": vocab["<s>"],
        "eos_token_id": vocab["</s>"],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": ffn,
        "max_position_embeddings": 4096,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": theta,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "transformers_version": "4.40.0",
        "use_cache": True,
        "vocab_size": size,
    } | options


FAMILY = Family(
    model_class="LlamaForCausalLM",
    pipeline="llama",
    template="llama.jinja",
    template_home="chat_template.jinja",
    tokenizer_config={
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<s>",
        "clean_up_tokenization_spaces": False,
        "eos_token": "</s>",
        "legacy": False,
        "model_max_length": 4096,
        "pad_token": None,
        "sp_model_kwargs": {},
        "tokenizer_class": "LlamaTokenizer",
        "unk_token": "<unk>",
        "use_default_system_prompt": False,
    },
    bos="<s>",
    eos=["</s>"],
    variants={
        "base": lambda vocab: config(
            vocab, size=467, hidden=60, ffn=92, layers=3, heads=6, kv=2, theta=10000.0, tied=True),
        "other": lambda vocab: config(
            vocab, size=449, hidden=84, ffn=110, layers=2, heads=7, kv=7, theta=500000.0, tied=False,
            head_dim=16, rope_scaling=LLAMA3_SCALING),
    },
    merges={"other": 77},
)
