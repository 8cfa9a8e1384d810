"""Makes a drafter for the Gemma 4 fixture and records what it guesses: the oracle for a drafting program that reads what the text keeps of its rows.

    python oracle/drafter.py              fixtures/gemma4/drafter, drafter.json and drafter.safetensors, for the existing checkpoint

The drafter is transformers' `Gemma4AssistantForCausalLM`, called as its generation loop calls it after a decode step: with the text's keys and values of all rows (of sliding layers the latest, as many as the window
has), at the position of the token behind them, for all guesses; first with the text's last row, then with its own. It has centroids, so that it computes logits of some tokens only; the others get one that is below all of
these.
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
from safetensors.torch import save_file
from transformers import Gemma4AssistantForCausalLM

import checkpoint
import families
import record
import weights

FIXTURE = Path(__file__).resolve().parent.parent / "fixtures" / "gemma4"
FOLDER = FIXTURE / "drafter"
SEED = 1
LENGTHS = [1, 5, 17, 40]
MARGIN = 0.03
GUESSES = 5
RULES = [(r"^model\.norm\.weight$", 6.0, 0.8), (r"layer_scalar$", 0.9, 0.15), (r"\.q_norm\.weight$", 0.7, 0.1), (r"post_\w*norm\.weight$", 0.5, 0.1)]


def config(text: dict) -> dict:
    """A published drafter's, with layers of both kinds; two of them read the same keys and values."""
    taken = ["attention_bias", "attention_dropout", "attention_k_eq_v", "bos_token_id", "dtype", "enable_moe_block", "eos_token_id", "final_logit_softcapping", "global_head_dim",
             "head_dim", "hidden_activation", "initializer_range", "max_position_embeddings", "model_type", "num_global_key_value_heads", "num_key_value_heads", "pad_token_id",
             "rms_norm_eps", "rope_parameters", "sliding_window", "tie_word_embeddings", "use_bidirectional_attention", "use_double_wide_mlp", "vocab_size"]
    own = {
        "hidden_size": 20, "hidden_size_per_layer_input": 0, "intermediate_size": 28, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "num_attention_heads": 4, "num_hidden_layers": 3, "num_kv_shared_layers": 3, "vocab_size_per_layer_input": 0,
    }
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "backbone_hidden_size": text["hidden_size"],
        "centroid_intermediate_top_k": 120,
        "dtype": "float32",
        "model_type": "gemma4_assistant",
        "num_centroids": text["vocab_size"],
        "text_config": {name: text[name] for name in taken} | own,
        "tie_word_embeddings": True,
        "transformers_version": "5.22.2",
        "use_ordered_embeddings": True,
    }


def write(text: dict) -> None:
    """The checkpoint."""
    FOLDER.mkdir(exist_ok=True)
    checkpoint.write_json(FOLDER / "config.json", config(text))
    parsed = transformers.AutoConfig.from_pretrained(FOLDER)
    model = Gemma4AssistantForCausalLM._from_config(parsed, dtype=torch.float32, attn_implementation="eager")
    order = torch.from_numpy(weights.generator(SEED, "token_ordering").permutation(text["vocab_size"]))
    weights.fill(model, SEED, RULES, [])
    model.masked_embedding.token_ordering.copy_(order)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, FOLDER / "model.safetensors", metadata={"format": "pt"})


def load() -> torch.nn.Module:
    model, report = Gemma4AssistantForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    if report["missing_keys"] or report["mismatched_keys"] or report["unexpected_keys"]:
        raise SystemExit(f"{FOLDER}: {report}")
    return model.eval()


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    published = json.loads((FIXTURE / "config.json").read_text(encoding="utf-8"))["text_config"]
    write(published)
    model, drafter = checkpoint.load(families.load("gemma4"), FIXTURE), load()
    text = model.model.language_model
    ordinary, cases, saved = record.ordinary_ids(FIXTURE), [], {}
    for length in LENGTHS:
        name = f"drafter.{length}"
        for attempt in range(record.ATTEMPTS):
            ids = record.random_ids(SEED, name, attempt, length + 1, ordinary)
            out = text(input_ids=torch.tensor([ids[:length]]), use_cache=False, return_shared_kv_states=True)
            kept = dict(out.shared_kv_states)
            kept["sliding_attention"] = tuple(rows[:, :, -published["sliding_window"]:] for rows in kept["sliding_attention"])
            hidden, next_id, guesses, logits, chained = out.last_hidden_state[:, -1:], ids[length], [], [], []
            while len(guesses) < GUESSES:
                embedded = text.embed_tokens(torch.tensor([[next_id]]))
                made = drafter(inputs_embeds=torch.cat([embedded, hidden], -1), position_ids=torch.tensor([[length]]), shared_kv_states=kept)
                hidden, next_id = made.last_hidden_state, int(made.logits[0, 0].argmax())
                guesses.append(next_id)
                logits.append(made.logits[0, 0])
                chained.append(hidden[0, 0])
            best = torch.stack(logits).topk(2).values
            if (margin := (best[:, 0] - best[:, 1]).min().item()) >= MARGIN and len(set(guesses)) > 2:
                break
        else:
            raise SystemExit(f"{name}: no clear guesses")
        saved |= {f"{name}.logits": torch.stack(logits).contiguous(), f"{name}.hidden": torch.stack(chained).contiguous()}
        cases.append({"name": name, "ids": ids, "greedy": guesses, "min_margin": round(margin, 4)})
        print(f"{name}: attempt {attempt} guesses {guesses}", flush=True)
    save_file(saved, FIXTURE / "drafter.safetensors")
    head = {"family": "gemma4", "transformers": transformers.__version__}
    (FIXTURE / "drafter.json").write_text(json.dumps(head | {"prompts": cases}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
