"""Makes tiny checkpoints of the real architectures and records what transformers computes with them.

    python oracle/make_fixtures.py                                     all committed fixtures, into fixtures/
    python oracle/make_fixtures.py --family llama --seed 7 --variant other --out DIR
"""

import argparse
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
sys.dont_write_bytecode = True

import torch
import transformers

import checkpoint
import families
import media
import record
import tokenizer_cases

REPOSITORY = Path(__file__).resolve().parent.parent
COMMITTED = {name: (name, "base") for name in families.NAMES} | {"phimoe_longrope": ("phimoe", "longrope")}
"""Folder in `fixtures/` to (family, variant)."""


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for folder, family, variant in wanted(arguments):
        make(family, variant, arguments.seed, folder, arguments.only_media)


def make(name: str, variant: str, seed: int, folder: Path, only_media: bool) -> None:
    """One fixture: the checkpoint first, then everything recorded from the files just written."""
    family = families.load(name)
    if only_media and not family.media:
        return
    if not only_media:
        checkpoint.write(family, variant, seed, folder)
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        tokenizer_cases.write(tokenizer, seed, folder)
        record.record(family, name, seed, checkpoint.load(family, folder), tokenizer, folder)
    if family.media:
        media.write_files(family, folder)
        media.record_media(family, name, seed, checkpoint.load(family, folder), folder)
    files = [file for file in folder.rglob("*") if file.is_file()]
    for file in files:
        file.chmod(0o644)
    size = sum(file.stat().st_size for file in files)
    print(f"{folder}: {name}/{variant}, seed {seed}, {size / 1e6:.2f} MB", flush=True)


def wanted(arguments: argparse.Namespace) -> list[tuple[Path, str, str]]:
    if arguments.family:
        return [(arguments.out or REPOSITORY / "fixtures" / arguments.family, arguments.family, arguments.variant)]
    base = arguments.out or REPOSITORY / "fixtures"
    return [(base / folder, family, variant) for folder, (family, variant) in COMMITTED.items()]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=families.NAMES, help="only this family (default: all committed fixtures)")
    parser.add_argument("--variant", default="base", help="dimensions and options: base, other, or one the family names")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and prompts (default 1)")
    parser.add_argument("--only-media", action="store_true", help="leave the checkpoint and the text cases as they are")
    parser.add_argument("--out", type=Path, help="folder to make anew (default: fixtures/FAMILY)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
