"""The four demo models: real architectures, tiny dimensions, below four million weights each."""

from collections.abc import Callable
from dataclasses import dataclass, field

S, F = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Demo:
    name: str
    """Folder of the checkpoint."""
    model_class: str
    """Class of transformers."""
    pipeline: str
    """Style of the vocabulary: one of `oracle/vocabulary.py`."""
    template: str
    """Chat template in `oracle/templates`."""
    tokenizer_config: dict
    end_tokens: list[str]
    """What ends a generation; the first is what ends a turn of the chat."""
    pad_token: str
    config: Callable[[dict[str, int]], dict]
    """`config.json`, given the ids of all tokens."""
    preprocessing: dict[str, dict] = field(default_factory=dict)
    """Further files: name to content."""


def phimoe(ids: dict[str, int]) -> dict:
    return {
        "architectures": ["PhiMoEForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "bos_token_id": ids["<s>"],
        "dtype": "float16",
        "eos_token_id": ids["<|endoftext|>"],
        "head_dim": 48,
        "hidden_act": "silu",
        "hidden_dropout": 0.0,
        "hidden_size": 128,
        "initializer_range": 0.02,
        "input_jitter_noise": 0.01,
        "intermediate_size": 224,
        "lm_head_bias": True,
        "max_position_embeddings": 4096,
        "model_type": "phimoe",
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "output_router_logits": False,
        "pad_token_id": ids["<|endoftext|>"],
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.0,
        "router_jitter_noise": 0.01,
        "sliding_window": 2047,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": len(ids),
    }


def qwen3_5(ids: dict[str, int]) -> dict:
    layers = 8
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "float16",
        "eos_token_id": ids["<|im_end|>"],
        "full_attention_interval": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 192,
        "initializer_range": 0.02,
        "intermediate_size": 448,
        "layer_types": [F if (index + 1) % 4 == 0 else "linear_attention" for index in range(layers)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 6,
        "linear_value_head_dim": 32,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 4096,
        "model_type": "qwen3_5_text",
        "num_attention_heads": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 2,
        "pad_token_id": ids["<|endoftext|>"],
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": len(ids),
    }


def qwen3_vl(ids: dict[str, int]) -> dict:
    hidden = 192
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "dtype": "float16",
        "image_token_id": ids["<|image_pad|>"],
        "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": ids["<|endoftext|>"],
            "dtype": "float16",
            "eos_token_id": ids["<|im_end|>"],
            "head_dim": 32,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "initializer_range": 0.02,
            "intermediate_size": 448,
            "max_position_embeddings": 4096,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": 6,
            "num_hidden_layers": 6,
            "num_key_value_heads": 2,
            "pad_token_id": ids["<|endoftext|>"],
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"},
            "rope_theta": 5000000,
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": len(ids),
        },
        "tie_word_embeddings": True,
        "video_token_id": ids["<|video_pad|>"],
        "vision_config": {
            "deepstack_visual_indexes": [1, 2],
            "depth": 4,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 96,
            "image_size": 128,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": 288,
            "model_type": "qwen3_vl",
            "num_heads": 4,
            "num_position_embeddings": 256,
            "out_hidden_size": hidden,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
    }


def gemma4(ids: dict[str, int]) -> dict:
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
            "hidden_size": 112,
            "model_type": "gemma4_audio",
            "num_attention_heads": 4,
            "num_hidden_layers": 4,
            "output_proj_dims": 160,
            "residual_weight": 0.5,
            "rms_norm_eps": 1e-06,
            "subsampling_conv_channels": [128, 16],
            "use_clipped_linears": True,
        },
        "audio_token_id": ids["<|audio|>"],
        "boa_token_id": ids["<|audio>"],
        "boi_token_id": ids["<|image>"],
        "dtype": "float16",
        "eoa_token_id": ids["<audio|>"],
        "eoa_token_index": ids["<audio|>"],
        "eoi_token_id": ids["<image|>"],
        "eos_token_id": [ids["<eos>"], ids["<turn|>"]],
        "image_token_id": ids["<|image|>"],
        "initializer_range": 0.02,
        "model_type": "gemma4",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attention_k_eq_v": False,
            "bos_token_id": ids["<bos>"],
            "dtype": "float16",
            "enable_moe_block": False,
            "eos_token_id": ids["<eos>"],
            "final_logit_softcapping": 30.0,
            "global_head_dim": 64,
            "head_dim": 32,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 192,
            "hidden_size_per_layer_input": 16,
            "initializer_range": 0.02,
            "intermediate_size": 288,
            "layer_types": [S, S, F, S, S, F],
            "max_position_embeddings": 4096,
            "model_type": "gemma4_text",
            "moe_intermediate_size": None,
            "num_attention_heads": 4,
            "num_experts": None,
            "num_global_key_value_heads": None,
            "num_hidden_layers": 6,
            "num_key_value_heads": 2,
            "num_kv_shared_layers": 2,
            "pad_token_id": ids["<pad>"],
            "rms_norm_eps": 1e-06,
            "rope_parameters": {
                F: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
                S: {"rope_theta": 10000.0, "rope_type": "default"},
            },
            "sliding_window": 128,
            "tie_word_embeddings": True,
            "top_k_experts": None,
            "use_bidirectional_attention": None,
            "use_cache": True,
            "use_double_wide_mlp": False,
            "vocab_size": len(ids),
            "vocab_size_per_layer_input": len(ids),
        },
        "tie_word_embeddings": True,
        "video_token_id": ids["<|video|>"],
        "vision_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": 24,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 96,
            "intermediate_size": 192,
            "max_position_embeddings": 4096,
            "model_type": "gemma4_vision",
            "num_attention_heads": 4,
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "position_embedding_size": 210,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
            "standardize": False,
            "use_clipped_linears": True,
        },
        "vision_soft_tokens_per_image": 70,
    }


