"""lm-evaluation-harness over HTTP against Hugging Face in f32, item by item: log-likelihoods within 1e-3 and the same greedy verdicts.

    python lm_eval_server.py ADDRESS CHECKPOINT

CHECKPOINT is the Hugging Face folder that the served model was forged from in f32. Needs `lm-eval[api]`, `transformers` and `torch`.
"""

import json
import sys
import urllib.request

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from transformers import AutoModelForCausalLM, AutoTokenizer

ADDRESS, CHECKPOINT = sys.argv[1].rstrip("/"), sys.argv[2]
PAIRS = [
    ("The capital of Portugal is", " Lisbon."),
    ("The capital of Portugal is", " Madrid."),
    ("Once upon a time", " there was a fox."),
    ("Water boils at", " one hundred degrees."),
    ("", "Hello there"),
    ("A", "B"),
]


def requests():
    return [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(PAIRS)]


tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, torch_dtype=torch.float32)
expected = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, add_bos_token=True).loglikelihood(requests())
name = json.load(urllib.request.urlopen(f"{ADDRESS}/v1/models"))["data"][0]["id"]
served = LocalCompletionsAPI(
    model=name, base_url=f"{ADDRESS}/v1/completions", tokenizer=CHECKPOINT, tokenizer_backend="huggingface", num_concurrent=1, max_length=256, add_bos_token=True
)
found = served.loglikelihood(requests())
worst = 0.0
for pair, (log_likelihood, greedy), (other, other_greedy) in zip(PAIRS, expected, found):
    worst = max(worst, abs(log_likelihood - other))
    print(f"{pair}: {log_likelihood:.6f} {other:.6f} {greedy} {other_greedy}")
    if abs(log_likelihood - other) > 1e-3 or greedy != other_greedy:
        raise SystemExit(f"differs: {pair}")
print(f"{len(PAIRS)} items, worst difference {worst:.2e}")
