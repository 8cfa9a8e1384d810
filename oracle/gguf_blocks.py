"""Makes the fixture for GGUF block formats: a few rows of every format, and what the reference package decodes them to.

    python oracle/gguf_blocks.py crates/qhx-forge/tests/fixtures/gguf_blocks.safetensors

The file has, for each format F, `F.blocks` (u8, [rows, bytes]) and `F.expected` (f32, [rows, numbers]). Needs `pip install gguf numpy`.
"""

import json
import struct
import sys

import gguf
import numpy as np

# Format -> offsets of the f16 scales in a block. These get sane values; all other bytes are random.
FORMATS = {
    "Q8_0": [0],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}
ROWS, BLOCKS = 3, 2


def main(path):
    random = np.random.default_rng(20240229)
    tensors = {}
    for name, scales in FORMATS.items():
        kind = gguf.GGMLQuantizationType[name]
        _, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = random.integers(0, 256, (ROWS * BLOCKS, size), dtype=np.uint8)
        for at in scales:
            numbers = (random.standard_normal(ROWS * BLOCKS) * 0.05).astype("<f2")
            numbers[0] = 6.0e-8  # a subnormal
            blocks[:, at : at + 2] = numbers.view(np.uint8).reshape(-1, 2)
        blocks = blocks.reshape(ROWS, BLOCKS * size)
        tensors[f"{name}.blocks"] = ("U8", blocks)
        tensors[f"{name}.expected"] = ("F32", gguf.quants.dequantize(blocks, kind).astype("<f4"))
    header, data = {}, b""
    for name, (kind, array) in tensors.items():
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    header = json.dumps(header).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + data)


main(sys.argv[1])
