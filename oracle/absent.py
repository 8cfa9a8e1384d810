"""Records what transformers computes if a model does not have a part that the fixture has: the oracle for configurations that say 0 there.

    python oracle/absent.py               fixtures/gemma4/absent.json, for the existing checkpoint

Gemma 4 without inputs per layer: `hidden_size_per_layer_input` is 0, and the checkpoint's tensors for them are left over.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
sys.dont_write_bytecode = True

import torch
import transformers

import checkpoint
import families
import record

FIXTURE = Path(__file__).resolve().parent.parent / "fixtures" / "gemma4"
LENGTHS = [5, 63]
NEW_TOKENS = 12
MARGIN = 0.01


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, ordinary = without_inputs_per_layer(), record.ordinary_ids(FIXTURE)
    head = {"family": "gemma4", "transformers": transformers.__version__, "hidden_size_per_layer_input": 0}
    prompts = [healthy(model, length, ordinary) for length in LENGTHS]
    (FIXTURE / "absent.json").write_text(json.dumps(head | {"prompts": prompts}) + "\n", encoding="utf-8")


def without_inputs_per_layer() -> torch.nn.Module:
    with tempfile.TemporaryDirectory() as scratch:
        for file in FIXTURE.iterdir():
            if file.is_file() and file.name != "config.json":
                (Path(scratch) / file.name).symlink_to(file)
        config = json.loads((FIXTURE / "config.json").read_text(encoding="utf-8"))
        config["text_config"]["hidden_size_per_layer_input"] = 0
        (Path(scratch) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return checkpoint.load(families.load("gemma4"), Path(scratch))


def healthy(model: torch.nn.Module, length: int, ordinary: list[int]) -> dict:
    """A prompt whose answer has clear choices."""
    for attempt in range(record.ATTEMPTS):
        ids = record.random_ids(1, f"absent{length}", attempt, length, ordinary)
        answer, margin = greedy(model, ids)
        if margin >= MARGIN and len(set(answer)) > NEW_TOKENS // 2:
            print(f"len{length}: attempt {attempt}, {answer}, margin {margin:.3f}", flush=True)
            return {"name": f"len{length}", "ids": ids, "greedy": answer, "min_margin": round(margin, 4)}
    raise SystemExit(f"len{length}: no healthy answer")


@torch.no_grad()
def greedy(model: torch.nn.Module, ids: list[int]) -> tuple[list[int], float]:
    """The answer, and the smallest margin between the two best tokens."""
    answer, margin = [], float("inf")
    for _ in range(NEW_TOKENS):
        logits = model(input_ids=torch.tensor([ids + answer]), use_cache=False).logits[0, -1]
        best = logits.topk(2)
        margin = min(margin, (best.values[0] - best.values[1]).item())
        answer.append(best.indices[0].item())
    return answer, margin


if __name__ == "__main__":
    main()
