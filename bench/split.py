"""Experts that do not fit into a GPU: CPU alone, as many whole layers on the GPU as fit, and hot experts, side by side in one run.

usage: split.py QHX [--config CONFIG.json] [--memory 1GiB,2GiB,3GiB] [--skews 1,0] [--precision w8] [--rounds N] [--prompt N] [--new N] [--threads N] [--minutes N]
                [--trace FOLDER] [--json FILE] [--bundles FOLDER]

Needs the binary `qhx` and the standard library only. Makes the model with random weights (default: Phi-tiny-MoE), once with a router of Zipf-like skew and once with an even one. For each
memory limit, `qhx bench --device split` plans and tries the ways to place it. Then the CPU is measured once for each router, and for each limit the naive way (whole layers) and those with hot
experts (at the first router all of them, then the one that decoded fastest), `--rounds` times in one process after a run that does not count. The table has medians in tokens per second, the ratio to the better of CPU and naive way, and the share of chosen
experts that lay on the GPU. The last row has no limit: what `auto` chooses by itself.

With `--trace`, each limit has one more run with hot experts, at the first router, that starts without knowing which experts are hot: what it says is how long parts and calls take, and how much
of the time of transfers the devices computed. `--bundles` keeps the models, and uses those that are there. What fails, takes too long or comes after `--minutes` is in the table with its reason,
and the rest goes on; `--json` is written after every step. The exit status is 1 if there were no hot experts anywhere.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
BEGAN = time.monotonic()
# Seconds that one command may take.
PATIENCE = 240


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
    parser.add_argument("--threads", type=int, help="of the CPU, for all sides")
    parser.add_argument("--minutes", type=float, default=60, help="what has not begun by then is left out")
    parser.add_argument("--trace", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--bundles", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    options.qhx = options.qhx.resolve()
    with tempfile.TemporaryDirectory() as place:
        bench = Bench(options, Path(place))
        bench.run()
        head = "| router | memory | way | prefill | ratio | decode | ratio | on the GPU | transferred |"
        print("\n".join([head, "|---|---|---|---:|---:|---:|---:|---:|---:|", *(shown(row) for row in bench.rows)]))
        for memory, trace in bench.traces.items():
            print(f"{memory}: {json.dumps(trace)}")
    sys.exit(not any("medians" in row["sides"].get("hot", {}) for row in bench.rows))


class Bench:
    def __init__(self, options, place: Path):
        self.options, self.place = options, place
        self.rows, self.plans, self.traces = [], {}, {}
        # Nothing of earlier runs: which experts are hot, what was chosen.
        self.cache = place / "cache"
        self.environment = os.environ | {"QHX_CACHE_DIR": str(self.cache)}

    def run(self):
        options = self.options
        bundles = self.made()
        for number, (skew, bundle) in enumerate(bundles.items()):
            # It has no limit.
            cpu = self.side(bundle, "cpu", ["--device", "cpu"])
            for memory in options.memory.split(","):
                # Which ways there are does not depend on the router.
                if memory not in self.plans:
                    self.plans[memory] = self.planned(bundle, memory)
                plan, sides = self.plans[memory], {"cpu": cpu}
                if plan.get("naive"):
                    sides["naive"] = self.placed(bundle, plan["naive"], memory)
                found = [(self.placed(bundle, way, memory), way) for way in plan.get("hot", [])]
                # The fastest is the one that counts.
                found.sort(key=lambda pair: pair[0].get("medians", {}).get("tg", 0), reverse=True)
                sides |= {f"hot{n or ''}": side for n, (side, _) in enumerate(found)}
                plan["hot"] = [way for _, way in found[:1]]
                self.add({"skew": float(skew), "memory": memory, "sides": sides})
                if options.trace and number == 0 and "medians" in sides.get("hot", {}):
                    self.traces[memory] = self.traced(bundle, plan["hot"][0], memory, options.trace / f"{memory}.json")
                    say(f"trace with {memory}: {json.dumps(self.traces[memory])}")
                    self.keep()
        if bundles:
            skew, bundle = next(iter(bundles.items()))
            self.add({"skew": float(skew), "memory": "unlimited", "sides": {"auto": self.chosen(bundle)}})

    def add(self, row: dict):
        self.rows.append(row)
        say(shown(row))
        self.keep()

    def keep(self):
        if self.options.json:
            found = {"threads": self.options.threads, "rows": self.rows, "plans": self.plans, "traces": self.traces}
            self.options.json.write_text(json.dumps(found, indent=1) + "\n")

    def made(self) -> dict[str, Path]:
        """A bundle for each skew: all at the same time, for one thread each makes them."""
        options, began = self.options, time.monotonic()
        folder = options.bundles or self.place
        bundles = {skew: folder / f"skew-{skew}" for skew in options.skews.split(",")}
        synth = [options.qhx, "synth", options.config, "--precision", options.precision]
        missing = {skew: bundle for skew, bundle in bundles.items() if not bundle.exists()}
        running = {skew: self.started(*synth, "--out", bundle, "--router-skew", skew) for skew, bundle in missing.items()}
        for skew, process in running.items():
            try:
                finished(process)
            except Failed as error:
                say(f"no model with skew {skew}: {error}")
                del bundles[skew]
        say(f"made {len(missing)} models in {time.monotonic() - began:.0f} s")
        return bundles

    def planned(self, bundle: Path, memory: str) -> dict:
        """The naive way and those with hot experts, as they are tried with a limit, and what was found out about the devices."""
        report, began = self.place / "report.json", time.monotonic()
        # The same context: what fits depends on it.
        plan = [*self.bench(bundle), "-p", max(self.options.prompt, self.options.new), "-n", 0, "-r", 1, "--device", "split", "--gpu-memory", memory]
        try:
            self.done(*plan, "--remeasure", "--report", report)
        except Failed as error:
            say(f"no plan with {memory}: {error}")
            return {"failure": str(error)}
        choice = json.loads(report.read_text())["runs"][0]["choice"]
        ways = choice["measured"]["ways"]
        for tried in ways:
            say(f"{memory}: {tried['way']['name']}: {tried.get('failure') or tried.get('speed') or 'not tried'}")
        say(f"planned for {memory} in {time.monotonic() - began:.0f} s: {choice['way']['name']}; {json.dumps(choice['measured']['facts'])}")
        ways = [tried["way"] for tried in ways]
        naive = next((way for way in ways if way["name"].startswith("first ")), None)
        hot = [way for way in ways if way["rules"].get("hot_experts")]
        return {"naive": naive, "hot": hot, "chosen": choice["way"]["name"], "measured": choice["measured"]}

    def placed(self, bundle: Path, way: dict, memory: str) -> dict:
        """What a way gives with a limit; with less on the GPU where the plan was too good."""
        while True:
            found = self.side(bundle, way["name"], ["--placement", self.placement(way), "--gpu-memory", memory])
            if "no memory left" not in found.get("error", "") or not lessened(way):
                return found
            # For the other router, too.
            say(f"that does not fit into {memory}: trying {way['name']}")

    def placement(self, way: dict) -> Path:
        file = self.place / "placement.toml"
        file.write_text(toml(way["rules"]))
        return file

    def side(self, bundle: Path, way: str, flags: list) -> dict:
        """What one way gives: the tokens per second of each test, or its error."""
        began, options = time.monotonic(), self.options
        tests = ["-p", options.prompt, "-n", options.new, "-r", options.rounds, "--json"]
        try:
            found = json.loads(self.done(*self.bench(bundle), *tests, *flags))
        except (Failed, json.JSONDecodeError) as error:
            return {"way": way, "error": str(error)}
        if found.get("fallbacks"):
            # What was measured is another device.
            return {"way": way, "error": found["fallbacks"][-1]["reason"]}
        say(f"measured {way} in {time.monotonic() - began:.0f} s")
        return {"way": way, "device": found["device"], "threads": found["threads"], **speeds(found), "expert_cache": found.get("expert_cache")}

    def chosen(self, bundle: Path) -> dict:
        """What `auto` chooses where nothing limits it, and how fast that is."""
        report, options = self.place / "report.json", self.options
        tests = ["-p", options.prompt, "-n", options.new, "-r", options.rounds, "--device", "auto"]
        try:
            self.done(*self.bench(bundle), *tests, "--remeasure", "--report", report)
        except Failed as error:
            return {"way": "auto", "error": str(error)}
        run = json.loads(report.read_text())["runs"][0]
        choice = run.get("choice") or {}
        say(f"auto without a limit: {choice.get('device')}; {choice.get('reason')}")
        return {"way": f"auto chose {choice.get('device')}", "choice": choice, **speeds(run["report"]), "expert_cache": None}

    def traced(self, bundle: Path, way: dict, memory: str, trace: Path) -> dict:
        """What a trace says of a run that begins without knowing which experts are hot."""
        trace.parent.mkdir(parents=True, exist_ok=True)
        for known in self.cache.glob("**/experts-*.json"):
            known.unlink()
        tests = ["-p", min(self.options.prompt, 128), "-n", self.options.new, "-r", 1, "--json"]
        try:
            self.done(*self.bench(bundle), *tests, "--placement", self.placement(way), "--gpu-memory", memory, "--trace", trace)
            return analysed(json.loads(trace.read_text()))
        except (Failed, OSError, ValueError) as error:
            return {"error": str(error)}

    def bench(self, bundle: Path) -> list:
        return ["bench", bundle, *(["--threads", self.options.threads] if self.options.threads else [])]

    def done(self, *command) -> str:
        if time.monotonic() - BEGAN > 60 * self.options.minutes:
            raise Failed(f"left out: {self.options.minutes:g} minutes are over")
        return finished(self.started(self.options.qhx, *command))

    def started(self, *command) -> subprocess.Popen:
        parts = [str(part) for part in command]
        return subprocess.Popen(parts, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.environment)


def lessened(way: dict) -> bool:
    """Leaves an eighth of the hot experts, or the last layer, to the CPU; whether there is anything left."""
    rules = way["rules"]
    if hot := rules.get("hot_experts"):
        before, after = hot["count"], hot["count"] - max(hot["count"] // 8, 1)
        hot["count"] = after
    else:
        layers = sorted(rules["stages"], key=lambda stage: int(stage.split(".")[1]))
        before, after = len(layers), len(layers) - 1
        del rules["stages"][layers[-1]]
    way["name"] = way["name"].replace(str(before), str(after), 1)
    return after > 0


def speeds(found: dict) -> dict:
    """The runs of each test, and their medians."""
    runs = {result["test"][:2]: result["runs"] for result in found["results"]}
    return {"medians": {test: statistics.median(values) for test, values in runs.items()}, "runs": runs}


def analysed(trace: dict) -> dict:
    """How long calls of one row take by lane and name, and the share of the time of transfers in which devices computed."""
    events = trace["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [(lanes[event["tid"]], event) for event in events if event["ph"] == "X"]
    single = {}
    for lane, event in spans:
        if event["args"].get("rows") in (1, 2) and not lane.startswith("to "):
            kind = "hot experts" if "hot_experts" in event["name"] else "experts" if "expert" in event["name"] else "other parts"
            single.setdefault(f"{lane}, {kind}", []).append(event["dur"])
    calls = {kind: {"calls": len(times), "median_us": round(statistics.median(times), 1)} for kind, times in sorted(single.items())}
    of = {lane: union([(e["ts"], e["ts"] + e["dur"]) for own, e in spans if own == lane]) for lane in set(lanes.values())}
    devices = [lane for lane in of if not lane.startswith("to ")]
    transfers = union([span for lane, own in of.items() if lane.startswith("to ") for span in own])
    total = length(transfers)
    share = lambda spans: round(length(common(transfers, spans)) / total, 3) if total else None
    overlaps = {f"share_while_{lane}_computes": share(of[lane]) for lane in sorted(devices)}
    computing = union([span for lane in devices for span in of[lane]])
    bytes_moved = sum(event["args"].get("bytes", 0) for lane, event in spans if lane.startswith("to "))
    rate = round(bytes_moved / total / 1e3, 1) if total else None
    hidden = {"transfer_ms": round(total / 1e3, 1), "gigabytes_per_second": rate, "hidden_share": share(computing), **overlaps}
    return {"calls_of_a_decode_step": calls, "transfers": hidden}


def union(spans: list) -> list:
    """Spans that do not overlap, in order."""
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def common(one: list, other: list) -> list:
    """What two lists of spans have in common, both in order and without overlaps."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append([start, end])
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(spans: list) -> float:
    return sum(end - start for start, end in spans)


