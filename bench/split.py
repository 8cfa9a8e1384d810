"""Experts that do not fit into a GPU: CPU alone, as many whole layers on the GPU as fit, and hot experts, side by side in one run.

usage: split.py QHX [--config CONFIG.json] [--memory 1GiB,2GiB,3GiB] [--skews 1,0] [--precision w8] [--rounds N] [--prompt N] [--new N] [--trace FOLDER] [--json FILE]

Needs the binary `qhx` and the standard library only. Makes the model with random weights (default: Phi-tiny-MoE), once with a router of Zipf-like skew and once with an even one. For each
memory limit, `qhx bench --device split` plans and tries the ways to place it; the naive way (whole layers) and the one with hot experts are then measured in turns with the CPU. The table has
medians in tokens per second, the ratio of hot experts to the better of the two others, and the share of chosen experts that lay on the GPU.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("qhx", type=Path)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/phi-tiny-moe.json")
    parser.add_argument("--memory", default="1GiB,2GiB,3GiB")
    parser.add_argument("--skews", default="1,0")
    parser.add_argument("--precision", default="w8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="keep a trace of each run with hot experts")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for skew in options.skews.split(","):
            bundle = Path(place) / f"skew-{skew}"
            quiet(options.qhx, "synth", options.config, "--out", bundle, "--precision", options.precision, "--router-skew", skew)
            for memory in options.memory.split(","):
                rows.append(measured(options, bundle, skew, memory, Path(place)))
                print(shown(rows[-1]), file=sys.stderr, flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    head = "| router | memory | way | prefill | ratio | decode | ratio | on the GPU | transferred |"
    print("\n".join([head, "|---|---|---|---:|---:|---:|---:|---:|---:|", *(shown(row) for row in rows)]))


def measured(options, bundle: Path, skew: str, memory: str, place: Path) -> dict:
    """Medians of all ways with one limit."""
    report = place / "report.json"
    plan = ["bench", bundle, "--device", "split", "--gpu-memory", memory, "-r", 1, "--remeasure", "--report", report]
    # The same lengths: what fits depends on the context.
    lengths = ["-p", options.prompt, "-n", options.new]
    quiet(options.qhx, *plan, *lengths)
    ways = [tried["way"] for tried in json.loads(report.read_text())["runs"][0]["choice"]["measured"]["ways"]]
    naive = next((way for way in ways if way["name"].startswith("first ")), None)
    hot = next((way for way in ways if "hot experts" in way["name"]), None)
    sides = {"cpu": ["--device", "cpu"]}
    for name, way in (("naive", naive), ("hot", hot)):
        if way:
            file = place / f"{name}.toml"
            file.write_text(toml(way["rules"]))
            sides[name] = ["--placement", file, "--gpu-memory", memory]
    for name, flags in list(sides.items()):
        if subprocess.run([str(part) for part in (options.qhx, "bench", bundle, *lengths, "-r", 1, *flags)], capture_output=True).returncode:
            print(f"{name} does not run with {memory}", file=sys.stderr)
            del sides[name]
    runs = {name: {"pp": [], "tg": []} for name in sides}
    caches = []
    # In turns, so that whatever else the machine does is fair to all.
    for number in range(options.rounds):
        for name, flags in sides.items():
            if name == "hot" and options.trace:
                options.trace.mkdir(parents=True, exist_ok=True)
                flags = [*flags, "--trace", options.trace / f"{skew}-{memory}-{number}.json"]
            found = json.loads(quiet(options.qhx, "bench", bundle, *lengths, "-r", 1, "--json", *flags))
            for result in found["results"]:
                runs[name][result["test"][:2]].append(result["mean"])
            if name == "hot":
                caches.append(found.get("expert_cache"))
    medians = {name: {test: statistics.median(values) for test, values in tests.items()} for name, tests in runs.items()}
    names = {"naive": naive and naive["name"], "hot": hot and hot["name"]}
    return {"skew": float(skew), "memory": memory, "ways": names, "medians": medians, "runs": runs, "expert_cache": caches}


def shown(row: dict) -> str:
    lines = []
    for name, medians in row["medians"].items():
        others = [other for side, other in row["medians"].items() if side != "hot"]
        ratio = {test: medians[test] / max(other[test] for other in others) for test in medians}
        cache = row["expert_cache"][-1] if name == "hot" and row["expert_cache"] else None
        cells = [f"skew {row['skew']:g}", row["memory"], row["ways"].get(name) or name]
        cells += [f"{medians['pp']:.1f}", f"{ratio['pp']:.2f}", f"{medians['tg']:.1f}", f"{ratio['tg']:.2f}"]
        cells += [f"{100 * cache['hit_rate']:.0f} %", f"{cache['transferred_bytes'] / 2**20:.0f} MiB"] if cache else ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def toml(rules: dict) -> str:
    """A placement file of what a report says."""
    plain = [f"{key} = {json.dumps(value)}" for key, value in rules.items() if not isinstance(value, dict)]
    tables = [(key, value) for key, value in rules.items() if isinstance(value, dict)]
    return "\n".join([*plain, *(f"[{key}]\n" + "\n".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in value.items()) for key, value in tables)]) + "\n"


def quiet(*command) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
