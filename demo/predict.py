"""Trains multi-token prediction for the Qwen3.5 demo and adds it to its checkpoint, as f16; all other tensors stay as they are.

    python3 predict.py [--seconds 600] [--rows 24000] [--threads 1]

Needs torch and transformers; a CPU is enough. The model is frozen, and only `mtp.*` learns: to say what the model itself would say next, on the texts that the model was trained with, from its own rows and then from its
own guesses, as guesses are chained when an answer is drafted. What was written is compared with the formula of `oracle/mtp.py`.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as functional
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm, apply_rotary_pos_emb

import chat
import configurations
import lessons
import train

FOLDER = Path(__file__).parent / "qwen3_5"
CHAIN = 3
"""Tokens ahead: the first from the model's row, each further one from the guess before it."""
PEAK = 2e-3
CYCLE = [("text", 16)] * 7 + [("long", 2)]
"""Kinds and batch sizes in turn, in the proportion of the model's own training."""


class Prediction(nn.Module):
    """The weights, under the names that they have in a checkpoint behind `mtp.`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        config = self.config = model.config
        place = config.layer_types.index("full_attention")
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, place)])
        self.norm = Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        # The model's last layer with softmax attention knows more than a random one.
        last = max(index for index, kind in enumerate(config.layer_types) if kind == "full_attention")
        self.layers[0].load_state_dict(model.layers[last].state_dict())
        self.norm.load_state_dict(model.norm.state_dict())
        with torch.no_grad():
            self.fc.weight.copy_(0.5 * torch.eye(config.hidden_size).repeat(1, 2) + 0.01 * torch.randn_like(self.fc.weight))

    def forward(self, text: nn.Module, states: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
        """The normed rows of each guess, from the model's states `[B, T, hidden]`: row `i` of guess `n` (from 1) predicts token `i + n + 1`."""
        keys, values, guesses = [], [], []
        for ahead in range(1, CHAIN + 1):
            count = ids.shape[1] - ahead
            both = [self.pre_fc_norm_embedding(text.embed_tokens(ids[:, ahead:])), self.pre_fc_norm_hidden(states[:, :count])]
            rows = self.fc(torch.cat(both, -1))
            # A row from the model has its position, one from a guess that of the token before its own.
            positions = torch.arange(ahead - 1, ahead - 1 + count)
            turns = text.rotary_emb(rows, positions.expand(3, 1, -1))
            layer = self.layers[0]
            rows = rows + self.attend(layer.self_attn, layer.input_layernorm(rows), turns, keys, values)
            rows = rows + layer.mlp(layer.post_attention_layernorm(rows))
            states = self.norm(rows)
            guesses.append(states)
        return guesses

    def attend(self, attention: nn.Module, rows: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor], keys: list[torch.Tensor],
               values: list[torch.Tensor]) -> torch.Tensor:
        """Row `i` sees the rows of the model up to `i`, and of each guess row `i` alone. Adds its keys and values, `[B, heads, T, dim]`."""
        batch, count, _ = rows.shape
        dim = self.config.head_dim
        query, gate = attention.q_proj(rows).view(batch, count, -1, 2 * dim).chunk(2, -1)
        key = attention.k_norm(attention.k_proj(rows).view(batch, count, -1, dim)).transpose(1, 2)
        query, key = apply_rotary_pos_emb(attention.q_norm(query).transpose(1, 2), key, *turns)
        groups = query.shape[1] // key.shape[1]
        keys.append(key.repeat_interleave(groups, 1))
        values.append(attention.v_proj(rows).view(batch, count, -1, dim).transpose(1, 2).repeat_interleave(groups, 1))
        later = torch.ones(count, count, dtype=torch.bool).triu(1)
        scores = [(query @ keys[0][:, :, :count].transpose(2, 3)).masked_fill(later, float("-inf"))]
        scores += [(query * own[:, :, :count]).sum(-1, keepdim=True) for own in keys[1:]]
        shares = (torch.cat(scores, -1) * dim**-0.5).softmax(-1)
        mixed = shares[..., :count] @ values[0][:, :, :count]
        for number, own in enumerate(values[1:]):
            mixed = mixed + shares[..., count + number, None] * own[:, :, :count]
        return attention.o_proj((mixed.transpose(1, 2) * gate.sigmoid()).reshape(batch, count, -1))


