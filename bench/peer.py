"""Speed of llama.cpp on a GGUF file, in llama-bench's notation, as one JSON object.

usage: peer.py MODEL.gguf THREADS PROMPT_TOKENS NEW_TOKENS      (needs PyPI llama-cpp-python)
"""

import json
import sys
import time

import llama_cpp


def main():
    path, threads, prompt, new = sys.argv[1], *map(int, sys.argv[2:5])
    model = llama_cpp.Llama(
        path, n_ctx=prompt + new + 8, n_batch=prompt, n_ubatch=prompt, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    ids = [(7919 * i + 13) % model.n_vocab() for i in range(prompt)]

    def timed(work):
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    model.eval(ids[:32])  # warm
    model.reset()
    prefill = prompt / timed(lambda: model.eval(ids))
    model.reset()
    model.eval(ids[:1])
    decode = new / timed(lambda: [model.eval([ids[i % prompt]]) for i in range(new)])
    print(json.dumps({f"pp{prompt}": prefill, f"tg{new}": decode, "version": llama_cpp.__version__}))


main()
