"""Records what transformers computes with weights rounded to int8: the oracle for `--precision w8`.

    python oracle/int8.py                 fixtures/FAMILY/int8.json and int8.safetensors, for the existing checkpoints

The matrices and tables of the text are replaced by the nearest int8 numbers times a scale per row, as a bundle stores them; everything is computed in f32. With
random weights that rounding alone flips many tokens. Prompts are therefore chosen, by transformers alone, so that it flips none: a device with such weights must then
give the tokens of the original checkpoint, and its logits can be compared with those of the rounded one.
"""

import copy
import json
import os
import re
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
sys.dont_write_bytecode = True

import torch
import transformers
from safetensors.torch import save_file

import checkpoint
import families
import record

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
NEW_TOKENS = {"phimoe": 8, "qwen3_5": 16, "gemma4": 16, "qwen3_vl": 16}
"""By family; the longer a text, the more likely an expert is chosen by a tiny margin."""
LENGTHS = [5, 17, 33]
MARGIN, DECISION = 0.15, 0.006
"""The least margin of the best token, and of an expert: 16-bit floats cannot flip either."""
PLAIN = r"norm|conv1d|router|block_sparse_moe\.gate|visual|vision|audio"
"""Names of what a bundle does not round, and of the towers, which get no input here."""


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name, tokens in NEW_TOKENS.items():
        health = record.Health(new_tokens=tokens, margin=MARGIN, distinct=tokens // 2, attempts=20000)
        write(families.load(name), name, health, FIXTURES / name)


@torch.no_grad()
def rounded(model: torch.nn.Module) -> torch.nn.Module:
    """The same model with int8 rows."""
    other = copy.deepcopy(model)
    for name, weight in other.named_parameters():
        if weight.dim() >= 2 and not re.search(PLAIN, name):
            largest = weight.abs().amax(-1, keepdim=True)
            weight.copy_((weight * (127.0 / largest)).round() * (largest / 127.0))
    return other


def write(family: families.Family, name: str, health: record.Health, folder: Path) -> None:
    plain = checkpoint.load(family, folder)
    plain.generation_config.eos_token_id = None
    int8, nudged, ordinary = rounded(plain), record.nudged(plain), record.ordinary_ids(folder)
    prompts, tensors = [], {}
    for length in LENGTHS:
        title = f"int8.{length}"
        for attempt in range(health.attempts):
            answer = record.Answer(record.random_ids(1, title, attempt, length, ordinary))
            record.generate(plain, answer, health)
            if not health.accepts(answer) or not record.is_robust(family, [plain, nudged], answer, health.rounding):
                continue
            logits, decision = record.plain_logits(family, int8, answer)
            best = logits.topk(2).values
            margin = (best[:, 0] - best[:, 1]).min().item()
            if logits.argmax(-1).tolist() == answer.greedy and margin >= MARGIN and decision >= DECISION:
                break
        else:
            raise SystemExit(f"{name}: no healthy answer")
        tensors |= {f"{title}.step_logits": answer.logits.contiguous(), f"{title}.int8_logits": logits.contiguous()}
        prompts.append({"name": title, "ids": answer.ids, "greedy": answer.greedy,
                        "min_margin": round(answer.margins.min().item(), 4), "min_int8_margin": round(margin, 4)})
        print(f"{name}: {length} tokens, attempt {attempt}, margins {prompts[-1]['min_margin']} and {margin:.4f}, "
              f"logits differ by {(logits - answer.logits).abs().max():.3f}", flush=True)
    save_file(tensors, folder / "int8.safetensors")
    head = {"family": name, "transformers": transformers.__version__}
    (folder / "int8.json").write_text(json.dumps(head | {"prompts": prompts}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
