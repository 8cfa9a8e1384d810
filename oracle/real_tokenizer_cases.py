"""Texts and ids that Python `tokenizers` encodes and decodes with a real tokenizer file, for `crates/qhx-text/tests/suite/real.rs`.

usage: real_tokenizer_cases.py TOKENIZER.json OUT.json [TEXTS]        (needs PyPI tokenizers)
"""

import json
import pathlib
import random
import sys

from tokenizers import Tokenizer

# Blocks of Unicode, from plain letters to emoji, combining marks and private characters.
BLOCKS = [
    (0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x530), (0x590, 0x700), (0x900, 0xD80), (0xE00, 0xE80), (0x1100, 0x1200),
    (0x2000, 0x2070), (0x2190, 0x2600), (0x2600, 0x27C0), (0x3000, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xFE00, 0xFE10),
    (0xFF00, 0xFFEF), (0x1D400, 0x1D7FF), (0x1F300, 0x1FAFF), (0x00, 0x20), (0xE000, 0xE100),
]  # fmt: skip
SPACES = [" ", "  ", "\n", "\n\n", "\t", "\r\n", "   \n", " \t ", "\u3000", "\u00a0"]
ODD = ["don't", "I'LL", "we've", "’s", "e\u0301", "👩‍👩‍👧‍👦", "🇫🇷", "▁", "<0x41>", "Ġ", "ſ", "İ", "ß", "ﬁ"]


def text(words, code, added, rng):
    parts = []
    for _ in range(rng.randint(1, 14)):
        block = rng.choice(BLOCKS)
        start = rng.randrange(len(code))
        special = rng.choice(added)
        parts.append(
            rng.choices(
                [
                    rng.choice(words),
                    "".join(chr(rng.randrange(*rng.choice(BLOCKS))) for _ in range(rng.randint(1, 6))),
                    "".join(chr(rng.randrange(*block)) for _ in range(rng.randint(1, 8))),
                    code[start : start + rng.randint(1, 60)],
                    rng.choice(SPACES) * rng.randint(1, 4),
                    str(rng.randint(0, 10 ** rng.randint(1, 12))),
                    special,
                    special[: rng.randint(1, len(special))],
                    rng.choice(ODD),
                ],
                weights=[30, 15, 10, 10, 10, 7, 8, 5, 5],
            )[0]
        )
        if rng.random() < 0.5:
            parts.append(" ")
    return "".join(parts)


def main():
    path, out = sys.argv[1:3]
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 5000
    here = pathlib.Path(__file__)
    tokenizer, literal = Tokenizer.from_file(path), Tokenizer.from_file(path)
    literal.encode_special_tokens = True
    for t in (tokenizer, literal):
        t.no_truncation()
        t.no_padding()
    rng = random.Random(7)
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    words = (here.parent / "corpus.txt").read_text(encoding="utf8").split()
    code = here.read_text(encoding="utf8")
    texts = [text(words, code, added, rng) for _ in range(count)]
    encoded = [
        {
            "text": t,
            "ids": tokenizer.encode(t, add_special_tokens=False).ids,
            "ids_with_special": tokenizer.encode(t).ids,
            "ids_literal": literal.encode(t, add_special_tokens=False).ids,
        }
        for t in texts
    ]
    # Ids as a model may choose them: at random, including bytes that form no character, and texts that start in the middle.
    size = tokenizer.get_vocab_size()
    sequences = [[rng.randrange(size) for _ in range(rng.randint(1, 40))] for _ in range(count // 4)]
    if tokenizer.token_to_id("<0x00>") is not None:
        bytes_ = [tokenizer.token_to_id(f"<0x{b:02X}>") for b in range(256)]
        sequences += [[rng.choice(bytes_) for _ in range(rng.randint(1, 30))] for _ in range(count // 8)]
    sequences += [case["ids"][rng.randint(0, len(case["ids"])) :] for case in encoded[: count // 4]]
    decoded = [{"ids": ids, "text": tokenizer.decode(ids), "whole": tokenizer.decode(ids, skip_special_tokens=False)} for ids in sequences]
    pathlib.Path(out).write_text(json.dumps({"encoded": encoded, "decoded": decoded}))


main()
