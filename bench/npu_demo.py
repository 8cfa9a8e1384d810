"""Runs the demo models on the Hexagon NPU (QNN's emulator on a PC) and compares their answers token by token with those of transformers in f32.

usage: npu_demo.py QHX QNN_DIR [NAME ...] [--arches v79,v81] [--precisions f16,w8] [--cases N]

Asks the first N text, image and audio questions of each model's held-out set (demo/NAME/heldout.json). A differing token is shown with the smallest margin
that transformers had in that answer. Needs only Python.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DEMO = Path(__file__).resolve().parent.parent / "demo"
MODELS = ["phimoe", "qwen3_5", "qwen3-vl", "gemma4"]
MEDIA = ["image", "audio"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("qhx", type=Path)
    parser.add_argument("qnn_dir", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(MODELS)}; default: all")
    parser.add_argument("--arches", default="v79,v81")
    parser.add_argument("--precisions", default="f16,w8")
    parser.add_argument("--cases", type=int, default=2, metavar="N", help="of each kind (default 2)")
    options = parser.parse_args()
    if unknown := set(options.names) - set(MODELS):
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    options.qhx = options.qhx.resolve()
    print("| model | precision | target | answers | tokens | differ | time |\n|---|---|---|---:|---:|---|---:|")
    for name in options.names or MODELS:
        cases = chosen(name, options.cases)
        for precision in options.precisions.split(","):
            with tempfile.TemporaryDirectory() as place:
                bundle = Path(place) / name
                run(options, "v81", "forge", DEMO / name, "--out", bundle, "--precision", precision)
                for arch in options.arches.split(","):
                    print(row(options, name, bundle, precision, arch, cases), flush=True)


def chosen(name: str, count: int) -> list:
    """The first cases of each kind."""
    cases = json.loads((DEMO / name / "heldout.json").read_text())["cases"]
    kinds = {kind: [] for kind in ["text", *MEDIA]}
    for case in cases:
        kinds[next((kind for kind in MEDIA if kind in case), "text")].append(case)
    return [case for kind in kinds.values() for case in kind[:count]]


def row(options, name: str, bundle: Path, precision: str, arch: str, cases: list) -> str:
    started, tokens, differing = time.monotonic(), 0, []
    for case in cases:
        expected = case["ids"]
        rows = len(case["prompt_ids"]) + len(expected)
        media = [word for kind in MEDIA if kind in case for word in (f"--{kind}", DEMO / case[kind])]
        ids = ",".join(map(str, case["prompt_ids"]))
        answer = run(options, arch, "generate", bundle, "--device", "npu", "--context", rows, "--ids", ids, "--max-new", len(expected), "--json", *media)
        found = json.loads(answer)["ids"]
        tokens += len(expected)
        if found != expected:
            at = next(i for i, (a, b) in enumerate(zip([*found, None], [*expected, None])) if a != b)
            differing.append(f"\"{case['text']}\" from token {at} on (margin {case['margin']})")
    seconds = time.monotonic() - started
    return f"| {name} | {precision} | {arch} | {len(cases)} | {tokens} | {'; '.join(differing) or 'none'} | {seconds:.0f} s |"


def run(options, arch: str, *words) -> str:
    env = os.environ | {"QHX_QNN_DIR": str(options.qnn_dir.resolve()), "QHX_NPU_ARCH": arch}
    done = subprocess.run([str(word) for word in (options.qhx, *words)], env=env, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, words))} failed:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
