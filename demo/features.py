"""Pictures and sounds as the models take them, for whole batches on the training device.

These repeat what the processors of transformers do to one input at a time; `test_features.py` holds them to that.
"""

import numpy
import torch
import torch.nn.functional as functional

import scenes

PATCH = 16


def qwen_patches(pictures: torch.Tensor) -> torch.Tensor:
    """`[B, H, W, 3]` bytes to `[B, patches, 3 * 2 * 16 * 16]`, in blocks of 2 x 2 patches, every patch twice in time."""
    batch, height, width, _ = pictures.shape
    values = (pictures.float() / 255 - 0.5) / 0.5
    rows, columns = height // (2 * PATCH), width // (2 * PATCH)
    values = values.reshape(batch, rows, 2, PATCH, columns, 2, PATCH, 3)
    values = values.permute(0, 1, 4, 2, 5, 7, 3, 6)  # block row, block column, row in it, column in it, colour, y, x
    values = values.reshape(batch, rows * columns * 4, 3, 1, PATCH * PATCH).expand(-1, -1, -1, 2, -1)
    return values.reshape(batch, rows * columns * 4, -1)


def gemma_patches(pictures: torch.Tensor, side: int = 384) -> tuple[torch.Tensor, torch.Tensor]:
    """`[B, H, W, 3]` bytes to patches `[B, patches, 16 * 16 * 3]` of the enlarged square picture and their positions (x, y)."""
    values = functional.interpolate(
        pictures.permute(0, 3, 1, 2).float(), size=(side, side), mode="bicubic", antialias=True, align_corners=False)
    values = values.clamp(0, 255).round() / 255
    count = side // PATCH
    values = values.reshape(-1, 3, count, PATCH, count, PATCH).permute(0, 2, 4, 3, 5, 1).reshape(-1, count * count, 3 * PATCH**2)
    axis = torch.arange(count, device=pictures.device)
    positions = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), dim=-1).reshape(1, -1, 2)
    return values, positions.expand(len(values), -1, -1)


def mel_filters() -> torch.Tensor:
    """128 triangles on the mel scale (HTK) over 257 bins of 0 to 8000 Hz."""
    def to_mel(hertz: float) -> float:
        return 2595 * numpy.log10(1 + hertz / 700)

    points = 700 * (10 ** (numpy.linspace(to_mel(0), to_mel(8000), 130) / 2595) - 1)
    bins = numpy.linspace(0, 8000, 257)[:, None]
    rising, falling = (bins - points[:-2]) / (points[1:-1] - points[:-2]), (points[2:] - bins) / (points[2:] - points[1:-1])
    return torch.from_numpy(numpy.maximum(0, numpy.minimum(rising, falling))).float()


def log_mel(samples: torch.Tensor, lengths: torch.Tensor, filters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """16-bit samples `[B, n]`, n a multiple of 128, to features `[B, frames, 128]` and which frames are whole."""
    waves = functional.pad(samples.float() / 32_768, (160, 0))
    frames = waves.unfold(-1, 321, 160)[..., :-1] * torch.hann_window(320, periodic=True, device=samples.device)
    features = torch.log(torch.fft.rfft(frames, n=512).abs() @ filters + 1e-3)
    ends = torch.arange(features.shape[1], device=samples.device) * 160 + 320
    whole = ends[None] < 160 + lengths[:, None]
    return features * whole[..., None], whole


def soft_tokens(length: int) -> int:
    """Soft tokens of a sound of so many samples."""
    frames = sum(1 for end in range(320, 160 + length, 160))
    return (frames + 3) // 4


def scene_labels(scene: scenes.Scene) -> list[list[int]]:
    """What is in each quarter, as numbers: count, size, colour, shape; 0 where nothing is."""
    colours, sizes = list(scenes.COLOURS), list(scenes.SIZES)
    labels = []
    for place in range(4):
        group = scene.groups.get(place)
        labels.append([0, 0, 0, 0] if group is None else [
            group.count, 1 + sizes.index(group.size), 1 + colours.index(group.colour), 1 + scenes.SHAPES.index(group.shape)])
    return labels
