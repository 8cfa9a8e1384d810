"""The comparison of peers.py on a machine where nothing can be installed and time is short: models are made side by side, every measurement is a line of JSON, and a call that was cut off is continued by the next.

usage: peers_elsewhere.py QHX LLAMA_BENCH LOG.jsonl MODELS_FOLDER [--threads 2,8] [--rounds N] [--prompt N] [--new N] [--depth N] [--seconds N] [--without gemma-4-e4b] …      (needs PyPI gguf)

QHX, LLAMA_BENCH with its libraries, the package gguf and this folder with configs/ are brought along. Rows stand in the order of their importance: a round of all of them, the next round, then decoding after DEPTH tokens,
then Gemma-4-E4B, whose files are made only then, then the first model with both sides held to AVX2. No measurement begins that would probably not end within SECONDS. Threads are pinned to cores that share nothing (taskset). What is in
the log already is not measured again; the table of all that it holds is printed at the end. SmolLM2 is here a model of its shape with random weights.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import llama
from peers import CHANGES, PRECISIONS, ROOT, VARIANTS

FIRST, LAST = ["qwen3-vl-2b", "phi-tiny-moe", "qwen3.5-0.8b", "smollm2-shape"], ["gemma-4-e4b"]
SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_theta": 100000, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("qhx", type=lambda path: Path(path).resolve())
    parser.add_argument("peer", type=lambda path: Path(path).resolve())
    parser.add_argument("log", type=Path)
    parser.add_argument("models", type=Path)
    parser.add_argument("--threads", type=lambda text: [int(part) for part in text.split(",")], default=[2, 8])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=450)
    parser.add_argument("--without", nargs="*", default=[], choices=FIRST + LAST)
    options = parser.parse_args()
    options.end, options.cores = time.monotonic() + options.seconds, separate_cores()
    options.models.mkdir(parents=True, exist_ok=True)
    log = Log(options.log)
    devices = subprocess.run([options.qhx, "devices"], capture_output=True, text=True).stdout
    print(f"{devices}cores: {options.cores}", flush=True)
    try:
        for names in ([name for name in group if name not in options.without] for group in (FIRST, LAST)):
            if names and any(run["key"] not in log.keys() for run in plan(names, options)):
                make(names, options)
                for run in plan(names, options):
                    measure(run, options, log)
        foremost = [name for name in FIRST if name not in options.without][:1]
        for run in plan(foremost, options, "avx2"):
            measure(run, options, log)
    except TimeoutError:
        print("out of time: call again to continue", flush=True)
    print(table(log, options))


class Log:
    """A line of JSON for each measurement that was made."""

    def __init__(self, file: Path):
        self.file, self.lines = file, [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def keys(self) -> list:
        return [line["key"] for line in self.lines]

    def add(self, line: dict):
        self.lines.append(line)
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def separate_cores() -> list:
    """One logical CPU of each core."""
    seen, cores = set(), []
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        core = siblings.read_text() if siblings.exists() else cpu
        if core not in seen:
            seen.add(core)
            cores.append(cpu)
    return cores


def plan(names: list, options, instructions: str | None = None) -> list:
    """The measurements in order. A key is [model, precision, threads, instructions, round, program]."""
    rows = [(name, precision, threads) for name in names for precision in PRECISIONS for threads in options.threads]
    keys = [[*row, instructions, turn, program] for turn in range(options.rounds) for row in rows for program in ("llama.cpp", "qhx")]
    if options.depth and not instructions:
        keys += [[*row, instructions, 0, "deep"] for row in rows]
    return [{"key": key} for key in keys]


def make(names: list, options):
    """The bundles and GGUF files that are not there yet, all at the same time."""

    def bundle(name: str, precision: str):
        place = options.models / f"{name}-{precision}"
        if not place.exists():
            llama.quiet(options.qhx, "synth", config_of(name), "--out", place, "--precision", precision)

    def gguf(name: str, quants: str):
        file = options.models / f"{name}-{quants}.gguf"
        if not file.exists():
            partial = file.with_suffix(".partial")
            llama.quiet(sys.executable, ROOT / "bench/peer_gguf.py", config_of(name), quants, partial)
            partial.rename(file)

    def config_of(name: str) -> Path:
        return options.models / f"{name}.json"

    start = time.monotonic()
    for name in names:
        config = SMOLLM2 if name == "smollm2-shape" else json.loads((ROOT / f"configs/{name}.json").read_text()) | CHANGES.get(name, {})
        config_of(name).write_text(json.dumps(config))
    with ThreadPoolExecutor(16) as workers:
        jobs = [workers.submit(work, name, kind) for name in names for pair in PRECISIONS.items() for work, kind in zip((bundle, gguf), pair)]
        for job in jobs:
            job.result()
    print(f"made {', '.join(names)} in {time.monotonic() - start:.0f} s", flush=True)


def measure(run: dict, options, log: Log):
    """Makes one measurement, unless the log has it."""
    name, precision, threads, instructions, turn, program = key = run["key"]
    if key in log.keys():
        return
    same = [line["seconds"] for line in log.lines if line["key"][:4] == key[:4] and line["key"][5] == program]
    if time.monotonic() + max(same, default=20) > options.end:
        raise TimeoutError
    if threads > len(options.cores):
        sys.exit(f"{threads} threads, and only {len(options.cores)} cores")
    pinned = ["taskset", "-c", ",".join(map(str, options.cores[:threads]))]
    if instructions:
        pinned = ["env", f"QHX_INSTRUCTIONS={instructions}", *pinned]
    start = time.monotonic()
    line = {"key": key}
    try:
        line |= measured(key, pinned, options)
    except SystemExit as failure:
        print(f"{key}: {failure}", flush=True)
        return
    log.add(line | {"seconds": time.monotonic() - start})


def measured(key: list, pinned: list, options) -> dict:
    """What one program says."""
    name, precision, threads, instructions, turn, program = key
    if program == "llama.cpp":
        speeds, variant = llama.speeds(peer(options, instructions), options.models / f"{name}-{PRECISIONS[precision]}.gguf", threads, options.prompt, options.new, pinned)
        return {"speeds": speeds, "variant": variant}
    tests = ["-p", options.prompt, "-n", options.new] if program == "qhx" else ["-p", 0, "-n", options.new, "-d", f"0,{options.depth}"]
    command = [*pinned, options.qhx, "bench", options.models / f"{name}-{precision}", *tests, "-r", 1, "--threads", threads, "--device", "cpu", "--json"]
    found = json.loads(llama.quiet(*command))
    speeds = {result["test"]: result["mean"] for result in found["results"]}
    return {"speeds": speeds, "bandwidth": found["read_bandwidth_bytes_per_s"], "share": found["bandwidth_share"], "bytes": found["weight_bytes_per_token"], "peak": found["peak_rss_bytes"]}


def peer(options, instructions: str | None) -> Path:
    """llama.cpp's tool, held to an instruction set where one is named."""
    if not instructions:
        return options.peer
    place = options.models / instructions
    if place.exists():
        shutil.rmtree(place)
    return llama.only(options.peer, VARIANTS[instructions], place)


