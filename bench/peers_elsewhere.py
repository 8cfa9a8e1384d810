"""The comparison of peers.py on a machine where nothing can be installed and time is short: models are made side by side, every measurement is a line of JSON, and a call that was cut off is continued by the next.

usage: peers_elsewhere.py QHX LLAMA_BENCH LOG.jsonl MODELS_FOLDER [--threads 2,8] [--rounds N] [--depth N] [--seconds N] [--only MODEL …] [--profiles]      (needs PyPI gguf)

QHX, LLAMA_BENCH with its libraries, the package gguf and this folder with configs/ are brought along. Measurements stand in the order of their importance: every row once, with decoding after DEPTH tokens; with --profiles where qhx spends the time
of a token with the most threads; then rows with both sides held to AVX2; then further rounds. A row has 512 tokens of prompt and 64 new ones, fewer where they would take long (TOKENS). No measurement begins that would probably not end within SECONDS.
Threads are pinned to cores that share nothing (taskset). What is in the log already is not measured again; the table of all that it holds is printed at the end. SmolLM2 is here a model of its shape with random weights.
"""

import argparse
import ctypes
import json
import mmap
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

MODELS = ["qwen3-vl-2b", "phi-tiny-moe", "qwen3.5-0.8b", "smollm2-shape", "gemma-4-e4b"]
# Of prompts and new ones, where 512 and 64 would take too long with so many threads.
TOKENS = {("qwen3-vl-2b", 2): (512, 32), ("phi-tiny-moe", 2): (256, 32), ("gemma-4-e4b", 2): (128, 16), ("gemma-4-e4b", 8): (256, 32)}
# New tokens after many others.
DEEP = 16
# Of Linux on x86-64, with their names there.
HUGE_PAGE, MAP_FIXED, MADV_COLLAPSE = 2 << 20, 0x10, 25
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
    parser.add_argument("--depth", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=520)
    parser.add_argument("--only", nargs="*", default=MODELS, choices=MODELS)
    parser.add_argument("--profiles", action="store_true")
    options = parser.parse_args()
    options.end, options.cores = time.monotonic() + options.seconds, separate_cores()
    options.models.mkdir(parents=True, exist_ok=True)
    log = Log(options.log)
    devices = subprocess.run([options.qhx, "devices"], capture_output=True, text=True).stdout
    print(f"{devices}cores: {options.cores}", flush=True)
    keys = [key for key in plan(options) if key not in log.keys()]
    if keys:
        make(options)
    for key in keys:
        measure(key, options, log)
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


def plan(options) -> list:
    """The measurements in order. A key is [model, precision, threads, instructions, round, program]."""
    rows = [[name, precision, threads, None] for name in options.only for precision in PRECISIONS for threads in options.threads]
    both = ["llama.cpp", "qhx"]
    first = [[*row, 0, program] for row in rows for program in (*both, *(["deep"] if options.depth else []))]
    most = max(options.threads)
    profiles = [[*row, 0, "profile"] for row in rows if options.profiles and row[2] == most]
    avx2 = [[name, precision, threads, "avx2", 0, program] for name, precision, threads, _ in rows for program in both]
    return first + profiles + avx2 + [[*row, turn, program] for turn in range(1, options.rounds) for row in rows for program in both]


def tokens(name: str, threads: int) -> tuple:
    """How long a prompt is, and how many tokens are decoded."""
    return TOKENS.get((name, threads), (512, 64))


def make(options):
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
    for name in options.only:
        config = SMOLLM2 if name == "smollm2-shape" else json.loads((ROOT / f"configs/{name}.json").read_text()) | CHANGES.get(name, {})
        config_of(name).write_text(json.dumps(config))
    with ThreadPoolExecutor(16) as workers:
        jobs = [workers.submit(work, name, kind) for name in reversed(options.only) for pair in PRECISIONS.items() for work, kind in zip((bundle, gguf), pair)]
        for job in jobs:
            job.result()
    print(f"made {', '.join(options.only)} in {time.monotonic() - start:.0f} s", flush=True)
    start = time.monotonic()
    files = [file for file in options.models.rglob("*") if file.is_file() and file.stat().st_size > HUGE_PAGE]
    with ThreadPoolExecutor(16) as workers:
        shares = list(workers.map(lambda file: collapse(file, start + 30), files))
    print(f"{sum(shares) / max(len(shares), 1):.0%} in huge pages in {time.monotonic() - start:.0f} s", flush=True)


