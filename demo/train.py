"""Trains one demo model and writes its weights, rounded to f16, as OUT/NAME.safetensors (`finish.py` makes the checkpoint of it).

    python3 train.py NAME --out OUT [--clips FOLDER] [--seconds 400] [--steps 6000] [--share 1.0]
                     [--peak 2e-3] [--start FILE]

Needs torch and transformers and, in all seriousness, a GPU. The learning rate follows the larger of the shares of steps and of
seconds used, so that a run always ends with a small one. FOLDER holds `clips-train.npz` and `clips-test.npz` of `speech.py`.
`--share 0.01` makes everything small, to try whether it works; `--start` goes on from written weights (without warm-ups).
"""

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import chat
import configurations
import lessons
import learners
import speech

WARM_UP = 0.04
"""Share of the training in which the learning rate rises to its peak."""

PICTURE = {
    "qwen3-vl": "<|vision_start|>" + "<|image_pad|>" * 16 + "<|vision_end|>",
    "gemma4": "\n\n<|image>" + "<|image|>" * 64 + "<image|>\n\n",
}
"""What stands for a picture of 128 x 128 in a prompt."""
PICTURE_ROW = {"qwen3-vl": 112, "gemma4": 176}
SOUND_ROW = 176
NEEDLE_WORDS = (395, 395)
"""Words that make prompts of about 529 tokens."""


Tests = dict[str, tuple[str, lessons.Rows]]
"""Name of a test to its kind and rows."""


@dataclass
class Plan:
    rows: dict[str, lessons.Rows]
    """Training rows by kind."""
    cycle: list[tuple[str, int]]
    """Kinds and batch sizes, one step each, again and again."""


def make_plan(talk: chat.Chat, clips: Path, share: float) -> Plan:
    def some(count: int) -> int:
        return max(int(count * share), 16)

    name = talk.demo.name
    rows = {
        "text": lessons.text(talk, some(90_000), words=105 if name == "phimoe" else 85),
        "long": lessons.text(talk, some(3_000), words=430, length=lessons.LONG),
    }
    if name == "phimoe":
        rows["repeat"] = lessons.repetitions(talk, some(30_000))
        rows["short needle"] = lessons.needle_prompts(talk, some(30_000), False, (30, 70), 192)
        rows["needle"] = lessons.needle_prompts(talk, some(16_000), False, (60, 440), lessons.LONG)
        cycle = [("repeat", 128), ("text", 160), ("short needle", 128), ("text", 160), ("needle", 32)] * 3 + [("long", 24)]
    if name == "qwen3_5":
        cycle = [("text", 160)] * 7 + [("long", 24)]
    if name in PICTURE:
        rows["picture"] = lessons.pictures(talk, some(40_000), PICTURE[name], "train", length=PICTURE_ROW[name])
        cycle = [("picture", 192), ("text", 192)] * 4 + [("long", 24)]
    if name == "gemma4":
        rows["sound"] = lessons.sounds(
            talk, str(clips / "clips-train.npz"), some(24_000), "train", speech.TRAINED_VOICES, 0.7, SOUND_ROW)
        cycle = [("sound", 128), ("picture", 96), ("sound", 128), ("text", 128)] * 5 + [("long", 24)]
    return Plan(rows, [(kind, max(int(size * share), 4)) for kind, size in cycle])


def make_tests(talk: chat.Chat, clips: Path, share: float = 1.0) -> Tests:
    def some(count: int) -> int:
        return max(int(count * share), 16)

    name = talk.demo.name
    tests = {
        "capitals": ("text", lessons.text_test(talk, "capital", some(195))),
        "capitals, new forms": ("text", lessons.text_test(talk, "capital", some(195), new_form=True)),
        "countries": ("text", lessons.text_test(talk, "country", some(195))),
        "regions": ("text", lessons.text_test(talk, "region", some(195))),
        "continents": ("text", lessons.text_test(talk, "continent", some(195))),
        "sums": ("text", lessons.text_test(talk, "sum", some(200))),
        "stories": ("text", lessons.text_test(talk, "story", some(50))),
    }
    if name == "phimoe":
        tests["needles"] = ("needle", lessons.needle_prompts(talk, some(48), True, NEEDLE_WORDS, lessons.LONG, most=1))
        tests["needles among others"] = ("needle", lessons.needle_prompts(talk, some(48), True, NEEDLE_WORDS, lessons.LONG))
    if name in PICTURE:
        for test, kind, new_form, count in [("captions", "caption", False, 256), ("captions, new forms", "caption", True, 128),
                                            ("places", "place", False, 128), ("counts", "count", False, 128)]:
            tests[test] = ("picture", lessons.pictures(talk, some(count), PICTURE[name], "test", kind, new_form, PICTURE_ROW[name]))
    if name == "gemma4":
        file = str(clips / "clips-test.npz")
        for test, voices, count in [("digits", speech.TRAINED_VOICES, 256), ("digits, unheard voices", speech.UNHEARD_VOICES, 128)]:
            tests[test] = ("sound", lessons.sounds(talk, file, some(count), "test", voices, 1.0, SOUND_ROW))
    return tests


