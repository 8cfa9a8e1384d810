"""Runs a checkpoint in transformers and records what it computes: greedy tokens, the logits behind them, residual streams."""

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import StoppingCriteria, StoppingCriteriaList

import weights
from families import Family

CHUNK = 64
NEW_TOKENS = 24
LENGTHS = [1, 5, 17, 63, 64, 65, 70, 529, 1100]
STEP_LOGITS = ["len5", "len17", "len63", "len70"]
TAPPED = "len17"
ATTEMPTS = 400
CACHE_TOLERANCE = 5e-3
ROUNDING_TOLERANCE = 2e-4
DECISION_MARGIN = 2e-5


@dataclass
class Answer:
    """A greedy continuation and the logits each of its tokens was chosen from."""

    ids: list[int]
    greedy: list[int] = field(default_factory=list)
    logits: torch.Tensor | None = None
    text: str | None = None
    messages: list[dict] | None = None
    inputs: dict = field(default_factory=dict)
    """What the model takes besides ids: media, and the type of each prompt token."""
    extra: dict = field(default_factory=dict)
    positions: list | None = None

    @property
    def margins(self) -> torch.Tensor:
        best = self.logits.topk(2, dim=-1).values
        return best[:, 0] - best[:, 1]


@dataclass
class Health:
    """What makes an answer worth comparing with: clear choices, and not always the same token."""

    new_tokens: int = NEW_TOKENS
    margin: float = 0.03
    distinct: int = 12
    rounding: float = ROUNDING_TOLERANCE
    attempts: int = ATTEMPTS

    def accepts(self, answer: Answer) -> bool:
        return (len(answer.greedy) == self.new_tokens and len(set(answer.greedy)) >= self.distinct
                and answer.margins.min().item() >= self.margin)


def record(family: Family, name: str, seed: int, model: torch.nn.Module, tokenizer, folder: Path) -> None:
    """Write `oracle.json` and `oracle.safetensors` for the model in `folder`."""
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model.generation_config.eos_token_id = None  # answers have a fixed length
    models = [model, nudged(model)]
    ordinary = ordinary_ids(folder)
    answers = {}
    for length in prompt_lengths(model.config.get_text_config()):
        prompt = f"len{length}"
        answers[prompt] = find_healthy(
            family, models, prompt, Health(), lambda attempt: Answer(random_ids(seed, prompt, attempt, length, ordinary)))
    answers["gen300"] = find_healthy(
        family, models, "gen300", Health(new_tokens=300, margin=0.005, distinct=40),
        lambda attempt: Answer(random_ids(seed, "gen300", attempt, 17, ordinary)))
    answers["chat"] = find_healthy(family, models, "chat", Health(), lambda attempt: chat_prompt(tokenizer, plain, attempt))

    tensors = {f"{prompt}.step_logits": answers[prompt].logits for prompt in STEP_LOGITS}
    streams, logits = residual_streams(family, model, answers[TAPPED].ids)
    tensors |= {f"{TAPPED}.tap.{stage}": stream for stage, stream in streams.items()}
    tensors[f"{TAPPED}.prompt_logits"] = logits
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "oracle.safetensors")
    write_answers(name, seed, answers, folder)


def find_healthy(family: Family, models: list[torch.nn.Module], name: str, health: Health, propose) -> Answer:
    """The first prompt from `propose(attempt)` whose answer is healthy and robust."""
    for attempt in range(health.attempts):
        answer = propose(attempt)
        generate(models[0], answer, health)
        if health.accepts(answer) and is_robust(family, models, answer, health.rounding):
            return answer
    raise SystemExit(f"{name}: no healthy answer in {health.attempts} attempts ({health}); change the seed or the weights' scales")


def generate(model: torch.nn.Module, answer: Answer, health: Health) -> None:
    """Greedy decoding as transformers does it, with its cache; gives up at the first unclear choice."""
    inputs = torch.tensor([answer.ids])
    result = model.generate(
        inputs, **answer.inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=health.new_tokens,
        return_dict_in_generate=True, output_logits=True, output_scores=True,
        stopping_criteria=StoppingCriteriaList([ThinMargin(health.margin)]),
    )
    answer.greedy = result.sequences[0, len(answer.ids):].tolist()
    answer.logits = torch.cat(result.logits).float()


class ThinMargin(StoppingCriteria):
    """Stops where the two best tokens are too close to tell right from wrong."""

    def __init__(self, margin: float):
        self.margin = margin

    def __call__(self, input_ids, scores, **kwargs):
        best = scores[-1].topk(2, dim=-1).values
        return best[:, 0] - best[:, 1] < self.margin


def is_robust(family: Family, models: list[torch.nn.Module], answer: Answer, rounding: float) -> bool:
    """Whether another implementation can be expected to agree: hard choices are clear, and rounding has little effect.

    The cached path is not trusted blindly either: plain passes over prompt and answer must choose the same tokens.
    """
    logits, margin = plain_logits(family, models[0], answer)
    if margin < DECISION_MARGIN:
        return False
    worst = (logits - answer.logits).abs().max().item()
    if logits.argmax(-1).tolist() != answer.greedy or worst > CACHE_TOLERANCE:
        raise SystemExit(f"cached and uncached logits differ by {worst} on a prompt of {len(answer.ids)} tokens")
    rounded, _ = plain_logits(family, models[1], answer)
    return max(worst, (rounded - logits).abs().max().item()) <= rounding