def guessed(prediction: Prediction, text: nn.Module, batch: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each guess ahead its logits and what the model says, at tokens of answers."""
    longest = int((batch["labels"] != chat.IGNORE).nonzero()[:, 1].max()) + 1
    ids, is_answer = batch["ids"][:, :longest], batch["labels"][:, :longest] != chat.IGNORE
    with torch.no_grad():
        states = text(input_ids=ids, use_cache=False).last_hidden_state
        said = (states @ text.embed_tokens.weight.T).argmax(-1)
    found = []
    for ahead, rows in enumerate(prediction(text, states, ids), 1):
        wanted = is_answer[:, ahead + 1:]
        found.append((rows[:, :-1][wanted] @ text.embed_tokens.weight.T, said[:, ahead:-1][wanted]))
    return found


def learn(prediction: Prediction, text: nn.Module, plan: dict[str, lessons.Rows], seconds: float) -> None:
    samplers = {kind: train.Sampler(rows, torch.device("cpu")) for kind, rows in plan.items()}
    optimizer = torch.optim.AdamW(prediction.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    started = reported = time.monotonic()
    step = 0
    while (progress := (time.monotonic() - started) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = PEAK * train.learning_rate(progress)
        kind, size = CYCLE[step % len(CYCLE)]
        guesses = guessed(prediction, text, samplers[kind].next(size))
        loss = sum(functional.cross_entropy(logits, said) for logits, said in guesses)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(prediction.parameters(), 1.0)
        optimizer.step()
        step += 1
        if time.monotonic() - reported > 10:
            reported = time.monotonic()
            right = ", ".join(f"{(logits.argmax(-1) == said).float().mean():.3f}" for logits, said in guesses)
            print(f"{progress:.3f}, step {step}, {kind}: loss {loss.item():.3f}, right {right}", flush=True)
    print(f"{step} steps", flush=True)


@torch.no_grad()
def test(prediction: Prediction, text: nn.Module, tests: train.Tests) -> None:
    """How many guesses are what the model says, in answers to what training never asked."""
    for name, (_, rows) in tests.items():
        guesses = guessed(prediction, text, train.Sampler(rows, torch.device("cpu")).batch(torch.arange(len(rows.ids))))
        shares = [100 * (logits.argmax(-1) == said).float().mean().item() for logits, said in guesses]
        print(f"{name}: " + ", ".join(f"{share:.1f} %" for share in shares), flush=True)


def write(prediction: Prediction) -> dict[str, torch.Tensor]:
    """Adds the weights to the checkpoint; what they are there."""
    file = FOLDER / "model.safetensors"
    with safe_open(file, "pt") as kept:
        metadata, tensors = kept.metadata(), {name: kept.get_tensor(name) for name in kept.keys() if not name.startswith("mtp.")}
    own = {f"mtp.{name}": tensor.half().contiguous() for name, tensor in prediction.state_dict().items()}
    save_file(tensors | own, file, metadata)
    print(f"{sum(tensor.numel() for tensor in own.values())} weights of {file.stat().st_size} bytes in all", flush=True)
    return {name: tensor.float() for name, tensor in own.items()}


@torch.no_grad()
def check(prediction: Prediction, text: nn.Module, written: dict[str, torch.Tensor], ids: torch.Tensor) -> None:
    """The formula of the oracle, with what was written, gives the same rows, those behind guesses included."""
    sys.path.append(str(Path(__file__).parent.parent / "oracle"))
    import mtp

    prediction.load_state_dict({name.removeprefix("mtp."): tensor for name, tensor in written.items()})
    states = text(input_ids=ids[None], use_cache=False).last_hidden_state
    guesses = prediction(text, states, ids[None])
    row = len(ids) - 2 - CHAIN
    formula = mtp.Prediction(written, prediction.config.to_dict(), text.embed_tokens.weight, text.embed_tokens.weight)
    expected, _ = formula.rows(states[0, :row + 1], ids[1:row + 2].tolist(), torch.arange(row + 1))
    for ahead, found in enumerate(guesses, 1):
        difference = (found[0, row] - expected[-1]).abs().max().item()
        assert difference < 1e-3, f"guess {ahead} differs from the formula by {difference}"
        following = row + 1 + ahead
        expected, _ = formula.rows(expected[-1:], ids[following:following + 1].tolist(), torch.tensor([row + ahead]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--rows", type=int, default=24_000)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(7)
    torch.set_num_threads(options.threads)
    talk = chat.Chat(configurations.find("qwen3_5"))
    plan = {"text": lessons.text(talk, options.rows, words=85), "long": lessons.text(talk, options.rows // 30, words=430, length=lessons.LONG)}
    tests = train.make_tests(talk, FOLDER)
    text = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval().requires_grad_(False).model
    prediction = Prediction(text)
    learn(prediction, text, plan, options.seconds)
    written = write(prediction)
    check(prediction, text, written, torch.from_numpy(plan["text"].ids[0]).long())
    test(prediction, text, tests)


if __name__ == "__main__":
    main()
