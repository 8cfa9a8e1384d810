"""lm-evaluation-harness over HTTP (`local-completions`) against the harness with Hugging Face transformers in f32 (`--model hf`), item by item: log-likelihoods within 1e-3, the same greedy
verdicts, the same accuracy.

    python lm_eval_server.py ADDRESS CHECKPOINT      compares a server with what was recorded
    python lm_eval_server.py record CHECKPOINT       records, with transformers; needs `torch` and `accelerate`

CHECKPOINT is the Hugging Face folder that the served model was forged from, in f32. Needs `lm-eval[api]`. The task is lm_eval/facts.yaml, the record is CHECKPOINT/lm_eval.json.
"""

import json
import logging
import os
import sys
import urllib.request
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
logging.disable(logging.WARNING)

import lm_eval
from lm_eval.tasks import TaskManager

WHO, CHECKPOINT = sys.argv[1].rstrip("/"), Path(sys.argv[2]).resolve()
TASK = Path(__file__).resolve().with_name("lm_eval")


def evaluated(kind, arguments):
    """The log-likelihood and the greedy verdict of each choice of each question, and the accuracy."""
    os.chdir(TASK)
    manager = TaskManager(include_path=str(TASK), include_defaults=False)
    results = lm_eval.simple_evaluate(model=kind, model_args=arguments, tasks=["facts"], task_manager=manager, batch_size=1, bootstrap_iters=0, log_samples=True)
    samples = sorted(results["samples"]["facts"], key=lambda sample: sample["doc_id"])
    items = [[[float(log_likelihood), str(greedy) == "True"] for log_likelihood, greedy in sample["filtered_resps"]] for sample in samples]
    return {"accuracy": results["results"]["facts"]["acc,none"], "items": items}


if WHO == "record":
    recorded = evaluated("hf", {"pretrained": str(CHECKPOINT), "dtype": "float32", "device": "cpu", "add_bos_token": True})
    (CHECKPOINT / "lm_eval.json").write_text(json.dumps(recorded) + "\n")
    sys.exit()
expected = json.loads((CHECKPOINT / "lm_eval.json").read_text())
name = json.load(urllib.request.urlopen(f"{WHO}/v1/models"))["data"][0]["id"]
server = {"model": name, "base_url": f"{WHO}/v1/completions", "tokenizer": str(CHECKPOINT), "tokenizer_backend": "huggingface", "num_concurrent": 4, "max_length": 256, "add_bos_token": True}
found = evaluated("local-completions", server)
assert len(found["items"]) == len(expected["items"]), f"{len(found['items'])} questions instead of {len(expected['items'])}"
worst = 0.0
for number, (ours, theirs) in enumerate(zip(found["items"], expected["items"])):
    for (log_likelihood, greedy), (other, other_greedy) in zip(ours, theirs, strict=True):
        worst = max(worst, abs(log_likelihood - other))
        assert abs(log_likelihood - other) < 1e-3 and greedy == other_greedy, f"question {number}: {ours} instead of {theirs}"
assert found["accuracy"] == expected["accuracy"], (found["accuracy"], expected["accuracy"])
print(f"lm-eval {lm_eval.__version__}: as expected, {sum(map(len, found['items']))} items, worst difference {worst:.1e}, accuracy {found['accuracy']}")
