"""Compares the speed of qhx and llama.cpp model by model, alternating in one run. Gives ratios, since absolute speeds depend on the machine.

usage: peers.py QHX SMOLLM2.gguf [NAME ...] [--rounds N] [--threads N] [--prompt N] [--new N]      (needs PyPI llama-cpp-python and gguf)

SmolLM2 is the same real GGUF file on both sides. The four full-size models have random weights: `qhx synth` of configs/NAME.json for qhx,
peer_gguf.py of the same file for llama.cpp. Each pair is made when it is needed and deleted afterwards (16 GB of disk for the largest). The
table replaces the one between the markers in docs/benchmarks.md.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import peer_gguf

ROOT = Path(__file__).parent.parent
MODELS = ["phi-tiny-moe", "qwen3.5-0.8b", "qwen3-vl-2b", "gemma-4-e4b"]
PRECISIONS = {"w8": "Q8_0", "w4": "Q4_0"}
# llama.cpp assumes that the head size is the hidden size divided by the number of heads, which does not hold for Phi-tiny-MoE: both sides get the nearest shape for which it does.
CHANGES = {"phi-tiny-moe": {"num_attention_heads": 32}}
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("qhx", type=Path)
    parser.add_argument("smollm2", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"smollm2, {', '.join(MODELS)}; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    options = parser.parse_args()
    if unknown := set(options.names) - {"smollm2", *MODELS}:
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    names = options.names or ["smollm2", *MODELS]
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for name in names:
            for precision, quants in [("Q4_1", "Q4_1")] if name == "smollm2" else PRECISIONS.items():
                ours, theirs = make(options, name, precision, quants, Path(place))
                rows.append(Row(name, precision, quants, options, ours, theirs))
                print(rows[-1].shown(), file=sys.stderr, flush=True)
                shutil.rmtree(ours)
                if name != "smollm2":
                    theirs.unlink()
    text = table(rows, options)
    print(text)
    if not options.names:
        publish(text)


def make(options, name: str, precision: str, quants: str, place: Path):
    """A bundle and a GGUF file of the same model."""
    bundle = place / "bundle"
    if name == "smollm2":
        quiet(options.qhx, "forge", options.smollm2, "--out", bundle, "--gate", "none")
        return bundle, options.smollm2
    config = json.loads((ROOT / f"configs/{name}.json").read_text()) | CHANGES.get(name, {})
    file, peer = place / "config.json", place / "peer.gguf"
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
        numbers = ["-p", options.prompt, "-n", options.new, "-r", "1", "--threads", options.threads]
        whole_head = ["-p", 0, "-n", options.new, "-r", "1", "--threads", options.threads, "--all-logits"]
        for _ in range(options.rounds):
            found = json.loads(quiet(sys.executable, ROOT / "bench/peer.py", peer, options.threads, options.prompt, options.new))
            mine = json.loads(quiet(options.qhx, "bench", bundle, *numbers, "--json"))
            all_logits = json.loads(quiet(options.qhx, "bench", bundle, *whole_head, "--json"))
            self.whole_head.append(all_logits["results"][0]["mean"])
            for test in tests:
                self.theirs[test].append(found[test])
            for result in mine["results"]:
                self.ours[result["test"]].append(result["mean"])
            self.share.append(mine["bandwidth_share"])
            self.megabytes, self.resident = mine["weight_bytes_per_token"] / 1e6, mine["peak_rss_bytes"] / 2**20
            self.experts, self.bandwidth = mine.get("experts"), mine["read_bandwidth_bytes_per_s"] / 1e9

    def shown(self) -> str:
        def cells(test: str) -> str:
            ours, theirs = statistics.median(self.ours[test]), statistics.median(self.theirs[test])
            return f"{ours:.1f} | {theirs:.1f} | {ours / theirs:.2f}"

        speeds = " | ".join(cells(test) for test in self.ours)
        share, whole_head = statistics.median(self.share), statistics.median(self.whole_head)
        whole_ratio = whole_head / statistics.median(list(self.theirs.values())[-1])
        rest = f"{whole_head:.1f} | {whole_ratio:.2f} | {self.megabytes:.0f} | {share:.0%} | {self.resident:.0f}"
        return f"| {self.name} | {self.precision} / {self.quants} | {speeds} | {rest} |"

    def routing(self) -> list:
        """How many experts of a mixture were used."""
        if not self.experts:
            return []
        used, of, tokens = self.experts["used"], self.experts["of"], self.experts["tokens"]
        return [f"{self.name} at {self.precision} used {statistics.mean(used):.1f} of {of} experts per layer on average (at least {min(used)}) over {tokens} tokens."]


def table(rows: list, options) -> str:
    tests = " | ".join(f"{test} qhx | llama.cpp | ratio" for test in rows[0].ours)
    head = f"| model | qhx / llama.cpp | {tests} | all logits | ratio | MB read per token | share of bandwidth | peak MiB |"
    bandwidths = ", ".join(f"{row.bandwidth:.1f}" for row in rows)
    notes = " ".join([f"Read bandwidth of {options.threads} threads in the last round of each row, in GB/s: {bandwidths}.", *(note for row in rows for note in row.routing())])
    return "\n".join([head, "|---|---|" + "---:|" * 11, *(row.shown() for row in rows), "", notes])


def publish(text: str):
    file = ROOT / "docs/benchmarks.md"
    before, rest = file.read_text().split(BEGIN)
    file.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")


def quiet(*command) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
