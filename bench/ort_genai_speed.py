"""Speed of onnxruntime-genai on a folder of its model builder, in llama-bench's notation, as one JSON object.

usage: ort_genai_speed.py FOLDER THREADS PROMPT_TOKENS NEW_TOKENS      (needs PyPI onnxruntime-genai)

The builder makes the folder from a Hugging Face folder, offline (it needs torch, transformers and onnx-ir too):

    python -m onnxruntime_genai.models.builder -i HF_FOLDER -o FOLDER -p int4 -e cpu -c CACHE --extra_options int4_block_size=32 int4_accuracy_level=4
"""

import json
import sys
import time

import numpy
import onnxruntime_genai


def main():
    folder, threads, prompt, new = sys.argv[1], *map(int, sys.argv[2:5])
    config = onnxruntime_genai.Config(folder)
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    model = onnxruntime_genai.Model(config)
    ids = numpy.array([(7919 * place + 13) % 32000 for place in range(prompt)], numpy.int32)

    def seconds():
        """Of the prompt, then of the new tokens."""
        parameters = onnxruntime_genai.GeneratorParams(model)
        parameters.set_search_options(max_length=prompt + new + 8, min_length=prompt + new + 8, do_sample=False)
        generator = onnxruntime_genai.Generator(model, parameters)
        start = time.perf_counter()
        generator.append_tokens(ids)
        generator.generate_next_token()
        middle = time.perf_counter()
        for _ in range(new):
            generator.generate_next_token()
        return middle - start, time.perf_counter() - middle

    seconds()
    prefill, decode = seconds()
    print(json.dumps({f"pp{prompt}": prompt / prefill, f"tg{new}": new / decode}))


main()