def shown(row: dict) -> str:
    lines = []
    sides = row["sides"]
    others = [side["medians"] for name, side in sides.items() if name in ("cpu", "naive") and "medians" in side]
    for side in sides.values():
        cells = [f"skew {row['skew']:g}", row["memory"], side["way"]]
        if "error" in side:
            cells += [side["error"].splitlines()[-1].replace("|", "/"), "", "", "", "", ""]
        else:
            for test in ("pp", "tg"):
                speed = side["medians"].get(test)
                best = max((other[test] for other in others if test in other), default=None)
                cells += [f"{speed:.1f}" if speed else "", f"{speed / best:.2f}" if speed and best else ""]
            cache = side["expert_cache"]
            cells += [f"{100 * cache['hit_rate']:.0f} %", f"{cache['transferred_bytes'] / 2**20:.0f} MiB"] if cache else ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def toml(rules: dict) -> str:
    """A placement file of what a report says."""
    plain = [f"{key} = {json.dumps(value)}" for key, value in rules.items() if not isinstance(value, dict)]
    tables = [(key, value) for key, value in rules.items() if isinstance(value, dict)]
    return "\n".join([*plain, *(f"[{key}]\n" + "\n".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in value.items()) for key, value in tables)]) + "\n"


def finished(process: subprocess.Popen) -> str:
    """What a command printed."""
    name = " ".join(process.args[1:3])
    try:
        out, error = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise Failed(f"`{name}` took longer than {PATIENCE} s") from None
    if process.returncode != 0:
        lines = error.strip().splitlines()
        error = next((line for line in lines if line.startswith("error")), lines[-1] if lines else "")
        raise Failed(f"`{name}` failed ({process.returncode}): {error or 'it said nothing'}")
    return out


def say(text: str):
    print(f"[{time.monotonic() - BEGAN:.0f} s] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
