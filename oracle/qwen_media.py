"""Images for the Qwen families: one processor, one kind of tower."""

import torch
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from media import Media, Tower, hooked, image, to_levels


def files(config: dict) -> dict[str, dict]:
    """`preprocessor_config.json` as published, with bounds for small images; untied models have the bounds in the older style."""
    vision = config["vision_config"]
    side = vision["patch_size"] * vision["spatial_merge_size"]
    bounds = {"max_pixels": 16 * side**2, "min_pixels": 3 * side**2}
    if config["tie_word_embeddings"]:
        bounds = {"size": {"longest_edge": 16 * side**2, "shortest_edge": 3 * side**2}}
    return {"preprocessor_config.json": {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": vision["spatial_merge_size"],
        "patch_size": vision["patch_size"],
        "processor_class": "Qwen3VLProcessor",
        "resample": 3,
        "rescale_factor": 1 / 255,
        "temporal_patch_size": vision["temporal_patch_size"],
    } | bounds}


def run(processor, model, picture) -> Tower:
    visual = model.model.visual
    inputs = processor.image_processor(images=[picture], return_tensors="pt")
    pixels, grid = inputs["pixel_values"], inputs["image_grid_thw"]
    merge = visual.config.spatial_merge_size
    index, factor = get_vision_interpolation_indices_and_weights(
        grid, num_grid_per_side=visual.num_grid_per_side, mode="bilinear", align_corners=True, spatial_merge_size=merge)
    places = get_vision_position_ids(grid, merge)
    blocks = {f"vision.{number}": block for number, block in enumerate(visual.blocks)}
    taps, result = hooked(blocks, "vision.embed", visual.blocks[0], lambda: visual(pixels, grid_thw=grid))
    _, rows, columns = grid[0].tolist()
    return Tower(
        inputs={
            "levels": to_levels(pixels, 2 / 255, -1.0),
            "patch_grid": places.T.to(torch.int32),
            "interpolation_taps.index": index.to(torch.int32),
            "interpolation_taps.factor": factor.float(),
        },
        soft_rows=result.pooler_output,
        deepstack=list(getattr(result, "deepstack_features", None) or []),
        taps=taps,
        about={"grid": [rows, columns]},
    )


def expand(template: list[int], images: list[int], sounds: list[int], config: dict) -> list[int]:
    """The template writes the tokens around an image; its single placeholder is repeated."""
    rows = iter(images)
    return [token for id in template for token in ([id] * next(rows) if id == config["image_token_id"] else [id])]


PROMPTS = {
    "image": [[image(0), "What is shown in picture #?"]],
    "two_images": [[image(2), "Compare #: ", image(1), "and the first."]],
    "image_after_text_turn": [["Hello #."], ["Fine."], [image(0), "And this?"]],
    "images_in_two_turns": [["Look at ", image(1), "number #."], ["A small one."], ["Now ", image(2)]],
}

MEDIA = Media(files=files, image=run, expand=expand, prompts=PROMPTS)
