"""Perplexity of a text by transformers in f32, in the windows of `qhx eval`, and beside it if a bundle is given.

    target/oracle-venv/bin/python bench/perplexity.py MODEL TEXT [--window 512] [--bundle B --qhx target/release/qhx]

MODEL is a Hugging Face folder or a GGUF file, whose weights are decoded to f32. With a bundle both read the tokens that qhx makes of the text: transformers
makes others of some GGUF files, which do not hold all of the tokenizer it wants. `oracle/setup.sh` makes the environment; GGUF files also
need PyPI accelerate and psutil.
"""

import argparse
import json
import math
import pathlib
import subprocess

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def load(path):
    if path.is_dir():
        source, more = path, {}
    else:
        source, more = path.parent, {"gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(source, **more)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **more).eval()
    return tokenizer, model


def tokens_by_transformers(tokenizer, text):
    """The ids of a text, and those that the tokenizer puts in front of it."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    framed = tokenizer(text, add_special_tokens=True)["input_ids"]
    return ids, framed[: len(framed) - len(ids)]


def tokens_by_qhx(qhx, bundle, text):
    """The same by qhx, for tokenizers that put nothing in front of a text."""
    prompt = [qhx, "generate", bundle, "--prompt", text, "--max-new", "1", "--json"]
    return json.loads(subprocess.run(prompt, check=True, stdout=subprocess.PIPE).stdout)["prompt_ids"], []


def windows(ids, front, length):
    """Windows of `length` ids, each beginning with `front`."""
    step = length - len(front)
    found = (front + ids[first : first + step] for first in range(0, len(ids), step))
    return [window for window in found if len(window) > 1]


@torch.inference_mode()
def perplexity(model, found):
    """Every token but a window's first is scored."""
    loss, tokens = 0.0, 0
    for window in found:
        ids = torch.tensor([window])
        logits = model(ids).logits[0, :-1].double()
        loss -= logits.log_softmax(-1).gather(1, ids[0, 1:, None]).sum().item()
        tokens += len(window) - 1
    return math.exp(loss / tokens), tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--bundle")
    parser.add_argument("--qhx", default="target/release/qhx")
    options = parser.parse_args()
    tokenizer, model = load(options.model)
    text = options.text.read_text()
    made = tokens_by_qhx(options.qhx, options.bundle, text) if options.bundle else tokens_by_transformers(tokenizer, text)
    expected, tokens = perplexity(model, windows(*made, options.window))
    print(f"transformers, f32: {tokens} tokens, perplexity {expected:.6f}")
    if options.bundle:
        command = [options.qhx, "eval", options.bundle, "--text", options.text, "--window", str(options.window), "--json"]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        difference = found["perplexity"] / expected - 1
        print(f"qhx: {found['tokens']} tokens, perplexity {found['perplexity']:.6f}, {difference:+.2e} of transformers'")


if __name__ == "__main__":
    main()
