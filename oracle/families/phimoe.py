"""PhiMoE: LayerNorm, biases everywhere, an explicit head size, two experts chosen by sparsemixer. `longrope` is the long-context form."""

import torch

from families import Family, Vocabulary


def config(vocab: Vocabulary, *, size: int, hidden: int, ffn: int, layers: int, heads: int, kv: int, head_dim: int,
           experts: int, jitter: float, window: int | None, **options) -> dict:
    return {
        "architectures": ["PhiMoEForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "bos_token_id": vocab["<s>"],
        "eos_token_id": vocab["<|endoftext|>"],
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_dropout": 0.0,
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "input_jitter_noise": 0.01,
        "intermediate_size": ffn,
        "lm_head_bias": True,
        "max_position_embeddings": 4096,
        "model_type": "phimoe",
        "num_attention_heads": heads,
        "num_experts_per_tok": 2,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv,
        "num_local_experts": experts,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.0,
        "router_jitter_noise": jitter,
        "sliding_window": window,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.43.3",
        "use_cache": True,
        "vocab_size": size,
    } | options


def longrope(head_dim: int) -> dict:
    """Factors that grow along the head, and different scales, so that each of them affects the results."""
    half = head_dim // 2
    return {
        "long_factor": [round(1.0 + 0.9 * index, 2) for index in range(half)],
        "long_mscale": 1.4,
        "original_max_position_embeddings": 64,
        "short_factor": [round(1.0 + 0.07 * index, 2) for index in range(half)],
        "short_mscale": 1.1,
        "type": "longrope",
    }


def routing_margin(outputs, model_config) -> float:
    """The smallest margin of any routing decision of a pass: an expert's rank, or its place in the band."""
    closest = float("inf")
    for scores in outputs.router_logits:
        ranked = scores.sort(dim=-1, descending=True).values
        closest = min(closest, (ranked[:, :2] - ranked[:, 1:3]).min().item())
        for stage in range(2):
            best = ranked[:, stage:stage + 1]
            gap = (best - ranked) / torch.maximum(ranked.abs(), best)
            closest = min(closest, (gap - 2 * model_config.router_jitter_noise).abs().min().item())
    return closest


FAMILY = Family(
    model_class="PhimoeForCausalLM",
    pipeline="phi",
    template="phi.jinja",
    template_home="tokenizer_config.json",
    tokenizer_config={
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": "<s>",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "legacy": False,
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "padding_side": "left",
        "sp_model_kwargs": {},
        "tokenizer_class": "LlamaTokenizer",
        "unk_token": "<unk>",
        "use_default_system_prompt": False,
    },
    bos="<s>",
    eos=["<|endoftext|>", "<|end|>"],
    variants={
        "base": lambda vocab: config(
            vocab, size=487, hidden=44, ffn=28, layers=3, heads=6, kv=2, head_dim=18, experts=5, jitter=0.08, window=16),
        "longrope": lambda vocab: config(
            vocab, size=475, hidden=52, ffn=36, layers=2, heads=3, kv=1, head_dim=22, experts=4, jitter=0.03, window=None,
            original_max_position_embeddings=64, rope_scaling=longrope(22)),
        "other": lambda vocab: config(
            vocab, size=459, hidden=68, ffn=26, layers=2, heads=5, kv=5, head_dim=14, experts=7, jitter=0.05, window=23),
    },
    merges={"other": 80},
    rules=[(r"experts\.down_proj$", 0.0, "fan*1.5")],
    feed_forward_stage="moe",
    load_options={"experts_implementation": "eager"},
    forward_options={"output_router_logits": True},
    decision_margin=routing_margin,
)
