"""Experts that do not fit into a GPU: CPU alone, as many whole layers on the GPU as fit, and hot experts, side by side in one run.

usage: split.py QHX [--config CONFIG.json] [--memory 1GiB,2GiB,3GiB] [--skews 1,0] [--precision w8] [--rounds N] [--prompt N] [--new N] [--trace FOLDER] [--json FILE]

Needs the binary `qhx` and the standard library only. Makes the model with random weights (default: Phi-tiny-MoE), once with a router of Zipf-like skew and once with an even one. For each
memory limit, `qhx bench --device split` plans and tries the ways to place it. Then the CPU is measured once for each router, and for each limit the naive way (whole layers) and the one with hot
experts, `--rounds` times in one process after a run that does not count. The table has medians in tokens per second, the ratio to the better of CPU and naive way, and the share of chosen
experts that lay on the GPU. What fails is in the table with its error, and the rest goes on; the exit status is 1 if there were no hot experts anywhere.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


class Failed(Exception):
    """A command that failed: what it said."""


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
        place = Path(place)
        bundles = made(options, place)
        plans = {}
        for skew, bundle in bundles.items():
            # It has no limit.
            cpu = side(options, bundle, "cpu", ["--device", "cpu"])
            for memory in options.memory.split(","):
                # Which ways there are does not depend on the router.
                if memory not in plans:
                    plans[memory] = planned(options, bundle, memory, place)
                ways = {name: way for name, way in plans[memory].items() if way}
                sides = {"cpu": cpu}
                for name, way in ways.items():
                    trace = options.trace and name == "hot" and options.trace / f"{skew}-{memory}.json"
                    sides[name] = placed(options, bundle, way, memory, place / "placement.toml", trace)
                rows.append({"skew": float(skew), "memory": memory, "sides": sides})
                say(shown(rows[-1]))
                if options.json:
                    options.json.write_text(json.dumps(rows, indent=1) + "\n")
    head = "| router | memory | way | prefill | ratio | decode | ratio | on the GPU | transferred |"
    print("\n".join([head, "|---|---|---|---:|---:|---:|---:|---:|---:|", *(shown(row) for row in rows)]))
    sys.exit(not any("medians" in row["sides"].get("hot", {}) for row in rows))


def made(options, place: Path) -> dict[str, Path]:
    """A bundle for each skew: all at the same time, for one thread each makes them."""
    bundles = {skew: place / f"skew-{skew}" for skew in options.skews.split(",")}
    began = time.monotonic()
    synth = [options.qhx, "synth", options.config, "--precision", options.precision]
    running = [started(*synth, "--out", bundle, "--router-skew", skew) for skew, bundle in bundles.items()]
    for process in running:
        try:
            finished(process)
        except Failed as error:
            sys.exit(str(error))
    say(f"made {len(bundles)} models in {time.monotonic() - began:.0f} s")
    return bundles


def planned(options, bundle: Path, memory: str, place: Path) -> dict[str, dict | None]:
    """The naive way and the one with hot experts, as they are tried with a limit."""
    report, began = place / "report.json", time.monotonic()
    # The same context: what fits depends on it.
    plan = ["bench", bundle, "--device", "split", "--gpu-memory", memory, "-p", max(options.prompt, options.new), "-n", 0, "-r", 1]
    try:
        finished(started(options.qhx, *plan, "--remeasure", "--report", report))
    except Failed as error:
        say(f"no plan with {memory}: {error}")
        return {}
    ways = json.loads(report.read_text())["runs"][0]["choice"]["measured"]["ways"]
    for tried in ways:
        say(f"{memory}: {tried['way']['name']}: {tried.get('failure') or tried.get('speed') or 'not tried'}")
    say(f"planned for {memory} in {time.monotonic() - began:.0f} s")
    ways = [tried["way"] for tried in ways]
    naive = next((way for way in ways if way["name"].startswith("first ")), None)
    return {"naive": naive, "hot": next((way for way in ways if way["rules"].get("hot_experts")), None)}


def placed(options, bundle: Path, way: dict, memory: str, file: Path, trace: Path | None) -> dict:
    """What a way gives with a limit; with fewer hot experts where the plan was too good."""
    flags = ["--placement", file, "--gpu-memory", memory]
    if trace:
        trace.parent.mkdir(parents=True, exist_ok=True)
        flags += ["--trace", trace]
    while True:
        file.write_text(toml(way["rules"]))
        found = side(options, bundle, way["name"], flags)
        hot = way["rules"].get("hot_experts")
        if "no memory left" not in found.get("error", "") or not hot or hot["count"] == 1:
            return found
        fewer = hot["count"] - max(hot["count"] // 8, 1)
        say(f"{way['name']} do not fit into {memory}: trying {fewer}")
        # For the other router, too.
        way["name"] = way["name"].replace(str(hot["count"]), str(fewer), 1)
        hot["count"] = fewer


def side(options, bundle: Path, way: str, flags: list) -> dict:
    """What one way gives: the tokens per second of each test, or its error."""
    began = time.monotonic()
    bench = [options.qhx, "bench", bundle, "-p", options.prompt, "-n", options.new, "-r", options.rounds, "--json", *flags]
    try:
        found = json.loads(finished(started(*bench)))
    except Failed as error:
        return {"way": way, "error": str(error)}
    if found.get("fallbacks"):
        # What was measured is another device.
        return {"way": way, "error": found["fallbacks"][-1]["reason"]}
    runs = {result["test"][:2]: result["runs"] for result in found["results"]}
    say(f"measured {way} in {time.monotonic() - began:.0f} s")
    medians = {test: statistics.median(values) for test, values in runs.items()}
    return {"way": way, "medians": medians, "runs": runs, "expert_cache": found.get("expert_cache")}


def shown(row: dict) -> str:
    lines = []
    sides = row["sides"]
    others = [side["medians"] for name, side in sides.items() if name != "hot" and "medians" in side]
    for side in sides.values():
        cells = [f"skew {row['skew']:g}", row["memory"], side["way"]]
        if "error" in side:
            cells += [side["error"].splitlines()[-1].replace("|", "/"), "", "", "", "", ""]
        else:
            for test, speed in side["medians"].items():
                best = max((other[test] for other in others), default=None)
                cells += [f"{speed:.1f}", f"{speed / best:.2f}" if best else ""]
            cache = side["expert_cache"]
            cells += [f"{100 * cache['hit_rate']:.0f} %", f"{cache['transferred_bytes'] / 2**20:.0f} MiB"] if cache else ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def toml(rules: dict) -> str:
    """A placement file of what a report says."""
    plain = [f"{key} = {json.dumps(value)}" for key, value in rules.items() if not isinstance(value, dict)]
    tables = [(key, value) for key, value in rules.items() if isinstance(value, dict)]
    return "\n".join([*plain, *(f"[{key}]\n" + "\n".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in value.items()) for key, value in tables)]) + "\n"


def started(*command) -> subprocess.Popen:
    return subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen) -> str:
    """What a command printed."""
    out, error = process.communicate()
    if process.returncode != 0:
        lines = error.strip().splitlines()
        error = next((line for line in lines if line.startswith("error")), lines[-1] if lines else "")
        raise Failed(f"`{' '.join(process.args[1:3])}` failed ({process.returncode}): {error or 'it said nothing'}")
    return out


def say(text: str):
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
