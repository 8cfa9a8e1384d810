"""Speed of OpenVINO GenAI on a GGUF file, in llama-bench's notation, as one JSON object.

usage: openvino_speed.py MODEL.gguf THREADS PROMPT_TOKENS NEW_TOKENS      (needs PyPI openvino-genai)
"""

import json
import sys

import numpy
import openvino
import openvino_genai


def main():
    path, threads, prompt, new = sys.argv[1], *map(int, sys.argv[2:5])
    pipeline = openvino_genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads)
    config = openvino_genai.GenerationConfig(max_new_tokens=new, min_new_tokens=new, ignore_eos=True, do_sample=False)

    def times(first: int):
        """Of a prompt that begins with this id: it keeps what it computed for others."""
        ids = numpy.array([[(7919 * place + first) % 32000 for place in range(prompt)]], numpy.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(numpy.ones_like(ids)))
        return pipeline.generate(inputs, config).perf_metrics

    # The first one also compiles.
    times(13)
    found = times(17)
    print(json.dumps({f"pp{prompt}": 1000 * prompt / found.get_ttft().mean, f"tg{new}": 1000 / found.get_tpot().mean}))


main()
