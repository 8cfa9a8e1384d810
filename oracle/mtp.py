"""Records multi-token prediction: the oracle for the programs that draft.

    python oracle/mtp.py                  fixtures/qwen3_5/mtp.json and mtp.safetensors, for the existing checkpoint

transformers loads no `mtp.*` tensors, so the formula stands here, in plain torch: with `h` the text's row of a token after its final norm and `e` the embedding of the next token,

    u = fc · concat(norm(e), norm(h));  u = layer(u);  h' = norm(u);  logits = lm_head · h'

predict the token after the next one. The layer is one of the text's layers with softmax attention, at the positions of the rows of `h`; it is compared with transformers' own. Norms are zero-centred. Where the text
has no row yet, `h'` of the token before takes the place of `h`, with no other norm than the one before `fc`.
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
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer

import checkpoint
import families
import record

FIXTURE = Path(__file__).resolve().parent.parent / "fixtures" / "qwen3_5"
LENGTHS = [2, 17, 40]
MARGIN = 0.05
CHAIN = 5
"""Tokens that are predicted one from the other behind the last row of the text."""


class Prediction:
    """The formula. Keys and values grow with each call of `rows`."""

    def __init__(self, tensors: dict[str, torch.Tensor], config: dict, embeddings: torch.Tensor, head: torch.Tensor):
        self.tensors, self.config, self.embeddings, self.head = tensors, config, embeddings, head
        self.keys, self.values = [], []

    def weight(self, name: str) -> torch.Tensor:
        return self.tensors[f"mtp.{name}.weight"]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * (1.0 + self.weight(name))

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [rows, heads, dim]: the first part of each head, in halves. Of text, all three position streams are alike."""
        rope = self.config["rope_parameters"]
        width = int(x.shape[-1] * rope["partial_rotary_factor"])
        frequencies = rope["rope_theta"] ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = (positions.double()[:, None] * frequencies).repeat(1, 2)[:, None, :].float()
        turned, rest = x[..., :width], x[..., width:]
        first, second = turned.chunk(2, -1)
        return torch.cat([turned * angles.cos() + torch.cat([-second, first], -1) * angles.sin(), rest], -1)

    def layer(self, u: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        dim, heads, kv = (self.config[key] for key in ("head_dim", "num_attention_heads", "num_key_value_heads"))
        rows = len(u)
        product = lambda name, x: x @ self.weight(f"layers.0.{name}").T
        h = self.norm(u, "layers.0.input_layernorm")
        query, gate = product("self_attn.q_proj", h).view(rows, heads, 2 * dim).chunk(2, -1)
        query = self.rotate(self.norm(query, "layers.0.self_attn.q_norm"), positions)
        key = product("self_attn.k_proj", h).view(rows, kv, dim)
        self.keys.append(self.rotate(self.norm(key, "layers.0.self_attn.k_norm"), positions))
        self.values.append(product("self_attn.v_proj", h).view(rows, kv, dim))
        keys, values = (torch.cat(all).repeat_interleave(heads // kv, 1) for all in (self.keys, self.values))
        scores = torch.einsum("qhd,khd->hqk", query, keys) * dim**-0.5
        before = len(keys) - rows
        hidden = torch.arange(len(keys))[None, :] > before + torch.arange(rows)[:, None]
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)
        u = u + product("self_attn.o_proj", (mixed * gate.sigmoid()).reshape(rows, heads * dim))
        h = self.norm(u, "layers.0.post_attention_layernorm")
        return u + product("mlp.down_proj", silu(product("mlp.gate_proj", h)) * product("mlp.up_proj", h))

    def rows(self, h: torch.Tensor, following: list[int], positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is chained and the logits, of rows of the text (or chained ones), the tokens behind them and their positions."""
        e = self.embeddings[torch.tensor(following)]
        both = torch.cat([self.norm(e, "pre_fc_norm_embedding"), self.norm(h, "pre_fc_norm_hidden")], -1)
        h = self.norm(self.layer(both @ self.weight("fc").T, positions), "norm")
        return h, h @ self.head.T


def check_layer(model: torch.nn.Module, prediction: Prediction, u: torch.Tensor, positions: torch.Tensor) -> None:
    """The layer is that of transformers."""
    text = model.model.language_model
    config = text.config
    place = config.layer_types.index("full_attention")
    layer = Qwen3_5DecoderLayer(config, place).float().eval()
    prefix = "mtp.layers.0."
    layer.load_state_dict({name[len(prefix):]: tensor for name, tensor in prediction.tensors.items() if name.startswith(prefix)})
    turns = text.rotary_emb(u[None], positions[None, None].expand(3, 1, -1))
    mask = torch.full((len(u), len(u)), float("-inf")).triu(1)[None, None]
    theirs = layer(u[None], position_embeddings=turns, attention_mask=mask)
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    difference = (theirs.reshape(u.shape) - prediction.layer(u, positions)).abs().max().item()
    if difference > 1e-4:
        raise SystemExit(f"the layer differs from transformers' by {difference}")


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    family = families.load("qwen3_5")
    model = checkpoint.load(family, FIXTURE)
    config = json.loads((FIXTURE / "config.json").read_text(encoding="utf-8"))["text_config"]
    published = {name: tensor.float() for file in sorted(FIXTURE.glob("model*.safetensors")) for name, tensor in load_file(file).items()}
    tensors = {name: tensor for name, tensor in published.items() if name.startswith("mtp.")}
    text = model.model.language_model
    new = lambda: Prediction(tensors, config, text.embed_tokens.weight, model.lm_head.weight)
    residual = []
    text.layers[-1].register_forward_hook(lambda _, __, out: residual.append(out[0] if isinstance(out, tuple) else out))
    ordinary, cases, saved = record.ordinary_ids(FIXTURE), [], {}
    for length in LENGTHS:
        name = f"mtp.{length}"
        for attempt in range(record.ATTEMPTS):
            ids = record.random_ids(1, name, attempt, length + 1, ordinary)
            residual.clear()
            normed = text(input_ids=torch.tensor([ids[:length]])).last_hidden_state[0]
            if length == LENGTHS[-1]:
                check_layer(model, new(), normed, torch.arange(length))
            prediction = new()
            hidden, logits = prediction.rows(normed, ids[1:], torch.arange(length))
            chained, steps = [], [logits[-1]]
            while len(chained) < CHAIN:
                chained.append(int(steps[-1].argmax()))
                hidden, step = prediction.rows(hidden[-1:], chained[-1:], torch.tensor([length + len(chained) - 1]))
                steps.append(step[0])
            best = torch.stack(steps).topk(2).values
            if (margin := (best[:, 0] - best[:, 1]).min().item()) >= MARGIN:
                break
        else:
            raise SystemExit(f"{name}: no clear prediction")
        saved |= {f"{name}.hidden": residual[0].reshape(length, -1).contiguous(), f"{name}.logits": logits.contiguous(),
                  f"{name}.chained_logits": torch.stack(steps[1:]).contiguous()}
        cases.append({"name": name, "ids": ids, "greedy": chained, "min_margin": round(margin, 4)})
        print(f"{name}: attempt {attempt} predicts {chained}", flush=True)
    save_file(saved, FIXTURE / "mtp.safetensors")
    head = {"family": "qwen3_5", "transformers": transformers.__version__}
    (FIXTURE / "mtp.json").write_text(json.dumps(head | {"prompts": cases}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
