"""Images and audio for Gemma 4."""

import json
from pathlib import Path

import numpy
import torch
import transformers
from transformers.models.gemma4 import image_processing_gemma4

from media import Media, Tower, hooked, image, sound, to_levels

BUDGET = 8
"""Maximum number of soft rows per image: the published budgets (70 and more) would make the fixture too large."""


def load(folder: Path) -> transformers.Gemma4Processor:
    """The processor; it asks a published tokenizer for the names of the media tokens, and a class constant for the budgets it allows."""
    image_processing_gemma4._SUPPORTED_SOFT_TOKENS = (*image_processing_gemma4._SUPPORTED_SOFT_TOKENS, BUDGET)
    names = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>",
             "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder, extra_special_tokens=names)
    parts = files(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    nested = parts.get("processor_config.json", {})
    flat = parts.get("preprocessor_config.json", {})
    return transformers.Gemma4Processor(
        feature_extractor=transformers.Gemma4AudioFeatureExtractor(**nested.get("feature_extractor", flat)),
        image_processor=transformers.Gemma4ImageProcessor(**nested.get("image_processor", flat)),
        tokenizer=tokenizer,
        video_processor=transformers.Gemma4VideoProcessor(),
        chat_template=tokenizer.chat_template,
    )


def files(config: dict) -> dict[str, dict]:
    """`processor_config.json` with a section for each part, as published; or everything in `preprocessor_config.json` if the text configuration is in the newer style."""
    vision = config["vision_config"]
    parts = {
        "feature_extractor": {
            "dither": 0.0,
            "feature_extractor_type": "Gemma4AudioFeatureExtractor",
            "feature_size": config["audio_config"]["subsampling_conv_channels"][0],
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
            "image_seq_length": BUDGET,
            "image_std": [1.0, 1.0, 1.0],
            "max_soft_tokens": BUDGET,
            "patch_size": vision["patch_size"],
            "pooling_kernel_size": vision["pooling_kernel_size"],
            "resample": 3,
            "rescale_factor": 1 / 255,
        },
    }
    video = {
        "max_soft_tokens": 70,
        "patch_size": vision["patch_size"],
        "pooling_kernel_size": vision["pooling_kernel_size"],
        "video_processor_type": "Gemma4VideoProcessor",
    }
    if "per_layer_config" in config["text_config"]:
        return {"preprocessor_config.json": parts["feature_extractor"] | parts["image_processor"] | {"processor_class": "Gemma4Processor"}}
    return {"processor_config.json": {
        "audio_ms_per_token": 40,
        "audio_seq_length": 750,
        **parts,
        "image_seq_length": BUDGET,
        "processor_class": "Gemma4Processor",
        "video_processor": video,
    }}


def see(processor, model, picture) -> Tower:
    tower = model.model.vision_tower
    inputs = processor.image_processor(images=[picture], return_tensors="pt")
    pixels, places = inputs["pixel_values"], inputs["image_position_ids"]
    layers = {f"vision.{number}": layer for number, layer in enumerate(tower.encoder.layers)}
    taps, result = hooked(layers, "vision.embed", tower.encoder.layers[0], lambda: tower(pixels, places))
    real = places[0, :, 0] >= 0
    columns, rows = places[0, real].T
    order = block_order(rows, columns, tower.config.pooling_kernel_size)
    return Tower(
        inputs={
            "levels": to_levels(pixels[0, real][order], 1 / 255, 0.0),
            "patch_grid": torch.stack([rows[order], columns[order]]).to(torch.int32),
        },
        soft_rows=model.model.embed_vision(result.last_hidden_state),
        taps={name: value[0, real][order] for name, value in taps.items()} | {"vision.pool": result.last_hidden_state},
        about={"grid": [int(rows.max()) + 1, int(columns.max()) + 1]},
    )


def block_order(rows: torch.Tensor, columns: torch.Tensor, side: int) -> torch.Tensor:
    """Patches block by block, so that pooling combines neighbours: block rows, block columns, rows in the block, columns in the block."""
    keys = zip((rows // side).tolist(), (columns // side).tolist(), rows.tolist(), columns.tolist())
    return torch.tensor([index for _, index in sorted((key, index) for index, key in enumerate(keys))])


def hear(processor, model, samples: numpy.ndarray) -> Tower:
    tower = model.model.audio_tower
    inputs = processor.feature_extractor([samples], return_tensors="pt")
    features, mask = inputs["input_features"], inputs["input_features_mask"]
    layers = {f"audio.{number}": layer for number, layer in enumerate(tower.layers)}
    taps, result = hooked(layers | {"audio.output": tower.output_proj}, "audio.subsample", tower.layers[0], lambda: tower(features, mask))
    valid = result.attention_mask[0].bool()
    return Tower(
        inputs={"frames": features[0, mask[0].bool()].float()},
        soft_rows=model.model.embed_audio(result.last_hidden_state)[0, valid],
        taps={name: value[0, valid] for name, value in taps.items()},
        about={"samples": len(samples), "frames": int(mask.sum())},
    )


def expand(template: list[int], images: list[int], sounds: list[int], config: dict) -> list[int]:
    """The processor puts tokens around an image or audio clip and repeats its placeholder."""
    rows = {"image": iter(images), "audio": iter(sounds)}
    around = {"image": ("boi_token_id", "eoi_token_id"), "audio": ("boa_token_id", "eoa_token_id")}
    ids = []
    for id in template:
        kind = next((kind for kind in rows if id == config[f"{kind}_token_id"]), None)
        begin, end = around[kind] if kind else (None, None)
        ids += [config[begin], *[id] * next(rows[kind]), config[end]] if kind else [id]
    return ids


PROMPTS = {
    "image": [[image(0), "What is shown in picture #?"]],
    "two_images": [[image(2), "Compare #: ", image(1), "and the first."]],
    "image_after_text_turn": [["Hello #."], ["Fine."], [image(0), "And this?"]],
    "images_in_two_turns": [["Look at", image(1), "number #."], ["A small one."], ["Now", image(2)]],
    "sound": [[sound(0), "Transcribe number #."]],
    "short_sounds": [["First #", sound(1), "then", sound(2)]],
    "sound_after_text_turn": [["Hello #."], ["Fine."], ["What is said?", sound(2)]],
    "image_and_sound": [[image(1), "Does # sound like", sound(0)]],
}

MEDIA = Media(files=files, image=see, sound=hear, expand=expand, prompts=PROMPTS, load=load)