def collapse(file: Path, end: float) -> float:
    """Asks the kernel to keep a file in huge pages, and gives the share of it for which it does before the time `end`. A file in memory that was written beside others is scattered over single pages, which are read a quarter slower; one that was read from a disk often is not."""
    length, libc = file.stat().st_size // HUGE_PAGE * HUGE_PAGE, ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes, libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t], [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with file.open("rb") as opened:
        # At an address that is a multiple of a huge page's size: room for that first, then the file in its place.
        room = libc.mmap(None, length + HUGE_PAGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        start = -(-room // HUGE_PAGE) * HUGE_PAGE
        libc.mmap(start, length, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, opened.fileno(), 0)
        parts = range(0, length, 32 * HUGE_PAGE)
        done = sum(time.monotonic() < end and libc.madvise(start + at, min(32 * HUGE_PAGE, length - at), MADV_COLLAPSE) == 0 for at in parts)
        libc.munmap(room, length + HUGE_PAGE)
    return done / len(parts)


def measure(key: list, options, log: Log):
    """Makes one measurement, unless too little time is left for it."""
    name, precision, threads, instructions, turn, program = key
    # As long as the same took with other instructions or another precision, or longer than most.
    like = [line["seconds"] for line in log.lines if line["key"][0] == name and line["key"][2] == threads and line["key"][5] == program]
    if time.monotonic() + max(like, default=25) > options.end:
        return
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
    prompt, new = tokens(name, threads)
    if program == "llama.cpp":
        speeds, variant = llama.speeds(peer(options, instructions), options.models / f"{name}-{PRECISIONS[precision]}.gguf", threads, prompt, new, pinned)
        return {"pp": speeds[f"pp{prompt}"], "tg": speeds[f"tg{new}"], "variant": variant}
    command = [*pinned, options.qhx, "bench", options.models / f"{name}-{precision}", "-r", 1, "--threads", threads, "--device", "cpu"]
    if program == "profile":
        print(llama.quiet(*command, "-p", 0, "-n", 16, "--profile"), flush=True)
        return {}
    tests = ["-p", prompt, "-n", new] if program == "qhx" else ["-p", 0, "-n", DEEP, "-d", options.depth]
    found = json.loads(llama.quiet(*command, *tests, "--json"))
    speeds = [result["mean"] for result in found["results"]]
    if program == "deep":
        return {"tg": speeds[0]}
    facts = {"bandwidth": found["read_bandwidth_bytes_per_s"], "share": found["bandwidth_share"], "bytes": found["weight_bytes_per_token"], "peak": found["peak_rss_bytes"]}
    return {"pp": speeds[0], "tg": speeds[1], **facts}


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
    lines = [
        f"| model | qhx / llama.cpp | threads | both held to | its variant | tokens | prefill qhx | llama.cpp | ratio | decode qhx | llama.cpp | ratio | MB read per token | share of bandwidth | GB/s | kept at {options.depth} | rounds |",
        "|---|---|---:|---|---|---|" + "---:|" * 11,
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
            return statistics.median(line[test] for line in lines)

        cells = [f"{middle(ours, test):.1f} | {middle(theirs, test):.1f} | {middle(ours, test) / middle(theirs, test):.2f}" for test in ("pp", "tg")]
        kept = [f"{line['tg'] / middle(ours, 'tg'):.0%}" for line in found["deep"]]
        name, precision, threads, instructions = row
        prompt, new = tokens(name, threads)
        head = f"| {name} | {precision} / {PRECISIONS[precision]} | {threads} | {instructions or ''} | {theirs[0]['variant']} | {prompt}, {new}"
        rest = f"{ours[0]['bytes'] / 1e6:.0f} | {middle(ours, 'share'):.0%} | {middle(ours, 'bandwidth') / 1e9:.1f} | {''.join(kept[:1])} | {min(len(ours), len(theirs))}"
        lines.append(f"{head} | {' | '.join(cells)} | {rest} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
