"""Gemma 4, E variant: per-layer embeddings, shared keys and values, two head sizes, windows, softcap, both towers in the checkpoint."""

from families import Family, Vocabulary

S, F = "sliding_attention", "full_attention"


def config(vocab: Vocabulary, *, size: int, hidden: int, ffn: int, layers: list[str], heads: int, kv: int, head_dim: int,
           full_head_dim: int, per_layer: int, window: int, shared: int, double_wide: bool, modern: bool,
           vision: dict = {}, audio: dict = {}) -> dict:
    text = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": False,
        "bos_token_id": vocab["<bos>"],
        "dtype": "float32",
        "enable_moe_block": False,
        "eos_token_id": vocab["<eos>"],
        "final_logit_softcapping": 30.0,
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": hidden,
        "hidden_size_per_layer_input": per_layer,
        "initializer_range": 0.02,
        "intermediate_size": ffn,
        "layer_types": layers,
        "max_position_embeddings": 4096,
        "model_type": "gemma4_text",
        "moe_intermediate_size": None,
        "num_attention_heads": heads,
        "num_experts": None,
        "num_hidden_layers": len(layers),
        "num_key_value_heads": kv,
        "num_kv_shared_layers": shared,
        "pad_token_id": vocab["<pad>"],
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            F: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            S: {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": window,
        "tie_word_embeddings": True,
        "top_k_experts": None,
        "use_bidirectional_attention": None,
        "use_cache": True,
        "use_double_wide_mlp": double_wide,
        "vocab_size": size,
        "vocab_size_per_layer_input": size,
    }
    if modern:  # transformers 5 writes exceptions per layer
        digits = len(str(len(layers) - 1))
        text["per_layer_config"] = {
            str(index).zfill(digits): {"head_dim": full_head_dim} for index, kind in enumerate(layers) if kind == F}
    else:
        text |= {"global_head_dim": full_head_dim, "num_global_key_value_heads": None}
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": {
            "attention_chunk_size": 12,
            "attention_context_left": 13,
            "attention_context_right": 0,
            "attention_invalid_logits_value": -1000000000.0,
            "attention_logit_cap": 50.0,
            "conv_kernel_size": 5,
            "gradient_clipping": 10000000000.0,
            "hidden_act": "silu",
            "hidden_size": 16,
            "model_type": "gemma4_audio",
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "output_proj_dims": 20,
            "residual_weight": 0.5,
            "rms_norm_eps": 1e-06,
            "subsampling_conv_channels": [128, 2],
            "use_clipped_linears": True,
        } | audio,
        "audio_token_id": vocab["<|audio|>"],
        "boa_token_id": vocab["<|audio>"],
        "boi_token_id": vocab["<|image>"],
        "dtype": "float32",
        "eoa_token_id": vocab["<audio|>"],
        "eoa_token_index": vocab["<audio|>"],
        "eoi_token_id": vocab["<image|>"],
        "eos_token_id": [vocab["<eos>"], vocab["<turn|>"]],
        "image_token_id": vocab["<|image|>"],
        "initializer_range": 0.02,
        "model_type": "gemma4",
        "text_config": text,
        "tie_word_embeddings": True,
        "transformers_version": "5.5.0",
        "video_token_id": vocab["<|video|>"],
        "vision_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": 8,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 16,
            "intermediate_size": 28,
            "max_position_embeddings": 4096,
            "model_type": "gemma4_vision",
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "position_embedding_size": 64,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
            "standardize": False,
            "use_clipped_linears": True,
        } | vision,
        "vision_soft_tokens_per_image": 280,
    }


def stray_tensors(published: dict) -> dict[str, tuple[int, ...]]:
    """Keys and values of layers that share those of another layer: published files have them, and nothing may use them."""
    text = published["text_config"]
    tensors = {}
    for index, kind in enumerate(text["layer_types"]):
        if index < text["num_hidden_layers"] - text["num_kv_shared_layers"]:
            continue
        head_dim = full_head_dim(text) if kind == F else text["head_dim"]
        prefix = f"model.language_model.layers.{index}.self_attn"
        rows = text["num_key_value_heads"] * head_dim
        tensors[f"{prefix}.k_proj.weight"] = tensors[f"{prefix}.v_proj.weight"] = (rows, text["hidden_size"])
        tensors[f"{prefix}.k_norm.weight"] = (head_dim,)
    return tensors


def full_head_dim(text: dict) -> int:
    return text.get("global_head_dim") or next(iter(text["per_layer_config"].values()))["head_dim"]


FAMILY = Family(
    model_class="Gemma4ForConditionalGeneration",
    pipeline="gemma",
    template="gemma4.jinja",
    template_home="chat_template.jinja",
    tokenizer_config={
        "bos_token": "<bos>",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<eos>",
        "mask_token": "<mask>",
        "model_max_length": 4096,
        "pad_token": "<pad>",
        "padding_side": "left",
        "tokenizer_class": "GemmaTokenizer",
        "unk_token": "<unk>",
    },
    bos="<bos>",
    eos=["<eos>", "<turn|>"],
    variants={
        "base": lambda vocab: config(
            vocab, size=499, hidden=44, ffn=58, layers=[S, S, F, S, F, S, S, F], heads=6, kv=2, head_dim=12,
            full_head_dim=24, per_layer=10, window=16, shared=3, double_wide=False, modern=False),
        "other": lambda vocab: config(
            vocab, size=485, hidden=52, ffn=38, layers=[F, S, S, F, S, F], heads=3, kv=1, head_dim=20,
            full_head_dim=16, per_layer=6, window=21, shared=2, double_wide=True, modern=True,
            vision={"head_dim": 12, "hidden_size": 20, "intermediate_size": 36, "num_attention_heads": 4, "num_hidden_layers": 3,
                    "num_key_value_heads": 2, "patch_size": 8, "pooling_kernel_size": 2, "position_embedding_size": 24,
                    "rope_parameters": {"rope_theta": 50.0, "rope_type": "axial"}, "standardize": True, "use_clipped_linears": False},
            audio={"attention_chunk_size": 5, "attention_context_left": 6, "attention_logit_cap": 6.0, "conv_kernel_size": 3,
                   "hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 3, "output_proj_dims": 14, "residual_weight": 0.7,
                   "subsampling_conv_channels": [48, 3], "use_clipped_linears": False}),
    },
    merges={"other": 78},
    rules=[
        (r"^model\.language_model\.norm\.weight$", 12.0, 1.5),
        (r"language_model.*\.[qk]_norm\.weight$", 0.7, 0.1),
        (r"language_model.*post_\w*norm\.weight$", 0.5, 0.1),
        (r"language_model\.embed_tokens\.weight$", 0.0, 0.07),
        (r"layer_scalar$", 0.9, 0.15),
        (r"(input|output)_min$", -3.0, 0.3),
        (r"(input|output)_max$", 3.0, 0.3),
        (r"per_dim_scale$", 0.0, 0.3),
        (r"std_bias$", 0.0, 1.0),
        (r"std_scale$", 1.0, 0.3),
    ],
    extra_tensors=stray_tensors,
    attention_residual="pre_feedforward_layernorm",
    media_module="gemma4_media",
    quiet=["<|image>", "<|image|>", "<image|>", "<|audio>", "<|audio|>", "<audio|>", "<|video|>"],
)