QWEN_TOKENIZER = {
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
}

HALVES = [0.5, 0.5, 0.5]

DEMOS = [
    Demo(
        name="phimoe", model_class="PhimoeForCausalLM", pipeline="phi", template="phi.jinja", config=phimoe,
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
        end_tokens=["<|end|>", "<|endoftext|>"], pad_token="<|endoftext|>",
    ),
    Demo(
        name="qwen3_5", model_class="Qwen3_5ForCausalLM", pipeline="qwen35", template="qwen3_5.jinja", config=qwen3_5,
        tokenizer_config=QWEN_TOKENIZER, end_tokens=["<|im_end|>", "<|endoftext|>"], pad_token="<|endoftext|>",
    ),
    Demo(
        name="qwen3-vl", model_class="Qwen3VLForConditionalGeneration", pipeline="qwen", template="qwen3_vl.jinja",
        config=qwen3_vl, tokenizer_config=QWEN_TOKENIZER, end_tokens=["<|im_end|>", "<|endoftext|>"],
        pad_token="<|endoftext|>",
        preprocessing={
            "preprocessor_config.json": {
                "image_mean": HALVES,
                "image_processor_type": "Qwen2VLImageProcessor",
                "image_std": HALVES,
                "merge_size": 2,
                "patch_size": 16,
                "processor_class": "Qwen3VLProcessor",
                "size": {"longest_edge": 65536, "shortest_edge": 16384},
                "temporal_patch_size": 2,
            },
            "video_preprocessor_config.json": {
                "image_mean": HALVES,
                "image_std": HALVES,
                "merge_size": 2,
                "patch_size": 16,
                "processor_class": "Qwen3VLProcessor",
                "size": {"longest_edge": 65536, "shortest_edge": 16384},
                "temporal_patch_size": 2,
                "video_processor_type": "Qwen3VLVideoProcessor",
            },
        },
    ),
    Demo(
        name="gemma4", model_class="Gemma4ForConditionalGeneration", pipeline="gemma", template="gemma4.jinja", config=gemma4,
        tokenizer_config={
            "bos_token": "<bos>",
            "clean_up_tokenization_spaces": False,
            "eos_token": "<eos>",
            "extra_special_tokens": {
                "audio_token": "<|audio|>",
                "boa_token": "<|audio>",
                "boi_token": "<|image>",
                "eoa_token": "<audio|>",
                "eoi_token": "<image|>",
                "image_token": "<|image|>",
            },
            "mask_token": "<mask>",
            "model_max_length": 4096,
            "pad_token": "<pad>",
            "padding_side": "left",
            "processor_class": "Gemma4Processor",
            "tokenizer_class": "GemmaTokenizer",
            "unk_token": "<unk>",
        },
        end_tokens=["<turn|>", "<eos>"], pad_token="<pad>",
        preprocessing={
            "processor_config.json": {
                "audio_ms_per_token": 40,
                "audio_seq_length": 750,
                "feature_extractor": {
                    "dither": 0.0,
                    "feature_extractor_type": "Gemma4AudioFeatureExtractor",
                    "feature_size": 128,
                    "fft_length": 512,
                    "fft_overdrive": False,
                    "frame_length": 320,
                    "hop_length": 160,
                    "input_scale_factor": 1.0,
                    "max_frequency": 8000.0,
                    "mel_floor": 0.001,
                    "min_frequency": 0.0,
                    "padding_side": "right",
                    "padding_value": 0.0,
                    "per_bin_mean": None,
                    "per_bin_stddev": None,
                    "preemphasis": 0.0,
                    "preemphasis_htk_flavor": True,
                    "return_attention_mask": True,
                    "sampling_rate": 16000,
                },
                "image_processor": {
                    "do_convert_rgb": True,
                    "do_normalize": False,
                    "do_rescale": True,
                    "do_resize": True,
                    "image_mean": [0.0, 0.0, 0.0],
                    "image_processor_type": "Gemma4ImageProcessor",
                    "image_seq_length": 70,
                    "image_std": [1.0, 1.0, 1.0],
                    "max_soft_tokens": 70,
                    "patch_size": 16,
                    "pooling_kernel_size": 3,
                    "resample": 3,
                    "rescale_factor": 1 / 255,
                },
                "image_seq_length": 70,
                "processor_class": "Gemma4Processor",
                "video_processor": {
                    "do_convert_rgb": True,
                    "do_normalize": True,
                    "do_rescale": True,
                    "do_resize": True,
                    "do_sample_frames": True,
                    "image_mean": [0.0, 0.0, 0.0],
                    "image_std": [1.0, 1.0, 1.0],
                    "max_soft_tokens": 70,
                    "num_frames": 32,
                    "patch_size": 16,
                    "pooling_kernel_size": 3,
                    "resample": 3,
                    "rescale_factor": 1 / 255,
                    "video_processor_type": "Gemma4VideoProcessor",
                },
            },
        },
    ),
]


def find(name: str) -> Demo:
    return next(demo for demo in DEMOS if demo.name == name)
