"""Compares how fast qhx and llama.cpp decode for several sessions at once, alternating in one run.

usage: cargo xtask bench-sessions [NAME ...] [--sessions N] [--rounds N] [--threads N] [--new N] [--precisions w8,w4]
       sessions.py QHX LLAMA_BATCHED_BENCH [NAME ...] …      (needs PyPI gguf)

LLAMA_BATCHED_BENCH is llama.cpp's own tool (`xtask/src/llama.rs`). Models have random weights, as in peers.py. Medians; the table replaces the one between the markers in docs/benchmarks.md.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import peers
from llama import quiet
from peers import ROOT

MODELS = ["qwen3-vl-2b", "qwen3.5-0.8b", "phi-tiny-moe"]
BEGIN, END = "<!-- sessions: begin -->", "<!-- sessions: end -->"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("qhx", type=Path)
    parser.add_argument("peer", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(MODELS)}; default: all")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--precisions", default="w8,w4")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for name in options.names or MODELS:
            for precision in options.precisions.split(","):
                bundle, gguf = peers.make(options, name, precision, peers.PRECISIONS[precision], Path(place))
                rows.append((name, precision, *measured(options, bundle, gguf)))
                print(rows[-1], file=sys.stderr, flush=True)
                shutil.rmtree(bundle)
                gguf.unlink()
    text = table(rows, options)
    print(text)
    if not options.names:
        publish(text)


def measured(options, bundle: Path, gguf: Path):
    """Median tokens per second of qhx and of llama.cpp, each for one session and for several."""
    ours, theirs = {1: [], options.sessions: []}, {1: [], options.sessions: []}
    for _ in range(options.rounds):
        numbers = ["-p", 0, "-n", options.new, "-r", 1, "--threads", options.threads, "--sessions", f"1,{options.sessions}"]
        results = json.loads(quiet(options.qhx, "bench", bundle, *numbers, "--json"))["results"]
        for sessions, result in zip(ours, results, strict=True):
            ours[sessions].append(result["mean"])
        arguments = ["-m", gguf, "-c", 4096, "-b", 512, "-ub", 512, "-npp", 64, "-ntg", options.new, "-npl", f"1,{options.sessions}"]
        printed = quiet(options.peer, *arguments, "-t", options.threads, "-tb", options.threads, "--output-format", "jsonl")
        for line in printed.splitlines():
            if line.startswith("{"):
                result = json.loads(line)
                theirs[result["pl"]].append(result["speed_tg"])
    return [[statistics.median(side[sessions]) for sessions in side] for side in (ours, theirs)]


def table(rows, options):
    many = options.sessions
    lines = [
        f"| model | precision | qhx 1 / {many} | gain | llama.cpp 1 / {many} | gain | qhx / llama.cpp at {many} |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, precision, (one, all_), (peer_one, peer_all) in rows:
        gains = f"{one:.1f} / {all_:.1f} | {all_ / one:.2f}x | {peer_one:.1f} / {peer_all:.1f} | {peer_all / peer_one:.2f}x"
        lines.append(f"| {name} | {precision} / {peers.PRECISIONS[precision]} | {gains} | **{all_ / peer_all:.2f}x** |")
    return "\n".join(lines)


def publish(text: str):
    page = ROOT / "docs/benchmarks.md"
    before, rest = page.read_text().split(BEGIN, 1)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END, 1)[1]}")


if __name__ == "__main__":
    main()
