"""Compares the speed of qhx and the stock llama.cpp model by model, alternating in one run. Gives ratios, since absolute speeds depend on the machine.

usage: cargo xtask bench-peers [NAME ...] [--rounds N] [--threads N] [--prompt N] [--new N] [--depth N] [--instructions avx2] [--real-time]
       peers.py QHX LLAMA_BENCH LLAMA_QUANTIZE SMOLLM2.gguf [NAME ...] …      (needs PyPI gguf and openvino-genai)

LLAMA_BENCH and LLAMA_QUANTIZE are llama.cpp's own tools beside its prebuilt libraries, of which it picks the best variant for this CPU (`xtask/src/llama.rs`). With `--instructions avx2` both sides
do with AVX2. SmolLM2 is the same real GGUF file on both sides; w8 and w4 are beside the types of llama.cpp that lose about as much (docs/precision.md). The four full-size models have random
weights: `qhx synth` of configs/NAME.json for qhx, peer_gguf.py of the same file for llama.cpp. OpenVINO GenAI reads GGUF files of SmolLM2's family and is measured in the same rounds there. Each pair is made when it is needed and deleted afterwards (16 GB of disk for the largest). The
table replaces the one between the markers in docs/benchmarks.md.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import llama
import peer_gguf
from llama import quiet

ROOT = Path(__file__).parent.parent
MODELS = ["phi-tiny-moe", "qwen3.5-0.8b", "qwen3-vl-2b", "gemma-4-e4b"]
PRECISIONS = {"w8": "Q8_0", "w4": "Q4_0"}
# Of SmolLM2 the file as it is, then pairs of about the same divergence: docs/precision.md.
SMOLLM2 = {"Q4_1": "Q4_1", "w8": "Q8_0", "w4": "Q5_0"}
# The types that OpenVINO GenAI reads, of these.
OPENVINO = ["Q4_1", "Q8_0"]
# The variant of llama.cpp's libraries that has an instruction set and nothing beyond it.
VARIANTS = {"avx2": "haswell"}
# llama.cpp assumes that the head size is the hidden size divided by the number of heads, which does not hold for Phi-tiny-MoE: both sides get the nearest shape for which it does.
CHANGES = {"phi-tiny-moe": {"num_attention_heads": 32}}
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("qhx", type=Path)
    parser.add_argument("peer", type=Path)
    parser.add_argument("quantise", type=Path)
    parser.add_argument("smollm2", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"smollm2, {', '.join(MODELS)}; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2000, help="how much of decoding is kept after so many tokens; 0: not measured")
    parser.add_argument("--instructions", choices=VARIANTS, help="what both sides may use of the CPU; default: all")
    parser.add_argument("--real-time", action="store_true", help="measure with real-time priority, where the machine has other work to do (chrt -r 5)")
    options = parser.parse_args()
    options.before = ["chrt", "-r", "5"] if options.real_time else []
    if unknown := set(options.names) - {"smollm2", *MODELS}:
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    names = options.names or ["smollm2", *MODELS]
    rows = []
    with tempfile.TemporaryDirectory() as place:
        if options.instructions:
            options.peer = llama.only(options.peer, VARIANTS[options.instructions], Path(place) / "llama.cpp")
            os.environ["QHX_INSTRUCTIONS"] = options.instructions
        for name in names:
            for precision, quants in (SMOLLM2 if name == "smollm2" else PRECISIONS).items():
                ours, theirs = make(options, name, precision, quants, Path(place))
                rows.append(Row(name, precision, quants, options, ours, theirs))
                print(rows[-1].shown(), file=sys.stderr, flush=True)
                shutil.rmtree(ours)
                if theirs != options.smollm2:
                    theirs.unlink()
    text = table(rows, options)
    print(text)
    if not options.names and not options.instructions:
        publish(text)


def make(options, name: str, precision: str, quants: str, place: Path):
    """A bundle and a GGUF file of the same model."""
    bundle, peer = place / "bundle", place / "peer.gguf"
    if name == "smollm2" and precision == "Q4_1":
        quiet(options.qhx, "forge", options.smollm2, "--out", bundle)
        return bundle, options.smollm2
    if name == "smollm2":
        quiet(options.qhx, "forge", options.smollm2, "--precision", precision, "--out", bundle)
        quiet(options.quantise, "--allow-requantize", options.smollm2, peer, quants)
        return bundle, peer
    config = json.loads((ROOT / f"configs/{name}.json").read_text()) | CHANGES.get(name, {})
    file = place / "config.json"
    file.write_text(json.dumps(config))
    quiet(options.qhx, "synth", file, "--out", bundle, "--precision", precision)
    peer_gguf.write(config, quants, peer)
    return bundle, peer


class Row:
    """The measurements of one pair."""

    def __init__(self, name: str, precision: str, quants: str, options, bundle: Path, peer: Path):
        self.name, self.precision, self.quants = name, precision, quants
        tests = [f"pp{options.prompt}", f"tg{options.new}"]
        self.ours, self.theirs, self.whole_head, self.share = {test: [] for test in tests}, {test: [] for test in tests}, [], []
        self.openvino = []
        numbers = ["-p", options.prompt, "-n", options.new, "-r", "1", "--threads", options.threads]
        whole_head = ["-p", 0, "-n", options.new, "-r", "1", "--threads", options.threads, "--all-logits"]
        for _ in range(options.rounds):
            found, self.variant = llama.speeds(options.peer, peer, options.threads, options.prompt, options.new, options.before)
            mine = json.loads(quiet(*options.before, options.qhx, "bench", bundle, *numbers, "--json"))
            all_logits = json.loads(quiet(*options.before, options.qhx, "bench", bundle, *whole_head, "--json"))
            self.whole_head.append(all_logits["results"][0]["mean"])
            for test in tests:
                self.theirs[test].append(found[test])
            for result in mine["results"]:
                self.ours[result["test"]].append(result["mean"])
            self.share.append(mine["bandwidth_share"])
            if name == "smollm2" and quants in OPENVINO and not options.instructions:
                script = ROOT / "bench/openvino_speed.py"
                self.openvino.append(json.loads(quiet(*options.before, sys.executable, script, peer, options.threads, options.prompt, options.new)))
            self.megabytes, self.resident = mine["weight_bytes_per_token"] / 1e6, mine["peak_rss_bytes"] / 2**20
            self.experts, self.bandwidth = mine.get("experts"), mine["read_bandwidth_bytes_per_s"] / 1e9
        self.kept = kept(options, bundle) if options.depth else None

    def shown(self) -> str:
        def cells(test: str) -> str:
            ours, theirs = statistics.median(self.ours[test]), statistics.median(self.theirs[test])
            return f"{ours:.1f} | {theirs:.1f} | {ours / theirs:.2f}"

        speeds = " | ".join(cells(test) for test in self.ours)
        share, whole_head = statistics.median(self.share), statistics.median(self.whole_head)
        whole_ratio = whole_head / statistics.median(list(self.theirs.values())[-1])
        deep = f"{self.kept:.0%}" if self.kept else ""
        rest = f"{whole_head:.1f} | {whole_ratio:.2f} | {self.megabytes:.0f} | {share:.0%} | {deep} | {self.resident:.0f}"
        return f"| {self.name} | {self.precision} / {self.quants} | {self.variant} | {speeds} | {rest} |"

    def beside_openvino(self) -> list:
        """The speeds of OpenVINO GenAI with the same file as llama.cpp, and qhx's as a multiple of them."""
        if not self.openvino:
            return []
        medians = {test: statistics.median(found[test] for found in self.openvino) for test in self.ours}
        cells = [f"{test} {theirs:.1f} ({statistics.median(self.ours[test]) / theirs:.2f}x)" for test, theirs in medians.items()]
        return [f"OpenVINO GenAI with {self.quants} of {self.name}, and qhx's {self.precision} as a multiple of it: {', '.join(cells)}."]

    def routing(self) -> list:
        """How many experts of a mixture were used."""
        if not self.experts:
            return []
        used, of, tokens = self.experts["used"], self.experts["of"], self.experts["tokens"]
        return [f"{self.name} at {self.precision} used {statistics.mean(used):.1f} of {of} experts per layer on average (at least {min(used)}) over {tokens} tokens."]


def kept(options, bundle: Path) -> float:
    """The part of decoding's speed that is left after so many tokens."""
    numbers = ["-p", 0, "-n", options.new, "-d", f"0,{options.depth}", "-r", "1", "--threads", options.threads]
    at_first, deep = (result["mean"] for result in json.loads(quiet(*options.before, options.qhx, "bench", bundle, *numbers, "--json"))["results"])
    return deep / at_first


def table(rows: list, options) -> str:
    tests = " | ".join(f"{test} qhx | llama.cpp | ratio" for test in rows[0].ours)
    head = f"| model | qhx / llama.cpp | its variant | {tests} | all logits | ratio | MB read per token | share of bandwidth | kept at {options.depth} | peak MiB |"
    bandwidths = ", ".join(f"{row.bandwidth:.1f}" for row in rows)
    notes = " ".join([f"Read bandwidth of {options.threads} threads in the last round of each row, in GB/s: {bandwidths}.", *(note for row in rows for note in row.beside_openvino() + row.routing())])
    return "\n".join([head, "|---|---|---|" + "---:|" * 12, *(row.shown() for row in rows), "", notes])


def publish(text: str):
    file = ROOT / "docs/benchmarks.md"
    before, rest = file.read_text().split(BEGIN)
    file.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
