"""Compares the encoding speed of qhx and transformers for the full-size towers with random weights, in f32, with the same threads, in one run.

usage: towers.py QHX [--threads N] [--rounds N]      (needs the oracle's Python, see oracle/README.md)

A 512x512 image goes through the tower of configs/qwen3-vl-2b.json, and 10 seconds of audio through that of configs/gemma-4-e4b.json. Both sides
start from the file, decode it and end with soft rows; the text program is tiny, since it takes no part.
"""

import argparse
import functools
import json
import statistics
import subprocess
import tempfile
import time
import wave
from pathlib import Path

import numpy
import torch
import transformers
from PIL import Image

ROOT = Path(__file__).parent.parent
SMALL_TEXT = {"num_hidden_layers": 3, "intermediate_size": 64, "layer_types": None, "num_kv_shared_layers": 0}


def image_tower(config: dict):
    """A function that encodes an image file with transformers and returns the number of soft rows."""
    vision = transformers.AutoConfig.for_model(**config).vision_config
    tower = transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel(vision).eval()
    processor = transformers.Qwen2VLImageProcessor(
        size={"shortest_edge": 65536, "longest_edge": 16777216}, patch_size=vision.patch_size, merge_size=vision.spatial_merge_size,
        temporal_patch_size=vision.temporal_patch_size, image_mean=[0.5] * 3, image_std=[0.5] * 3)

    def encode(file: Path) -> int:
        inputs = processor(images=[Image.open(file).convert("RGB")], return_tensors="pt")
        return tower(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output.shape[0]

    return encode


def audio_tower(config: dict):
    """The same for an audio file."""
    from transformers.models.gemma4 import modeling_gemma4 as gemma4
    whole = transformers.AutoConfig.for_model(**config)
    tower = gemma4.Gemma4AudioModel(whole.audio_config).eval()
    projector = gemma4.Gemma4MultimodalEmbedder(whole.audio_config, whole.text_config).eval()
    extractor = transformers.Gemma4AudioFeatureExtractor()

    def encode(file: Path) -> int:
        with wave.open(str(file)) as sound:
            samples = numpy.frombuffer(sound.readframes(sound.getnframes()), numpy.int16).astype(numpy.float32) / 32768
        features = extractor([samples], return_tensors="pt")
        rows = tower(features["input_features"], features["input_features_mask"]).last_hidden_state
        return projector(inputs_embeds=rows).shape[1]

    return encode


def qhx_seconds(qhx: Path, bundle: Path, media: list, placeholder: int, rows: int, threads: int) -> float:
    """The encoding time that qhx reports for a file."""
    ids = ",".join(map(str, [placeholder] * rows + [1]))
    command = [qhx, "generate", bundle, *media, "--ids", ids, "--max-new", "1", "--ignore-eos", "--threads", str(threads), "--json"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found["timing"]["encode_ms"] / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("qhx", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    random = numpy.random.default_rng(0)
    with tempfile.TemporaryDirectory() as place, torch.inference_mode():
        place = Path(place)
        picture, sound = place / "picture.png", place / "sound.wav"
        Image.fromarray(random.integers(0, 256, (512, 512, 3), numpy.uint8)).save(picture)
        with wave.open(str(sound), "wb") as file:
            file.setnchannels(1), file.setsampwidth(2), file.setframerate(16000)
            file.writeframes((random.normal(0, 3000, 160000)).astype(numpy.int16).tobytes())
        print(f"| tower | qhx f32, s | transformers {transformers.__version__} f32, s | ratio |\n|---|---|---|---|")
        for name, kind, tower, file in [("qwen3-vl-2b", "image", image_tower, picture), ("gemma-4-e4b", "audio", audio_tower, sound)]:
            config = json.loads((ROOT / "configs" / f"{name}.json").read_text())
            config["text_config"] |= {key: value for key, value in SMALL_TEXT.items() if key in config["text_config"]}
            (place / f"{name}.json").write_text(json.dumps(config))
            bundle = place / name
            synth = [arguments.qhx, "synth", place / f"{name}.json", "--out", bundle, "--precision", "f32"]
            subprocess.run(synth, check=True, capture_output=True)
            theirs = tower(config)
            rows = theirs(file)
            ours = functools.partial(
                qhx_seconds, arguments.qhx, bundle, [f"--{kind}", file], config[f"{kind}_token_id"], rows, arguments.threads)
            ours()
            times = [], []
            for _ in range(arguments.rounds):
                times[0].append(ours())
                start = time.perf_counter()
                theirs(file)
                times[1].append(time.perf_counter() - start)
            medians = [statistics.median(found) for found in times]
            print(f"| {name}, {kind} to {rows} rows | {medians[0]:.2f} | {medians[1]:.2f} | {medians[1] / medians[0]:.2f}x |", flush=True)


if __name__ == "__main__":
    main()