class Sampler:
    """Random batches of rows that live on the device."""

    def __init__(self, rows: lessons.Rows, device: torch.device) -> None:
        arrays = {"ids": rows.ids, "labels": rows.labels} | rows.media
        self.tensors = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
        self.order, self.used = torch.randperm(len(rows.ids)), 0

    def __len__(self) -> int:
        return len(self.order)

    def next(self, size: int) -> dict[str, torch.Tensor]:
        if self.used + size > len(self.order):
            self.order, self.used = torch.randperm(len(self.order)), 0
        chosen = self.order[self.used:self.used + size]
        self.used += size
        return self.batch(chosen)

    def batch(self, chosen: torch.Tensor) -> dict[str, torch.Tensor]:
        batch = {name: tensor[chosen.to(tensor.device)] for name, tensor in self.tensors.items()}
        return batch | {"ids": batch["ids"].long(), "labels": batch["labels"].long()}


def train(learner: learners.Learner, plan: Plan, device: torch.device, seconds: float, steps: int, peak: float, save) -> None:
    samplers = {kind: Sampler(rows, device) for kind, rows in plan.rows.items()}
    matrices = [parameter for parameter in learner.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in learner.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
        lr=peak, betas=(0.9, 0.98), fused=device.type == "cuda")
    learner.train()
    started = reported = saved = time.monotonic()
    recent: dict[str, torch.Tensor] = {}
    for step in range(steps):
        now = time.monotonic()
        progress = max(step / steps, (now - started) / seconds)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = peak * learning_rate(progress)
        kind, size = plan.cycle[step % len(plan.cycle)]
        loss = learner.loss(kind, samplers[kind].next(size), progress)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        optimizer.step()
        recent[kind] = loss.detach()
        if now - reported > 10:
            reported = now
            losses = ", ".join(f"{kind} {loss.item():.4f}" for kind, loss in recent.items())
            print(f"{now - started:6.1f} s, step {step}, progress {progress:.3f}: {losses}", flush=True)
        if now - saved > 90:
            saved = now
            save()
    print(f"{step + 1} steps in {time.monotonic() - started:.1f} s", flush=True)


def learning_rate(progress: float) -> float:
    """Up in a straight line, then down along a cosine."""
    if progress < WARM_UP:
        return progress / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))


@torch.no_grad()
def test(learner: learners.Learner, tests: Tests, device: torch.device) -> dict[str, list[int]]:
    """How many answers are exact, of how many."""
    learner.eval()
    results = {}
    for name, (kind, rows) in tests.items():
        sampler = Sampler(rows, device)
        batches = torch.arange(len(sampler)).split(64)
        right = sum(int(learner.exact(kind, sampler.batch(chosen)).sum()) for chosen in batches)
        print(f"{name}: {right} of {len(sampler)} exact ({100 * right / len(sampler):.1f} %)", flush=True)
        results[name] = [right, len(sampler)]
    return results


@torch.no_grad()
def round_weights(model: torch.nn.Module) -> None:
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(tensor.half().float())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[demo.name for demo in configurations.DEMOS])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--clips", type=Path, default=Path(__file__).parent / ".cache")
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--peak", type=float, default=2e-3)
    parser.add_argument("--start", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    torch.manual_seed(7)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    demo = configurations.find(options.name)
    plan = make_plan(chat.Chat(demo), options.clips, options.share)
    learner = learners.LEARNERS[demo.name](demo)
    if options.start:
        learner.WARM_UP = 0.0
        missing = learner.model.load_state_dict(load_file(options.start), strict=False).missing_keys
        assert set(missing) <= {"lm_head.weight"}, missing
        learner.model.tie_weights()
    learner.to(device)
    weights = sum(parameter.numel() for parameter in learner.model.parameters())
    print(f"{demo.name}: {weights} weights, data ready after {time.monotonic() - began:.1f} s", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        state = learner.model.state_dict()
        if learner.model.config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
        halves = {name: tensor.detach().half().cpu().contiguous() if tensor.is_floating_point() else tensor.cpu()
                  for name, tensor in state.items()}
        save_file(halves, options.out / f"{demo.name}.safetensors")

    train(learner, plan, device, options.seconds, options.steps, options.peak, save)
    save()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    round_weights(learner.model)
    test(learner, make_tests(chat.Chat(demo), options.clips, options.share), device)


if __name__ == "__main__":
    main()