def table(log: Log, options) -> str:
    """The medians of all that was measured."""
    prompt, new, deep = f"pp{options.prompt}", f"tg{options.new}", f"tg{options.new}@d{options.depth}"
    lines = [
        f"| model | qhx / llama.cpp | threads | both held to | its variant | {prompt} qhx | llama.cpp | ratio | {new} qhx | llama.cpp | ratio | MB read per token | share of bandwidth | GB/s | kept at {options.depth} | rounds |",
        "|---|---|---:|---|---|" + "---:|" * 11,
    ]
    rows = []
    for line in log.lines:
        if line["key"][:4] not in rows:
            rows.append(line["key"][:4])
    for row in rows:
        found = {program: [line for line in log.lines if line["key"][:4] == row and line["key"][5] == program] for program in ("qhx", "llama.cpp", "deep")}
        ours, theirs = found["qhx"], found["llama.cpp"]
        if not ours or not theirs:
            continue

        def middle(lines: list, test: str) -> float:
            return statistics.median(line["speeds"][test] for line in lines)

        cells = [f"{middle(ours, test):.1f} | {middle(theirs, test):.1f} | {middle(ours, test) / middle(theirs, test):.2f}" for test in (prompt, new)]
        kept = [line["speeds"][deep] / line["speeds"][new] for line in found["deep"]]
        share, bandwidth = (statistics.median(line[part] for line in ours) for part in ("share", "bandwidth"))
        name, precision, threads, instructions = row
        head = f"| {name} | {precision} / {PRECISIONS[precision]} | {threads} | {instructions or ''} | {theirs[0]['variant']}"
        rest = f"{ours[0]['bytes'] / 1e6:.0f} | {share:.0%} | {bandwidth / 1e9:.1f} | {f'{kept[0]:.0%}' if kept else ''} | {min(len(ours), len(theirs))}"
        lines.append(f"{head} | {' | '.join(cells)} | {rest} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
