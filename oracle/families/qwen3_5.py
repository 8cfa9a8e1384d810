"""Qwen3.5: gated delta nets with a gated softmax attention every few layers, zero-centred norms; `mtp.*` tensors in the checkpoint."""

from families import Family, Vocabulary


def config(vocab: Vocabulary, *, size: int, hidden: int, ffn: int, layers: int, interval: int, heads: int, kv: int,
           head_dim: int, partial: float, sections: list[int], key_heads: int, key_dim: int, value_heads: int,
           value_dim: int, tied: bool, list_layers: bool, vision: dict = {}) -> dict:
    text = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "float32",
        "eos_token_id": vocab["<|endoftext|>"],
        "full_attention_interval": interval,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": ffn,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": key_dim,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": value_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 4096,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": sections,
            "partial_rotary_factor": partial,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": tied,
        "use_cache": True,
        "vocab_size": size,
    }
    if list_layers:
        text["layer_types"] = ["full_attention" if (index + 1) % interval == 0 else "linear_attention"
                               for index in range(layers)]
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": vocab["<|image_pad|>"],
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": tied,
        "transformers_version": "5.2.0",
        "video_token_id": vocab["<|video_pad|>"],
        "vision_config": {
            "deepstack_visual_indexes": [],
            "depth": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 16,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": 36,
            "model_type": "qwen3_5",
            "num_heads": 2,
            "num_position_embeddings": 36,
            "out_hidden_size": hidden,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        } | vision,
        "vision_end_token_id": vocab["<|vision_end|>"],
        "vision_start_token_id": vocab["<|vision_start|>"],
    }


def prediction_tensors(published: dict) -> dict[str, tuple[int, ...]]:
    """The layer for multi-token prediction that published files carry and transformers does not load."""
    text = published["text_config"]
    hidden, ffn, head_dim = text["hidden_size"], text["intermediate_size"], text["head_dim"]
    queries, keys = text["num_attention_heads"] * head_dim, text["num_key_value_heads"] * head_dim
    return {
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.layers.0.input_layernorm.weight": (hidden,),
        "mtp.layers.0.mlp.down_proj.weight": (hidden, ffn),
        "mtp.layers.0.mlp.gate_proj.weight": (ffn, hidden),
        "mtp.layers.0.mlp.up_proj.weight": (ffn, hidden),
        "mtp.layers.0.post_attention_layernorm.weight": (hidden,),
        "mtp.layers.0.self_attn.k_norm.weight": (head_dim,),
        "mtp.layers.0.self_attn.k_proj.weight": (keys, hidden),
        "mtp.layers.0.self_attn.o_proj.weight": (hidden, queries),
        "mtp.layers.0.self_attn.q_norm.weight": (head_dim,),
        "mtp.layers.0.self_attn.q_proj.weight": (2 * queries, hidden),
        "mtp.layers.0.self_attn.v_proj.weight": (keys, hidden),
        "mtp.norm.weight": (hidden,),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
    }


FAMILY = Family(
    model_class="Qwen3_5ForConditionalGeneration",
    pipeline="qwen35",
    template="qwen3_5.jinja",
    template_home="chat_template.jinja",
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
            vocab, size=373, hidden=56, ffn=76, layers=5, interval=4, heads=3, kv=1, head_dim=32, partial=0.25,
            sections=[2, 1, 1], key_heads=2, key_dim=12, value_heads=6, value_dim=10, tied=True, list_layers=True),
        "other": lambda vocab: config(
            vocab, size=359, hidden=76, ffn=58, layers=4, interval=2, heads=4, kv=2, head_dim=24, partial=0.5,
            sections=[2, 2, 2], key_heads=3, key_dim=8, value_heads=3, value_dim=14, tied=False, list_layers=False,
            vision={"depth": 3, "hidden_size": 24, "intermediate_size": 20, "num_heads": 3, "num_position_embeddings": 16, "patch_size": 8}),
    },
    merges={"other": 72},
    rules=[
        (r"linear_attn\.norm\.weight$", 1.0, 0.2),
        (r"^model\.language_model\.norm\.weight$", 0.8, 0.3),
        (r"language_model.*\.[qk]_norm\.weight$", 0.5, 0.2),
        (r"language_model.*norm\.weight$", 0.0, 0.2),
        (r"A_log$", 0.5, 0.7),
        (r"dt_bias$", -2.0, 1.0),
        (r"linear_attn\.out_proj\.weight$", 0.0, "fan*0.8"),
    ],
    extra_tensors=prediction_tensors,
    media_module="qwen_media",
    quiet=["<|image_pad|>", "<|video_pad|>", "<|vision_pad|>", "<|vision_start|>", "<|vision_end|>"],
)
