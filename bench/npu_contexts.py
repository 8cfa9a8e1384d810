"""Compiles the context binaries of the four full-size models for the Hexagon NPU, with random weights, and prints files, sizes, times, memory and the cost of a token.

usage: npu_contexts.py QHX QNN_DIR [JOB ...] [--jobs N] [--limit SECONDS] [--optimize N] [--allow-risky] [--place DIR] [--configs DIR] [--list]

QNN_DIR is the folder with libQnnHtp.so (docs/npu.md says where it comes from). A JOB is MODEL/PART/PRECISION/ARCH as --list shows them, or a prefix of one; the default is
all jobs. Text and towers are compiled separately, each in its own process, `--jobs` at once: the text without towers, and each tower with a text of a few small layers. A job
that takes longer than `--limit` is stopped and reported with what it had made so far. Needs only Python; every job's folder is deleted afterwards.
"""

import argparse
import concurrent.futures
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONTEXT, PREFILL = 1024, 128
TOWERS = ["vision", "audio"]
# Of the small text next to a tower.
VOCABULARY = 1024
JOBS = [
    # Longest first, so that none of them starts last.
    ("gemma-4-e4b", "text", "f16", "v81"), ("qwen3-vl-2b", "vision", "f16", "v81"), ("gemma-4-e4b", "vision", "f16", "v81"),
    ("gemma-4-e4b", "text", "w8", "v81"), ("qwen3-vl-2b", "text", "f16", "v81"), ("qwen3.5-0.8b", "vision", "f16", "v81"),
    ("gemma-4-e4b", "audio", "f16", "v81"), ("qwen3.5-0.8b", "text", "f16", "v81"), ("qwen3-vl-2b", "text", "w8", "v81"),
    ("qwen3.5-0.8b", "text", "w8", "v81"), ("phi-tiny-moe", "text", "moe-i8", "v81"), ("phi-tiny-moe", "text", "moe-i8", "v79"),
]
PUBLISHED = {
    ("qwen3.5-0.8b", "text", "f16"): "decode 961 MB", ("qwen3.5-0.8b", "text", "w8"): "decode 489 MB",
    ("phi-tiny-moe", "text", "moe-i8"): "a_lo, a_hi 650 MB each; pf_lo, pf_hi 659 MB each; experts 2.69 GB",
    ("gemma-4-e4b", "text", "f16"): "parts of 1.1 to 1.7 GB", ("gemma-4-e4b", "text", "w8"): "parts of 1.1 to 1.7 GB",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("qhx", type=Path)
    parser.add_argument("qnn_dir", type=Path)
    parser.add_argument("names", nargs="*", metavar="JOB")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="processes at once")
    parser.add_argument("--limit", type=float, default=3600, metavar="SECONDS", help="for one job (default 3600)")
    parser.add_argument("--optimize", type=int, choices=[1, 2, 3], help="compilation effort (default: 3)")
    parser.add_argument("--allow-risky", action="store_true", help="make all graphs even if they may exhaust the DSP's heap")
    parser.add_argument("--place", type=Path, help="where to make bundles (default: the system's temporary folder)")
    parser.add_argument("--configs", type=Path, default=Path(__file__).parent.parent / "configs")
    parser.add_argument("--list", action="store_true", help="print the jobs and exit")
    options = parser.parse_args()
    options.qhx = options.qhx.resolve()
    jobs = [job for job in JOBS if not options.names or any("/".join(job).startswith(name) for name in options.names)]
    if options.list:
        print("\n".join("/".join(job) for job in jobs))
        return
    if not jobs:
        parser.error("no such job; --list shows them")
    with tempfile.TemporaryDirectory(dir=options.place) as place, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        begun = [pool.submit(compile_one, options, job, Path(place) / str(number)) for number, job in enumerate(jobs)]
        for done in concurrent.futures.as_completed(begun):
            print(done.result().row(), file=sys.stderr, flush=True)
        results = sorted((done.result() for done in begun), key=lambda result: result.job)
    print("| model | target | our contexts | published | time | peak memory | per token: executions, host bytes copied, weight bytes read |")
    print("|---|---|---|---|---:|---:|---|")
    print("\n".join(result.row() for result in results))


