"""Records what transformers computes if attention sees only the latest rows: the oracle for sessions longer than their context.

    python oracle/ring.py                 fixtures/FAMILY/ring.json, for the existing checkpoints

With `--kv ring` a session continues past its context, and each row then sees as many rows as the context has, itself included. Here every attention of the text gets
that mask on top of its own; positions keep counting. The answers are computed without a cache, which would not fit such a mask.
"""

import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
sys.dont_write_bytecode = True

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

import checkpoint
import families
import record

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
FAMILIES = ["phimoe", "qwen3_5", "gemma4", "qwen3_vl"]
WINDOW = 24
LENGTH = 70
NEW_TOKENS = 8
MARGIN = 0.15
"""The least margin of the best token: 16-bit floats cannot flip it."""


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    AttentionInterface.register("windowed", windowed_attention)
    AttentionMaskInterface.register("windowed", eager_mask)
    for name in FAMILIES:
        write(families.load(name), name, FIXTURES / name)


def windowed_attention(module, query, key, value, attention_mask, **options):
    """The family's own attention, its mask narrowed to the window."""
    rows, columns = query.shape[2], key.shape[2]
    assert rows == columns, "without a cache"
    distance = torch.arange(rows)[:, None] - torch.arange(columns)[None, :]
    outside = torch.where(distance >= module.config.ring_window, torch.finfo(torch.float32).min, 0.0)
    plain = sys.modules[type(module).__module__].eager_attention_forward
    return plain(module, query, key, value, torch.minimum(attention_mask, outside), **options)


def write(family: families.Family, name: str, folder: Path) -> None:
    model = checkpoint.load(family, folder)
    text, ordinary = model.config.get_text_config(), record.ordinary_ids(folder)
    for attempt in range(record.ATTEMPTS):
        ids = record.random_ids(1, f"ring{LENGTH}", attempt, LENGTH, ordinary)
        model.set_attn_implementation("eager")
        whole, _ = greedy(model, ids)
        model.set_attn_implementation("windowed")
        text.ring_window = WINDOW
        answer, margin = greedy(model, ids)
        if margin < MARGIN:
            continue
        text.ring_window = WINDOW + 1
        wider, _ = greedy(model, ids)
        # A family with a narrower window of its own answers as always; for the others, seeing all rows or one more row must make a difference.
        if len(set(answer)) > NEW_TOKENS // 2 and (is_narrower(text) or answer[:4] != whole[:4] and answer != wider):
            break
    else:
        raise SystemExit(f"{name}: no healthy answer")
    prompt = {"name": f"ring{LENGTH}", "ids": ids, "greedy": answer, "without_window": whole, "min_margin": round(margin, 4)}
    head = {"family": name, "transformers": transformers.__version__, "window": WINDOW}
    (folder / "ring.json").write_text(json.dumps(head | {"prompts": [prompt]}) + "\n", encoding="utf-8")
    print(f"{name}: attempt {attempt}, {answer} instead of {whole}, margin {margin:.3f}", flush=True)


def is_narrower(text) -> bool:
    """Whether all layers have their own window within the ring's."""
    own = getattr(text, "sliding_window", None)
    return own is not None and own <= WINDOW and not hasattr(text, "layer_types")


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