@torch.no_grad()
def plain_logits(family: Family, model: torch.nn.Module, answer: Answer) -> tuple[torch.Tensor, float]:
    """The logits behind an answer, computed without a cache, and the smallest margin of the hard decisions inside the model."""
    everything = answer.ids + answer.greedy[:-1]
    rows, margin = [], float("inf")
    for length in pass_lengths(model.config.get_text_config(), len(everything)):
        media = {key: kinds_of(value, length) if key == "mm_token_type_ids" else value for key, value in answer.inputs.items()}
        outputs = model(input_ids=torch.tensor([everything[:length]]), use_cache=False, **media, **family.forward_options)
        rows.append(outputs.logits[0, sum(map(len, rows)):])
        if family.decision_margin:
            margin = min(margin, family.decision_margin(outputs, model.config))
    return torch.cat(rows)[len(answer.ids) - 1:], margin


def kinds_of(kinds: torch.Tensor, length: int) -> torch.Tensor:
    """The types of all tokens, given those of the prompt: generated tokens are text."""
    return torch.nn.functional.pad(kinds, (0, length - kinds.shape[1]))


@torch.no_grad()
def nudged(model: torch.nn.Module) -> torch.nn.Module:
    """The same model with each weight perturbed by about one rounding error: shows how sensitive an answer is to rounding."""
    other = copy.deepcopy(model)
    for name, weight in other.named_parameters():
        steps = weights.generator(0, f"nudge/{name}").standard_normal(tuple(weight.shape))
        weight.mul_(torch.from_numpy(1.0 + 2.0 ** -24 * steps))
    return other


def pass_lengths(config, length: int) -> list[int]:
    """One pass is enough unless positions are scaled by the length reached; then the rows up to the switch need their own pass."""
    rope = config.rope_parameters
    if rope.get("rope_type") != "longrope" or length <= rope["original_max_position_embeddings"]:
        return [length]
    return [rope["original_max_position_embeddings"], length]


@torch.no_grad()
def residual_streams(family: Family, model: torch.nn.Module, ids: list[int]) -> tuple[dict, torch.Tensor]:
    """The residual stream after each stage for one prompt, and the logits of all its rows."""
    streams, hooks = {}, []

    def keep(stage: str, value: torch.Tensor) -> None:
        streams[stage] = value[0].detach().clone()

    layers = (getattr(model.model, "language_model", None) or model.model).layers
    hooks.append(layers[0].register_forward_pre_hook(lambda module, args: keep("embed", args[0])))
    for index, layer in enumerate(layers):
        norm = getattr(layer, family.attention_residual)
        hooks.append(norm.register_forward_pre_hook(
            lambda module, args, stage=f"layers.{index}.attn": keep(stage, args[0])))
        hooks.append(layer.register_forward_hook(
            lambda module, args, output, stage=f"layers.{index}.{family.feed_forward_stage}":
            keep(stage, output[0] if isinstance(output, tuple) else output)))
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return streams, logits


def prompt_lengths(config) -> list[int]:
    """The usual lengths, and those at the edge of a sliding window when there is one."""
    window = getattr(config, "sliding_window", None)
    edges = [window - 1, window, window + 1, 2 * window + 3] if window else []
    return sorted({length for length in LENGTHS + edges if length > 0})


def random_ids(seed: int, name: str, attempt: int, length: int, ordinary: list[int]) -> list[int]:
    picks = weights.generator(seed, f"{name}/{attempt}").integers(len(ordinary), size=length)
    return [ordinary[pick] for pick in picks]


def ordinary_ids(folder: Path) -> list[int]:
    """Ids that stand for text: no added tokens, no placeholders."""
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    added = {token["id"] for token in described["added_tokens"]}
    return sorted(index for index in described["model"]["vocab"].values() if index not in added)


def chat_prompt(tokenizer, plain: Tokenizer, attempt: int) -> Answer:
    messages = [{"role": "user", "content": f"What is the answer to question {attempt}?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return Answer(plain.encode(text, add_special_tokens=False).ids, text=text, messages=messages)


def write_answers(name: str, seed: int, answers: dict[str, Answer], folder: Path) -> None:
    """One line per prompt, so that a change is readable in a diff."""
    head = {"family": name, "transformers": transformers.__version__, "seed": seed, "chunk_hint": CHUNK}
    lines = [f'  "{key}": {json.dumps(value)},' for key, value in head.items()]
    prompts = []
    for prompt, answer in answers.items():
        entry = {"name": prompt, "ids": answer.ids, "greedy": answer.greedy,
                 "min_margin": round(answer.margins.min().item(), 4)}
        if answer.text is not None:
            entry |= {"messages": answer.messages, "text": answer.text}
        prompts.append("    " + json.dumps(entry, ensure_ascii=False))
    text = "{\n" + "\n".join(lines) + '\n  "prompts": [\n' + ",\n".join(prompts) + "\n  ]\n}\n"
    (folder / "oracle.json").write_text(text, encoding="utf-8")
