"""Writes one small tensor in every GGUF type that is read, and what its blocks decode to.

    python oracle/make_gguf_blocks.py [FOLDER]                         default: fixtures/gguf-blocks

The blocks are random bytes, so that every bit of a format matters; only their f16 scales are drawn as sane numbers. The
decoded values are those of the PyPI package `gguf`.
"""

import sys
from pathlib import Path

sys.dont_write_bytecode = True

import gguf
import numpy
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import save_file

import weights

REPOSITORY = Path(__file__).resolve().parent.parent
SHAPE = (3, 512)
SCALES = {
    Type.Q8_0: [0], Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2],
    Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208],
}
"""Where the f16 numbers of a block start, in bytes."""


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(folder / "blocks.gguf", "blocks")
    expected = {}
    for tensor_type in [Type.F32, Type.F16, Type.BF16, *SCALES]:
        stored = plain_values(tensor_type) if tensor_type not in SCALES else random_blocks(tensor_type)
        expected[tensor_type.name] = numpy.ascontiguousarray(
            gguf.quants.dequantize(stored, tensor_type), dtype=numpy.float32)
        assert expected[tensor_type.name].shape == SHAPE and numpy.isfinite(expected[tensor_type.name]).all()
        writer.add_tensor(tensor_type.name, stored, raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(expected, folder / "expected.safetensors")
    (folder / "expected.safetensors").chmod(0o644)
    print(f"{folder}: {', '.join(expected)}")


def plain_values(tensor_type: Type) -> numpy.ndarray:
    values = weights.generator(1, tensor_type.name).standard_normal(SHAPE).astype(numpy.float32)
    return gguf.quants.quantize(values, tensor_type)


def random_blocks(tensor_type: Type) -> numpy.ndarray:
    rows, columns = SHAPE
    length, size = gguf.GGML_QUANT_SIZES[tensor_type]
    generator = weights.generator(1, tensor_type.name)
    blocks = generator.integers(256, size=(rows * columns // length, size), dtype=numpy.uint8)
    for start in SCALES[tensor_type]:
        scale = (0.1 * generator.standard_normal(len(blocks))).astype(numpy.float16)
        blocks[:, start:start + 2] = scale.view(numpy.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY / "fixtures" / "gguf-blocks")
