"""Makes fixtures/media: what transformers, Pillow and soundfile make of images and sounds.

    python oracle/media_cases.py [FOLDER]

`cases.json` says what each case is; `numbers.safetensors` has the numbers that are compared within a tolerance; `files/` has small files of every
format that is read. Pictures and sounds that can be large are made by integer arithmetic which the tests repeat, so that only sums are stored.
"""

import hashlib
import json
import random
import struct
import sys
from io import BytesIO
from pathlib import Path

sys.dont_write_bytecode = True

import numpy as np
import soundfile
import torch
from PIL import Image, ImageOps
from safetensors.numpy import save_file
from torchvision.transforms.v2 import functional as vision
from transformers.image_transforms import convert_to_rgb
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.gemma4.image_processing_gemma4 import Gemma4ImageProcessor, get_aspect_ratio_preserving_size
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor, smart_resize
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

REPOSITORY = Path(__file__).resolve().parent.parent

# Rules for sizes: those of published models, and others so that nothing can be hard-coded.
RULES = {
    "area": {"kind": "area", "size": 16, "block": 2, "min_pixels": 65536, "max_pixels": 16777216},
    "small_area": {"kind": "area", "size": 14, "block": 2, "min_pixels": 3136, "max_pixels": 200704},
    "budget": {"kind": "budget", "size": 16, "block": 3, "max_soft_rows": 280},
    "small_budget": {"kind": "budget", "size": 14, "block": 2, "max_soft_rows": 70},
}
SOURCES = [(1, 1), (2, 3), (7, 5), (16, 16), (31, 33), (32, 32), (48, 48), (50, 100), (64, 64), (99, 101), (100, 19), (1, 150), (150, 1),
           (224, 224), (240, 320), (255, 257), (333, 500), (512, 512), (600, 17), (17, 600), (640, 480), (719, 1283), (768, 768),
           (801, 1203), (1080, 1920), (2000, 50), (3000, 20), (20, 3900), (1, 5000), (7000, 1), (3024, 4032), (4100, 4200)]
# Sizes that no rule would choose: one side grows while the other shrinks, a side stays, by one more or less.
FREE = [((40, 900), (400, 90)), ((900, 40), (90, 400)), ((100, 77), (100, 200)), ((77, 100), (200, 100)), ((64, 64), (65, 63)), ((5, 5), (1, 1)),
        ((1, 1), (3, 2)), ((2000, 3), (7, 300)), ((333, 1000), (32, 1001))]
PROCESSED = [((37, 53), "area"), ((300, 200), "area"), ((64, 2000), "area"), ((90, 90), "small_area"), ((700, 500), "small_area"),
             ((60, 80), "budget"), ((500, 300), "budget"), ((1, 999), "budget"), ((111, 40), "small_budget")]
GRIDS = [((2, 2), 2, 48), ((16, 24), 2, 48), ((48, 48), 2, 48), ((62, 90), 2, 48), ((4, 6), 1, 7), ((1, 5), 1, 5), ((6, 9), 3, 10), ((2, 200), 2, 24)]
LENGTHS = [161, 162, 320, 321, 479, 480, 481, 1000, 11777, 16000, 16001, 47999, 160000, 480000]
SIGNALS = ["mixed", "tonal", "quiet", "bursts"]
STORED_FRAMES = 6


def main(folder: Path) -> None:
    (folder / "files").mkdir(parents=True, exist_ok=True)
    numbers: dict[str, np.ndarray] = {}
    cases = {
        "rules": RULES,
        "sizes": sizes(),
        "resized": resized(),
        "processed": processed(numbers),
        "grids": grids(numbers),
        "frames": frames(numbers),
        "images": image_files(folder / "files", numbers),
        "sounds": sound_files(folder / "files", numbers),
    }
    sections = [f' "{name}": {json.dumps(part) if name == "rules" else lines(part)}' for name, part in cases.items()]
    (folder / "cases.json").write_text("{\n" + ",\n".join(sections) + "\n}\n")
    save_file({name: np.ascontiguousarray(array, dtype=np.float32) for name, array in sorted(numbers.items())}, folder / "numbers.safetensors")
    (folder / "numbers.safetensors").chmod(0o644)
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {', '.join(f'{len(part)} {name}' for name, part in cases.items())}; {total / 1e6:.2f} MB")


