"""How much of an int8 output head must be read to know the largest logit for certain?

usage: head_bounds.py [MODEL.gguf TRACE.safetensors]        (needs numpy; with a model also PyPI gguf)

The idea on trial: read the upper `bits` of each weight of the head, bound what the lower ones can add (Cauchy-Schwarz over groups of 32 columns, whose
norms would be stored), and read the rest only of rows that can still win. Prints the share of rows that remain: for random rows of the full-size models'
widths, and for a real model's own hidden rows (`qhx trace MODEL --prompt TEXT --out TRACE.safetensors`).
"""

import json
import struct
import sys

import numpy as np

GROUP = 32


def remaining(weights: np.ndarray, hidden: np.ndarray, bits: int) -> float:
    """Mean share of rows that could have the largest logit, as far as the upper bits tell."""
    scale = np.abs(weights).max(1, keepdims=True) / 127
    quants = np.rint(weights / scale)
    step = 2 ** (8 - bits)
    upper = np.floor((quants + 128) / step) * step - 128 + (step - 1) / 2
    norms = lambda rows: np.linalg.norm(rows.reshape(len(rows), -1, GROUP), axis=2)
    about, bound = hidden @ (upper * scale).T, norms(hidden) @ norms((quants - upper) * scale).T
    surely = (about - bound).max(1, keepdims=True)
    return float((about + bound >= surely).mean())


def real(model: str, trace: str):
    """The head of a GGUF model with tied embeddings, and the rows that a trace saw before it."""
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
    cases = {f"random, width {width}": (draw(30000, width), draw(32, width)) for width in (1024, 2048, 2560, 4096)}
    if sys.argv[1:]:
        cases["real"] = real(*sys.argv[1:3])
    print("| head | 4 bits | 5 bits | 6 bits |\n|---|---:|---:|---:|")
    for name, (weights, hidden) in cases.items():
        print(f"| {name} |" + "".join(f" {remaining(weights, hidden, bits):.1%} |" for bits in (4, 5, 6)))


if __name__ == "__main__":
    main()
