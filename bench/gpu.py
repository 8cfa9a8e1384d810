"""Speed of qhx on a GPU, on full-size models with random weights, beside llama.cpp's Vulkan backend where that is there.

usage: gpu.py QHX [NAME ...] [--peer FOLDER] [--precisions w8,w4] [--rounds N] [--prompt N] [--new N] [--depth N] [--sessions N] [--device D] [--json FILE]

Needs the binary `qhx` and the standard library only. FOLDER holds `llama-bench` with its libraries, and GGUF files named NAME-QUANTS.gguf (`qwen3-vl-2b-Q8_0.gguf`);
a file that is not there is made, which needs PyPI gguf. Each test has an untimed run before the timed ones; the table has medians in tokens per second, and the
ratio qhx / llama.cpp.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODELS = ["qwen3-vl-2b", "qwen3.5-0.8b", "gemma-4-e4b", "phi-tiny-moe"]
QUANTS = {"w8": "Q8_0", "w4": "Q4_0", "f16": "F16"}
# As in peers.py: llama.cpp takes this shape only.
CHANGES = {"phi-tiny-moe": {"num_attention_heads": 32}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("qhx", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(MODELS)}; default: all")
    parser.add_argument("--peer", type=Path, metavar="FOLDER")
    parser.add_argument("--precisions", default="w8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2000)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--device", default="gpu")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if unknown := set(options.names) - set(MODELS):
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    rows = []
    for name in options.names or MODELS:
        for precision in options.precisions.split(","):
            with tempfile.TemporaryDirectory() as place:
                rows.append(measured(options, name, precision, Path(place)))
            print(shown(rows[-1]), file=sys.stderr, flush=True)
    found = {"device": device(options), "rounds": options.rounds, "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


def measured(options, name: str, precision: str, place: Path) -> dict:
    """Medians of both sides, by test."""
    config, bundle = place / "config.json", place / "bundle"
    config.write_text(json.dumps(json.loads((ROOT / f"configs/{name}.json").read_text()) | CHANGES.get(name, {})))
    quiet(options.qhx, "synth", config, "--out", bundle, "--precision", precision)
    deep = f"0,{options.depth}" if options.depth else "0"
    common = ["--device", options.device, "-r", options.rounds, "--json"]
    alone = quiet(options.qhx, "bench", bundle, "-p", options.prompt, "-n", options.new, "-d", deep, *common)
    together = quiet(options.qhx, "bench", bundle, "-p", 0, "-n", options.new, "--sessions", options.sessions, *common)
    ours = {result["test"]: statistics.median(result["runs"]) for text in (alone, together) for result in json.loads(text)["results"]}
    shutil.rmtree(bundle)
    return {"model": name, "precision": precision, "quants": QUANTS[precision], "qhx": ours, "peer": peer(options, name, QUANTS[precision], config, place)}


def peer(options, name: str, quants: str, config: Path, place: Path) -> dict:
    """What llama-bench gives; nothing without it."""
    if not options.peer:
        return {}
    file = options.peer / f"{name}-{quants}.gguf"
    if not file.exists():
        import peer_gguf

        file = place / "peer.gguf"
        peer_gguf.write(json.loads(config.read_text()), quants, file)
    command = [options.peer / "llama-bench", "-m", file, "-ngl", 99, "-p", options.prompt, "-n", options.new, "-r", options.rounds]
    command += ["-d", f"0,{options.depth}" if options.depth else "0", "-o", "json"]
    path = f"{options.peer}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    tests = json.loads(quiet(*command, environment={**os.environ, "LD_LIBRARY_PATH": path}))
    return {test_name(test): statistics.median(test["samples_ts"]) for test in tests}


def test_name(test: dict) -> str:
    """A test of llama-bench as qhx names it."""
    depth = f"@d{test['n_depth']}" if test.get("n_depth") else ""
    return (f"pp{test['n_prompt']}" if test["n_prompt"] else f"tg{test['n_gen']}") + depth


def device(options) -> str:
    devices = json.loads(quiet(options.qhx, "devices", "--json"))["devices"]
    own = [d for d in devices if d["name"] == options.device]
    return f"{own[0]['description']}, {own[0]['facts'].get('driver', '')}" if own else options.device


def shown(row: dict) -> str:
    def cell(test: str) -> str:
        ours, theirs = row["qhx"][test], row["peer"].get(test)
        return f"{ours:.0f}" + (f" / {theirs:.0f} = {ours / theirs:.2f}" if theirs else "")

    return f"| {row['model']} | {row['precision']} / {row['quants']} | " + " | ".join(cell(test) for test in row["qhx"]) + " |"


def table(found: dict) -> str:
    tests = list(found["rows"][0]["qhx"])
    head = f"| model | qhx / llama.cpp | {' | '.join(tests)} |"
    return "\n".join([found["device"], "", head, "|---|---|" + "---:|" * len(tests), *(shown(row) for row in found["rows"])])


def quiet(*command, environment=None) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
