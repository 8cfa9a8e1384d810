"""Writes a checkpoint folder as it would be published: configuration, weights, tokenizer, chat template."""

import json
import shutil
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import vocabulary
import weights
from families import Family, Vocabulary

TEMPLATES = Path(__file__).with_name("templates")


def write(family: Family, variant: str, seed: int, folder: Path) -> None:
    """Recreate `folder` with the checkpoint of this family, variant and seed."""
    if variant not in family.variants:
        raise SystemExit(f"unknown variant {variant!r}; this family has: {', '.join(family.variants)}")
    if folder.exists() and any(folder.iterdir()):
        if not (folder / "tokenizer_cases.json").exists():
            raise SystemExit(f"{folder} is not empty and is no fixture: choose another --out")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = vocabulary.PIPELINES[family.pipeline](family.merges.get(variant, 90))
    ids = Vocabulary(tokenizer.get_vocab(with_added_tokens=True))
    config = family.variants[variant](ids)
    write_json(folder / "config.json", config)
    write_generation_config(family, ids, folder)
    write_tokenizer(family, tokenizer, folder)
    write_weights(family, config, ids, seed, folder)


def load(family: Family, folder: Path) -> torch.nn.Module:
    """The model as transformers reads it from the finished folder; fails if a tensor is missing and would be initialised at random."""
    model_class = getattr(transformers, family.model_class)
    model, report = model_class.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, **family.load_options
    )
    if report["missing_keys"] or report["mismatched_keys"]:
        raise SystemExit(f"{folder}: transformers misses {report['missing_keys']} {report['mismatched_keys']}")
    return model.eval()


def write_weights(family: Family, config: dict, ids: Vocabulary, seed: int, folder: Path) -> None:
    model_class = getattr(transformers, family.model_class)
    parsed = transformers.AutoConfig.from_pretrained(folder)
    model = model_class._from_config(parsed, dtype=torch.float32, attn_implementation="eager")
    size = parsed.get_text_config().vocab_size
    quiet = [ids[token] for token in family.quiet] + list(range(ids.size, size))
    if ids.size > size:
        raise SystemExit(f"the tokenizer has {ids.size} tokens, the model only {size}")
    weights.fill(model, seed, family.rules, quiet)
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch, max_shard_size=family.shard_bytes or "1GB")
        for file in Path(scratch).glob("model*"):
            shutil.copy(file, folder / file.name)
    if family.extra_tensors:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        for name, shape in family.extra_tensors(config).items():
            assert name not in tensors, f"{name} is used by the model"
            tensors[name] = weights.draw(seed, name, shape, family.rules + weights.RULES)
        save_file(tensors, file, metadata={"format": "pt"})


def write_generation_config(family: Family, ids: Vocabulary, folder: Path) -> None:
    eos = [ids[token] for token in family.eos]
    fields = {"eos_token_id": eos if len(eos) > 1 else eos[0], "transformers_version": "4.57.0"}
    if family.bos:
        fields["bos_token_id"] = ids[family.bos]
    write_json(folder / "generation_config.json", fields)


def write_tokenizer(family: Family, tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (TEMPLATES / family.template).read_text(encoding="utf-8").removesuffix("\n")
    added = {
        str(index): {
            "content": token.content, "lstrip": token.lstrip, "normalized": token.normalized,
            "rstrip": token.rstrip, "single_word": token.single_word, "special": token.special,
        }
        for index, token in sorted(tokenizer.get_added_tokens_decoder().items())
    }
    fields = {"added_tokens_decoder": added} | family.tokenizer_config
    if family.template_home == "chat_template.jinja":
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    else:
        fields["chat_template"] = template
    if family.template_home == "chat_template.json":
        write_json(folder / "chat_template.json", {"chat_template": template})
    write_json(folder / "tokenizer_config.json", fields)


def write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
