"""Measures how much of their speed qhx and llama.cpp keep next to busy processes, alternating in one run.

usage: cargo xtask bench-busy [--rounds N] [--threads N] [--prompt N] [--new N] [--neighbours N] [--pin]
       busy.py QHX LLAMA_BENCH MODEL.gguf …

A neighbour is another process that never waits. On two cores with two threads, a fair share is 2/3 next to one neighbour and 1/2 next to two.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
from contextlib import contextmanager
from pathlib import Path

import llama
from llama import quiet


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("qhx", type=Path)
    parser.add_argument("peer", type=Path, help="llama-bench (`xtask/src/llama.rs`)")
    parser.add_argument("model", type=Path, help="a GGUF file; forged without loss for qhx")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--neighbours", type=int, default=2, help="largest number of neighbours to try")
    parser.add_argument("--pin", action="store_true", help="pin each thread of qhx to its own core")
    options = parser.parse_args()
    counts = range(options.neighbours + 1)
    tests = [f"pp{options.prompt}", f"tg{options.new}"]
    found = {(count, test, side): [] for count in counts for test in tests for side in ["qhx", "llama.cpp"]}
    with tempfile.TemporaryDirectory() as place:
        bundle = Path(place) / "bundle"
        quiet(options.qhx, "forge", options.model, "--out", bundle)
        for _ in range(options.rounds):
            for count in counts:
                with neighbours(count):
                    theirs, ours = measured(options, bundle)
                for test in tests:
                    found[count, test, "llama.cpp"].append(theirs[test])
                    found[count, test, "qhx"].append(ours[test])
    print(table(found, counts, tests))


def measured(options, bundle: Path):
    """Tokens per second of llama.cpp and of qhx, by test."""
    theirs, _ = llama.speeds(options.peer, options.model, options.threads, options.prompt, options.new)
    numbers = ["-p", options.prompt, "-n", options.new, "-r", "1", "--threads", options.threads, *(["--pin"] if options.pin else [])]
    ours = json.loads(quiet(options.qhx, "bench", bundle, *numbers, "--json"))
    return theirs, {result["test"]: result["mean"] for result in ours["results"]}


@contextmanager
def neighbours(count: int):
    busy = [multiprocessing.Process(target=spin, daemon=True) for _ in range(count)]
    for process in busy:
        process.start()
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.join()


def spin():
    while True:
        pass


def table(found: dict, counts: range, tests: list) -> str:
    def cell(count: int, test: str, side: str) -> str:
        speed, alone = statistics.median(found[count, test, side]), statistics.median(found[0, test, side])
        return f"{speed:.1f} | {speed / alone:.0%}"

    columns = [(test, side) for test in tests for side in ["qhx", "llama.cpp"]]
    head = "| busy neighbours | " + " | ".join(f"{test} {side} | kept" for test, side in columns) + " |"
    rows = ["| " + " | ".join([str(count), *(cell(count, test, side) for test, side in columns)]) + " |" for count in counts]
    return "\n".join([head, "|---:|" + "---:|" * 2 * len(columns), *rows])


if __name__ == "__main__":
    main()
