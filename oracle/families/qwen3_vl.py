"""Qwen3-VL: the Qwen3 text model with interleaved M-RoPE, tied head, and a small vision tower."""

from families import Family, Vocabulary


def config(vocab: Vocabulary, *, size: int, hidden: int, ffn: int, layers: int, heads: int, kv: int, head_dim: int,
           sections: list[int], tied: bool, vision_hidden: int, vision_heads: int, vision: dict = {}) -> dict:
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": vocab["<|image_pad|>"],
        "model_type": "qwen3_vl",
        "text_config": {
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
            "max_position_embeddings": 4096,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "num_key_value_heads": kv,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": sections, "rope_type": "default"},
            "rope_theta": 5000000,
            "tie_word_embeddings": tied,
            "use_cache": True,
            "vocab_size": size,
        },
        "tie_word_embeddings": tied,
        "transformers_version": "4.57.0",
        "video_token_id": vocab["<|video_pad|>"],
        "vision_config": {
            "deepstack_visual_indexes": [0, 2],
            "depth": 4,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": vision_hidden,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": 2 * vision_hidden + 4,
            "model_type": "qwen3_vl",
            "num_heads": vision_heads,
            "num_position_embeddings": 36,
            "out_hidden_size": hidden,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        } | vision,
        "vision_end_token_id": vocab["<|vision_end|>"],
        "vision_start_token_id": vocab["<|vision_start|>"],
    }


FAMILY = Family(
    model_class="Qwen3VLForConditionalGeneration",
    pipeline="qwen",
    template="qwen3_vl.jinja",
    template_home="chat_template.json",
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
            vocab, size=389, hidden=72, ffn=100, layers=3, heads=6, kv=3, head_dim=20, sections=[4, 3, 3], tied=True,
            vision_hidden=16, vision_heads=2),
        "other": lambda vocab: config(
            vocab, size=431, hidden=88, ffn=76, layers=2, heads=5, kv=1, head_dim=36, sections=[8, 5, 5], tied=False,
            vision_hidden=24, vision_heads=2,
            vision={"deepstack_visual_indexes": [1], "depth": 3, "num_position_embeddings": 49, "patch_size": 6, "spatial_merge_size": 3,
                    "temporal_patch_size": 1}),
    },
    merges={"other": 70},
    media_module="qwen_media",
    quiet=["<|image_pad|>", "<|video_pad|>", "<|vision_pad|>", "<|vision_start|>", "<|vision_end|>"],
)