def lines(items: list) -> str:
    return "[\n" + ",\n".join("  " + json.dumps(item) for item in items) + "\n ]"


def sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


# Images


def picture(height: int, width: int) -> np.ndarray:
    """Noise, slopes and full contrast in a pattern of squares, by 32-bit integers; the tests have the same function."""
    y, x, c = np.meshgrid(*(np.arange(n, dtype=np.uint32) for n in (height, width, 3)), indexing="ij")
    noise = x * np.uint32(73856093) ^ y * np.uint32(19349663) ^ c * np.uint32(83492791)
    noise ^= noise >> np.uint32(13)
    noise *= np.uint32(0x5BD1E995)
    noise ^= noise >> np.uint32(15)
    slope = x * np.uint32(2) + y * np.uint32(3) + c * np.uint32(40)
    contrast = np.where((x + y + c) & np.uint32(4), np.uint32(255), np.uint32(0))
    kind = ((x >> np.uint32(3)) + (y >> np.uint32(3))) % np.uint32(3)
    return (np.choose(kind, [noise, slope, contrast]) & np.uint32(255)).astype(np.uint8)


def target(rule: dict, height: int, width: int) -> tuple[int, int] | None:
    """The size after scaling; none where transformers refuses."""
    try:
        if rule["kind"] == "area":
            return smart_resize(height, width, rule["size"] * rule["block"], rule["min_pixels"], rule["max_pixels"])
        patches = rule["max_soft_rows"] * rule["block"] ** 2
        return get_aspect_ratio_preserving_size(height, width, rule["size"], patches, rule["block"])
    except ValueError:
        return None