def compile_one(options, job: tuple, place: Path):
    """Runs `qhx synth` and monitors it."""
    model, part, precision, arch = job
    place.mkdir()
    config = json.loads((options.configs / f"{model}.json").read_text())
    (place / "config.json").write_text(json.dumps(cut(config, part)))
    command = [options.qhx, "synth", place / "config.json", "--out", place / "bundle", "--precision", precision, "--target", arch,
               "--context", CONTEXT, "--prefill", PREFILL if part == "text" else "none", "--qnn-dir", options.qnn_dir, "--json"]
    if options.optimize:
        command += ["--optimize", options.optimize]
    if options.allow_risky:
        command.append("--allow-risky")
    result = Result(job)
    with open(place / "out", "wb") as out, open(place / "err", "wb") as err:
        process = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=out, stderr=err)
    started, status = time.monotonic(), None
    while status is None:
        time.sleep(0.2)
        ended, code, usage = os.wait4(process.pid, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(code)
        elif time.monotonic() - started > options.limit:
            result.note = f"stopped after {options.limit:.0f} s"
            process.send_signal(signal.SIGKILL)
            ended, code, usage = os.wait4(process.pid, 0)
            status = os.waitstatus_to_exitcode(code)
    process.returncode = status
    result.seconds, result.peak = time.monotonic() - started, usage.ru_maxrss * 1024
    # An unfinished bundle has a hidden name.
    result.contexts = [context for folder in sorted(place.glob(f"*bundle*/{arch}*")) for context in contexts(folder, part)]
    if status != 0 and not result.note:
        said = (place / "err").read_text(errors="replace").strip().splitlines()
        result.note = " ".join(line.strip() for line in said[-4:])[-500:] or f"exit status {status}"
    if part == "text":
        result.token = per_token(options, place / "config.json", precision, arch)
    shutil.rmtree(place, ignore_errors=True)
    return result


def cut(config: dict, part: str) -> dict:
    """The text alone, or one tower with as small a text as its output allows."""
    kept = {f"{tower}_config" for tower in TOWERS if tower == part}
    config = {key: value for key, value in config.items() if not key.endswith(("vision_config", "audio_config")) or key in kept}
    if part == "text":
        return config
    text = config["text_config"]
    # As many layers as DeepStack adds to, and at least one of each kind.
    layers = max(4, len(config.get("vision_config", {}).get("deepstack_visual_indexes", [])))
    text |= {"num_hidden_layers": layers, "intermediate_size": 64, "num_kv_shared_layers": 0}
    if "layer_types" in text:
        text["layer_types"] = ["sliding_attention"] * (layers - 1) + ["full_attention"]
    for field in ("vocab_size", "vocab_size_per_layer_input"):
        if field in text:
            text[field] = VOCABULARY
    known = {}
    for section in (config, text):
        for key in filter(lambda key: key.endswith(("token_id", "token_index")), list(section)):
            if isinstance(section[key], int):
                section[key] = known.setdefault(section[key], VOCABULARY - 1 - len(known))
            else:
                del section[key]
    return config


def contexts(folder: Path, part: str) -> list:
    """Names and sizes of the part's context binaries, in the order they were written."""
    files = sorted(folder.glob(f"{part}*.bin"), key=lambda file: file.stat().st_mtime)
    return [(file.stem, file.stat().st_size) for file in files]


def per_token(options, config: Path, precision: str, arch: str) -> str:
    """The cost of one decoded token according to the plan."""
    command = [options.qhx, "forge", config, "--plan", "--json", "--precision", precision, "--target", arch, "--context", CONTEXT,
               "--prefill", PREFILL]
    ran = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if ran.returncode != 0:
        return " ".join(ran.stderr.split())[-300:]
    token = json.loads(ran.stdout)["plans"][0]["per_token"]
    return f"{token['executions']}; {size(token['bytes_in'])} in, {size(token['bytes_out'])} out; {size(token['weight_bytes'])}"


class Result:
    """The outcome of one job."""

    def __init__(self, job: tuple):
        self.job, self.seconds, self.peak, self.contexts, self.token, self.note = job, 0.0, 0, [], "", ""

    def row(self) -> str:
        model, part, precision, arch = self.job
        made = "; ".join(f"{name} {size(bytes)}" for name, bytes in self.contexts)
        if len(self.contexts) > 12:
            smallest, largest = (choose(bytes for _, bytes in self.contexts) for choose in (min, max))
            made = f"{len(self.contexts)} contexts of {size(smallest)} to {size(largest)}"
        whole = f" (together {size(sum(bytes for _, bytes in self.contexts))})" if len(self.contexts) > 1 else ""
        made = ", ".join(text for text in [made + whole, f"**{self.note}**" if self.note else ""] if text)
        published = PUBLISHED.get((model, part, precision), "")
        return (f"| {model}, {part}, {precision} | {arch} | {made} | {published} | {self.seconds:.0f} s | {self.peak / 2**30:.1f} GiB "
                f"| {self.token} |").replace("\n", " ")


def size(count: int) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.{0 if count >= 100 * unit else 2 if unit == 1e9 else 1}f} {name}"
    return f"{count} B"


if __name__ == "__main__":
    main()
