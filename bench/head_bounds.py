"""How much of an output head must be read to know the largest logit with certainty?

usage: head_bounds.py [MODEL.gguf TRACE.safetensors]        (needs numpy; with a model also PyPI gguf)

Models in numpy what the CPU does for greedy answers. The rows of the head, minus their mean, are sketched in a few bits. The Cauchy-Schwarz inequality bounds what the
sketch leaves out (columns that meet far larger activations than others are stored separately). The most promising row is multiplied, and then every row whose bound
reaches its logit. Prints the share of those rows: for random rows of the full-size models' widths, and for a real model's own hidden rows
(`qhx trace MODEL --prompt TEXT --out TRACE.safetensors`).
"""

import json
import struct
import sys

import numpy as np

# The quantisation step, in units of a row's root mean square, with the least error for normally distributed numbers.
BEST_STEP = {4: 0.335, 5: 0.188, 6: 0.104}
# Columns that are stored separately.
APART = 32


def remaining(weights: np.ndarray, hidden: np.ndarray, bits: int) -> float:
    """Mean share of rows that could still have the largest logit according to the sketch."""
    seen, hidden = hidden[:8], hidden[8:]
    weights = weights - weights[:: max(len(weights) // 1024, 1)].mean(0)
    squares = (seen**2).sum(0)
    apart = np.argsort(-squares)[:APART]
    rest = np.ones(weights.shape[1], bool)
    if squares[apart].sum() > squares.sum() / 3:
        rest[apart] = False
    logits, exact = hidden @ weights.T, (hidden * ~rest) @ weights.T
    weights, hidden = weights[:, rest], hidden[:, rest]
    levels = 2**bits
    step = np.minimum(2 * np.abs(weights).max(1) / levels, BEST_STEP[bits] * np.sqrt((weights**2).mean(1)))[:, None]
    sketch = (np.clip(np.floor(weights / step + levels / 2), 0, levels - 1) + 0.5 - levels / 2) * step
    scale = np.abs(hidden).max(1, keepdims=True) / 127
    query = np.rint(hidden / scale) * scale
    length = lambda rows: np.linalg.norm(rows, axis=1)
    about = exact + query @ sketch.T
    bound = about + np.outer(length(hidden), length(weights - sketch)) + np.outer(length(hidden - query), length(sketch))
    reached = np.take_along_axis(logits, about.argmax(1)[:, None], 1)
    return float((bound >= reached).mean())


def real(model: str, trace: str):
    """The head of a GGUF model with tied embeddings, and the hidden rows in front of it, from a trace."""
    import gguf

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(model).tensors}
    head = gguf.quants.dequantize(tensors["token_embd.weight"].data, tensors["token_embd.weight"].tensor_type)
    data = open(trace, "rb").read()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    entries = json.loads(data[8:start])
    last = max((name for name in entries if name.endswith(".ffn")), key=lambda name: int(name.split(".")[1]))
    first, end = entries[last]["data_offsets"]
    rows = np.frombuffer(data[start + first : start + end], np.float32).reshape(entries[last]["shape"])[::7]
    rows = rows / np.sqrt((rows**2).mean(1, keepdims=True) + 1e-5)
    return head, rows * np.array(tensors["output_norm.weight"].data)


def main():
    random = np.random.default_rng(0)
    draw = lambda rows, width: random.standard_normal((rows, width)).astype(np.float32)
    cases = {f"random, width {width}": (draw(60000, width), draw(40, width)) for width in (576, 1024, 2048, 2560, 4096)}
    if sys.argv[1:]:
        cases["real"] = real(*sys.argv[1:3])
    print("| head | 4 bits | 5 bits | 6 bits |\n|---|---:|---:|---:|")
    for name, (weights, hidden) in cases.items():
        print(f"| {name} |" + "".join(f" {remaining(weights, hidden, bits):.1%} |" for bits in (4, 5, 6)))


if __name__ == "__main__":
    main()
