"""Seeded weights: every tensor is drawn independently from (seed, name), so that the order of tensors does not matter."""

import hashlib
import math
import re

import numpy
import torch

RULES = [
    (r"^model\.(language_model\.)?norm\.weight$", 2.5, 0.4),
    (r"\.[qk]_norm\.weight$", 1.5, 0.2),
    (r"norm\w*\.weight$", 1.0, 0.2),
    (r"\.bias$", 0.0, 0.2),
    (r"embed_tokens\w*\.weight$|pos_embed\.weight$|position_embedding_table$", 0.0, 0.3),
    (r"\.([qko]|down)_proj\.weight$", 0.0, "fan*1.5"),
    (r"", 0.0, "fan"),
]
"""(pattern, mean, deviation), the first match counts. A deviation "fan" or "fan*2.5" is that many times 1/sqrt(inputs).

Embeddings are small compared with what the layers add, attention is sharp, and the last norm is large, so that the next token
depends on the whole context instead of repeating the last one, and the best token stands out.
"""


def draw(seed: int, name: str, shape: tuple[int, ...], rules: list[tuple[str, float, float | str]]) -> torch.Tensor:
    """The tensor `name` of seed `seed`, in f32; the same on every machine."""
    mean, deviation = next((mean, deviation) for pattern, mean, deviation in rules if re.search(pattern, name))
    if isinstance(deviation, str):
        gain = float(deviation.removeprefix("fan").removeprefix("*") or 1.0)
        deviation = gain / math.sqrt(fan_in(shape))
    values = generator(seed, name).standard_normal(shape) * deviation + mean
    return torch.from_numpy(numpy.asarray(values, dtype=numpy.float32))


def fan_in(shape: tuple[int, ...]) -> int:
    """Inputs of one output: the last axis of a matrix or a stack of them, all but the first of a convolution kernel."""
    return math.prod(shape[1:]) if len(shape) > 3 else shape[-1]


def generator(seed: int, name: str) -> numpy.random.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return numpy.random.Generator(numpy.random.PCG64(int.from_bytes(digest[:16], "little")))


def fill(model: torch.nn.Module, seed: int, rules: list[tuple[str, float, float | str]], quiet: list[int]) -> None:
    """Draw all weights and buffers of the model; output rows in `quiet` become small, so that they are never chosen."""
    done = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() in done:
            continue
        done.add(tensor.data_ptr())
        tensor.copy_(draw(seed, name, tuple(tensor.shape), rules + RULES))
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight[quiet] *= 0.05
        if head.bias is not None:
            head.bias[quiet] = 0.0