def sizes() -> list[dict]:
    """For each rule: many sizes, what they become, and how many tokens that is."""
    draw = random.Random(4)
    pairs = list(SOURCES) + [(h, w) for h in range(8, 120, 16) for w in (16, 24, 47, 48, 80, 112)]
    pairs += [(1, 199), (1, 200), (1, 201), (201, 1), (400, 2), (401, 2), (65535, 2700), (2, 65535), (13000, 13000)]
    pairs += [(round(2 ** draw.uniform(0, 13)), round(2 ** draw.uniform(0, 13))) for _ in range(150)]
    cases = []
    for name, rule in RULES.items():
        rows = []
        for height, width in pairs:
            to = target(rule, height, width)
            side = rule["size"] * rule["block"]
            rows.append([height, width, *to, to[0] * to[1] // side**2] if to else [height, width])
        cases.append({"rule": name, "rows": rows})
    return cases


def resized() -> list[dict]:
    """Sums of scaled pictures."""
    wanted = list(FREE)
    for name in ("area", "budget"):
        wanted += [(source, to) for source in SOURCES if (to := target(RULES[name], *source))]
    cases = []
    for source, to in wanted:
        image = torch.from_numpy(picture(*source)).permute(2, 0, 1)
        scaled = vision.resize(image, list(to), interpolation=vision.InterpolationMode.BICUBIC, antialias=True)
        cases.append({"from": source, "to": to, "sha256": sha256(scaled.permute(1, 2, 0).numpy())})
    return cases


def processed(numbers: dict) -> list[dict]:
    """Patches of the real image processors in block order: the first and the last ones, and a sum over all after rounding to levels."""
    cases = []
    for number, (source, name) in enumerate(PROCESSED):
        rule = RULES[name]
        image = picture(*source)
        if rule["kind"] == "area":
            published = name == "area"
            mean = [0.5, 0.5, 0.5] if published else [0.48145466, 0.4578275, 0.40821073]
            std = [0.5, 0.5, 0.5] if published else [0.26862954, 0.26130258, 0.27577711]
            processor = Qwen2VLImageProcessor(
                patch_size=rule["size"], merge_size=rule["block"], temporal_patch_size=2, image_mean=mean, image_std=std,
                size={"shortest_edge": rule["min_pixels"], "longest_edge": rule["max_pixels"]})
            output = processor(Image.fromarray(image), return_tensors="np")
            patches, (_, rows, columns) = output["pixel_values"], output["image_grid_thw"][0].tolist()
            levels = patches.reshape(len(patches), 3, -1) * np.array(std)[:, None] + np.array(mean)[:, None]
        else:
            mean, std = [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]
            processor = Gemma4ImageProcessor(patch_size=rule["size"], pooling_kernel_size=rule["block"], max_soft_tokens=rule["max_soft_rows"])
            output = processor(Image.fromarray(image), return_tensors="np")
            count = output["num_soft_tokens_per_image"][0] * rule["block"] ** 2
            column, row = output["image_position_ids"][0][:count].T
            order = np.lexsort((column % rule["block"], row % rule["block"], column // rule["block"], row // rule["block"]))
            patches = output["pixel_values"][0][:count][order]
            rows, columns = int(row.max()) + 1, int(column.max()) + 1
            levels = patches
        numbers[f"processed.{number}"] = np.stack([patches[0], patches[-1]])
        cases.append({"from": source, "rule": name, "mean": mean, "std": std, "rows": rows, "columns": columns,
                      "levels_sha256": sha256(np.rint(levels * 255).astype(np.uint8))})
    return cases


def grids(numbers: dict) -> list[dict]:
    """Places of patches, and the interpolation of a square position table."""
    cases = []
    for number, ((rows, columns), block, side) in enumerate(GRIDS):
        grid = torch.tensor([[1, rows, columns]])
        places = get_vision_position_ids(grid, block).numpy().astype(np.int32)
        index, factor = get_vision_interpolation_indices_and_weights(grid, side, "bilinear", True, block)
        numbers[f"grid.{number}.factor"] = factor.numpy() if rows * columns <= 400 else factor.numpy()[:64]
        cases.append({"rows": rows, "columns": columns, "block": block, "side": side, "rows_sha256": sha256(places[:, 0]),
                      "columns_sha256": sha256(places[:, 1]), "index_sha256": sha256(index.numpy().astype(np.int32)),
                      "factor_sha256": sha256(factor.numpy())})
    return cases


def image_files(folder: Path, numbers: dict) -> list[dict]:
    """Small files of every kind, with what Pillow and transformers see in them. `tolerance` is in levels; JPEG decoders differ a little."""
    cases = []

    def add(name: str, content: bytes, tolerance: int = 0, expected: np.ndarray | None = None) -> None:
        (folder / name).write_bytes(content)
        if expected is None:
            expected = convert_to_rgb(ImageOps.exif_transpose(Image.open(BytesIO(content))), return_numpy=True)
        numbers[f"image.{name}"] = expected
        cases.append({"file": name, "height": expected.shape[0], "width": expected.shape[1], "tolerance": tolerance})

    def saved(image: Image.Image, kind: str, **options) -> bytes:
        out = BytesIO()
        image.save(out, kind, **options)
        return out.getvalue()

    def oriented(number: int) -> Image.Exif:
        exif = Image.Exif()
        exif[0x0112] = number
        return exif

    levels = picture(21, 34)
    colour = Image.fromarray(levels)
    alpha = Image.fromarray(np.dstack([levels, np.arange(21 * 34, dtype=np.uint32).reshape(21, 34).astype(np.uint8)]))
    grey = Image.fromarray(levels[..., 0])
    palette = colour.quantize(16)
    smooth = Image.fromarray(np.dstack([np.add.outer(np.arange(29) * k, np.arange(45) * m).astype(np.uint8) for k, m in ((3, 2), (1, 4), (5, 1))]))

    add("rgb.png", saved(colour, "PNG"))
    add("rgba.png", saved(alpha, "PNG"))
    add("grey.png", saved(grey, "PNG"))
    add("grey_alpha.png", saved(alpha.convert("LA"), "PNG"))
    add("one_bit.png", saved(grey.convert("1"), "PNG"))
    add("palette.png", saved(palette, "PNG"))
    add("palette_transparent.png", saved(palette, "PNG", transparency=bytes(range(0, 256, 16))))
    add("one_colour_transparent.png", saved(colour, "PNG", transparency=tuple(int(v) for v in levels[3, 4])))
    wide = (levels.astype(np.uint16) << 8) | levels[::-1].astype(np.uint16)
    # Pillow clips 16-bit grey at 255; whoever made the file meant the upper byte.
    add("grey_16.png", saved(Image.fromarray(wide[..., 0]), "PNG"), expected=np.repeat(wide[..., :1] >> 8, 3, axis=2))
    add("rgb_16.png", png_16(wide))
    add("rgba_16.png", png_16(np.dstack([wide, wide[::-1, :, :1]])))
    add("turned.png", saved(colour, "PNG", exif=oriented(6)))

    add("rgb.jpg", saved(smooth, "JPEG", quality=92, subsampling=0), 2)
    add("subsampled.jpg", saved(smooth, "JPEG", quality=85, subsampling=2), 4)
    add("progressive.jpg", saved(smooth, "JPEG", quality=90, progressive=True, subsampling=0), 2)
    add("grey.jpg", saved(smooth.convert("L"), "JPEG", quality=90), 2)
    for number in range(1, 9):
        add(f"turned_{number}.jpg", saved(smooth, "JPEG", quality=90, subsampling=0, exif=oriented(number)), 2)
    add("cmyk.jpg", saved(smooth.convert("CMYK"), "JPEG", quality=95), 3)
    add("ycck.jpg", as_ycck(saved(smooth.convert("CMYK"), "JPEG", quality=95, subsampling=0)), 3)

    add("lossless.webp", saved(colour, "WEBP", lossless=True))
    add("lossless_alpha.webp", saved(alpha, "WEBP", lossless=True, exact=True))
    add("lossy.webp", saved(smooth, "WEBP", quality=90), 3)
    add("lossy_alpha.webp", saved(Image.merge("RGBA", (*smooth.split(), smooth.getchannel(0))), "WEBP", quality=90), 3)
    moving = [palette, Image.fromarray(255 - levels).quantize(16)]
    add("moving.webp", saved(colour, "WEBP", lossless=True, save_all=True, append_images=[Image.fromarray(255 - levels)]))
    add("moving.gif", saved(moving[0], "GIF", save_all=True, append_images=moving[1:]))
    add("transparent.gif", saved(palette, "GIF", transparency=3))
    return cases


def png_16(levels: np.ndarray) -> bytes:
    """A PNG with 16 bits per channel, which Pillow reads but does not write."""
    import zlib

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    height, width, channels = levels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in levels)
    header = struct.pack(">IIBBBBB", width, height, 16, {3: 2, 4: 6}[channels], 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


def as_ycck(jpeg: bytes) -> bytes:
    """The file with another colour transform in its APP14 segment: the first three channels then are luma and chroma of the inks."""
    at = jpeg.index(b"Adobe")
    return jpeg[: at + 11] + b"\x02" + jpeg[at + 12 :]


# Sound


def sound(kind: str, count: int) -> np.ndarray:
    """Samples by integer arithmetic, as floats; the tests have the same function."""
    n = np.arange(count, dtype=np.uint32)
    noise = n * np.uint32(2654435761)
    noise ^= noise >> np.uint32(15)
    noise *= np.uint32(0x2C1B3C6D)
    noise ^= noise >> np.uint32(12)
    noise = (noise >> np.uint32(16)).astype(np.int32) - 32768

    def triangle(step: int) -> np.ndarray:
        return np.abs(((n * np.uint32(step)) >> np.uint32(16)).astype(np.int32) - 32768) - 16384

    low, high = triangle(118111601), triangle(805306368)
    signal = {
        "mixed": low // 2 + high // 4 + noise // 16,
        "tonal": low * 2 - 1 + high * 0,
        "quiet": noise // 512,
        "bursts": np.where((n // np.uint32(4000)) % np.uint32(2) == 0, low + noise // 4, 0),
    }[kind]
    return (np.clip(signal, -32768, 32767) / 32768).astype(np.float32)


def frames(numbers: dict) -> list[dict]:
    """Log-mel frames: how many, how many tokens they become, and some of them."""
    cases = []
    published = Gemma4AudioFeatureExtractor()
    wanted = [(published, {}, kind, length) for kind in SIGNALS for length in (LENGTHS if kind == "mixed" else (16000, 47999))]
    options = {"feature_size": 40, "sampling_rate": 8000, "frame_length_ms": 32.0, "hop_length_ms": 12.5, "min_frequency": 60.0,
               "max_frequency": 3800.0, "input_scale_factor": 0.5, "mel_floor": 1e-2}
    options |= {"per_bin_mean": [i / 50 for i in range(40)], "per_bin_stddev": [1 + i / 20 for i in range(40)]}
    wanted += [(Gemma4AudioFeatureExtractor(**options), options, "mixed", length) for length in (130, 5000, 20011)]
    for number, (extractor, given, kind, length) in enumerate(wanted):
        output = extractor([sound(kind, length)], return_tensors="np")
        mask = output["input_features_mask"][0]
        features = output["input_features"][0][mask]
        stored = sorted({round(i * (len(features) - 1) / max(STORED_FRAMES - 1, 1)) for i in range(STORED_FRAMES)})
        numbers[f"frames.{number}"] = features[stored]
        cases.append({"signal": kind, "samples": length, "frames": len(features), "tokens": int(mask[::2][::2].sum()), "stored": stored,
                      "sampling_rate": extractor.sampling_rate, "frame_length": extractor.frame_length, "hop_length": extractor.hop_length,
                      "fft_length": extractor.fft_length, "bins": extractor.feature_size, "min_frequency": extractor.min_frequency,
                      "max_frequency": extractor.max_frequency, "mel_floor": float(extractor.mel_floor),
                      "input_scale": extractor.input_scale_factor, "bin_mean": given.get("per_bin_mean", []),
                      "bin_std": given.get("per_bin_stddev", [])})
    return cases


def sound_files(folder: Path, numbers: dict) -> list[dict]:
    """Small files of every kind, with the mean of the channels that soundfile reads from them."""
    cases = []
    stereo = np.stack([sound("mixed", 2000), sound("bursts", 2000)], axis=1)
    kinds = [
        ("u8.wav", "WAV", "PCM_U8", stereo[:, 0], 8000, 1e-6), ("s16.wav", "WAV", "PCM_16", stereo[:, 0], 16000, 1e-6),
        ("s16_stereo.wav", "WAV", "PCM_16", stereo, 44100, 1e-6), ("s24_stereo.wav", "WAV", "PCM_24", stereo, 48000, 1e-6),
        ("s32.wav", "WAV", "PCM_32", stereo[:, 1], 22050, 1e-6), ("f32.wav", "WAV", "FLOAT", stereo[:, 0], 16000, 1e-6),
        ("f64.wav", "WAV", "DOUBLE", stereo[:, 0], 16000, 1e-6), ("ulaw.wav", "WAV", "ULAW", stereo[:, 0], 8000, 1e-6),
        ("ima.wav", "WAV", "IMA_ADPCM", stereo[:, 0], 16000, 2e-3), ("extensible.wav", "WAVEX", "PCM_16", stereo, 16000, 1e-6),
        ("s16.flac", "FLAC", "PCM_16", stereo[:, 0], 16000, 1e-6), ("s24_stereo.flac", "FLAC", "PCM_24", stereo, 44100, 1e-6),
        ("mono.mp3", "MP3", "MPEG_LAYER_III", sound("tonal", 6000) / 2, 16000, 2e-4),
        ("stereo.mp3", "MP3", "MPEG_LAYER_III", np.stack([sound("tonal", 6000), sound("mixed", 6000)], axis=1) / 2, 44100, 2e-4),
        ("mono.ogg", "OGG", "VORBIS", sound("tonal", 6000) / 2, 16000, 2e-4),
        ("stereo.ogg", "OGG", "VORBIS", np.stack([sound("tonal", 6000), sound("mixed", 6000)], axis=1) / 2, 44100, 2e-4),
    ]
    for name, kind, subtype, samples, rate, tolerance in kinds:
        path = folder / name
        soundfile.write(path, samples, rate, format=kind, subtype=subtype)
        expected, rate = soundfile.read(path, dtype="float32", always_2d=True)
        numbers[f"sound.{name}"] = expected.mean(axis=1)
        cases.append({"file": name, "rate": rate, "samples": len(expected), "tolerance": tolerance})
    soundfile.write(folder / "opus.ogg", sound("tonal", 1600), 16000, format="OGG", subtype="OPUS")  # which is not read
    return cases


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY / "fixtures" / "media")
