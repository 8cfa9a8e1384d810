"""Writes the four checkpoint folders but for their weights: configuration, vocabulary, chat template, preprocessing.

    python3 prepare.py

The vocabularies have the pipelines of the published ones (see `oracle/vocabulary.py`) and 2048 tokens each, learned from what
the generators say.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "oracle"))

import vocabulary  # noqa: E402

import configurations  # noqa: E402
import corpus  # noqa: E402

VOCABULARY = 2048


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        vocabulary.CORPUS = Path(scratch) / "corpus.txt"
        vocabulary.CORPUS.write_text("\n".join(corpus.sentences()) + "\n", encoding="utf-8")
        for demo in configurations.DEMOS:
            write(demo, learn(demo.pipeline))


def learn(pipeline: str) -> Tokenizer:
    """A tokenizer of exactly 2048 tokens."""
    build = vocabulary.PIPELINES[pipeline]
    few = 10
    return build(few + VOCABULARY - build(few).get_vocab_size(with_added_tokens=True))


def write(demo: configurations.Demo, tokenizer: Tokenizer) -> None:
    folder = HERE / demo.name
    folder.mkdir(exist_ok=True)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(index): {
            "content": token.content, "lstrip": token.lstrip, "normalized": token.normalized,
            "rstrip": token.rstrip, "single_word": token.single_word, "special": token.special,
        }
        for index, token in sorted(tokenizer.get_added_tokens_decoder().items())
    }
    write_json(folder / "tokenizer_config.json", {"added_tokens_decoder": added} | demo.tokenizer_config)
    shutil.copy(HERE.parent / "oracle" / "templates" / demo.template, folder / "chat_template.jinja")
    write_json(folder / "config.json", demo.config(ids))
    write_json(folder / "generation_config.json", {
        "do_sample": False, "eos_token_id": [ids[token] for token in demo.end_tokens], "pad_token_id": ids[demo.pad_token],
    })
    for name, fields in demo.preprocessing.items():
        write_json(folder / name, fields)
    print(f"{demo.name}: {len(ids)} tokens")


def write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
