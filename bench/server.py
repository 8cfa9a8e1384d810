"""Compares `qhx serve` with llama.cpp at 1, 4 and 16 clients, alternating in one run: tokens per second of all clients together, and the time to the first token.

usage: cargo xtask bench-server [NAME ...] [--clients 1,4,16] [--rounds N] [--threads N] [--prompt N] [--new N]
       server.py QHX LLAMA_BATCHED_BENCH SMOLLM2.gguf [NAME ...] …      (needs PyPI gguf)

qhx answers streamed requests over HTTP, each client a request with a prompt of its own. llama.cpp is measured with its own tool for the same (`xtask/src/llama.rs`), which has no
HTTP in its way: all prompts, then all answers, in one process. SmolLM2 is the same real GGUF file on both sides; qwen3-vl-2b has random weights, as in peers.py. "HTTP" is the part of a
request's time that is not the engine's: what a client waits beyond what the engine says the answer took. Medians; the table replaces the one between the markers in docs/benchmarks.md.
"""

import argparse
import concurrent.futures
import http.client
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import peers
from llama import quiet
from peers import ROOT

MODELS = ["smollm2", "qwen3-vl-2b"]
BEGIN, END = "<!-- server: begin -->", "<!-- server: end -->"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("qhx", type=Path)
    parser.add_argument("peer", type=Path)
    parser.add_argument("smollm2", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(MODELS)}; default: all")
    parser.add_argument("--clients", default="1,4,16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    options = parser.parse_args()
    options.clients = [int(count) for count in options.clients.split(",")]
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for name in options.names or MODELS:
            precision, quants = ("Q4_1", "Q4_1") if name == "smollm2" else ("w8", "Q8_0")
            bundle, gguf = peers.make(options, name, precision, quants, Path(place))
            rows += [(name, f"{precision} / {quants}", *row) for row in measured(options, bundle, gguf)]
            print("\n".join(shown(row) for row in rows), file=sys.stderr, flush=True)
            shutil.rmtree(bundle)
            if name != "smollm2":
                gguf.unlink()
    text = table(rows)
    print(text)
    if not options.names:
        publish(text)


def measured(options, bundle: Path, gguf: Path):
    """For each number of clients: medians of both sides' tokens per second and times to the first token, and of HTTP's part."""
    ours, theirs = {count: [] for count in options.clients}, {count: [] for count in options.clients}
    with Server(options, bundle) as server:
        server.round(1, 8)
        for _ in range(options.rounds):
            for count in options.clients:
                ours[count].append(server.round(count, options.new))
                theirs[count].append(peer(options, gguf, count))
    for count in options.clients:
        speed, first, http_part = (statistics.median(values) for values in zip(*ours[count]))
        peer_speed, peer_first = (statistics.median(values) for values in zip(*theirs[count]))
        yield count, speed, peer_speed, first, peer_first, http_part


class Server:
    """`qhx serve` of a bundle, while this is open."""

    def __init__(self, options, bundle: Path):
        command = [options.qhx, "serve", bundle, "--port", "0", "--threads", options.threads, "--parallel", max(options.clients), "--context", 1024]
        self.options, self.asked = options, 0
        self.process = subprocess.Popen([str(part) for part in command], stderr=subprocess.PIPE, text=True)
        self.address = next(line.split("http://")[1].strip() for line in self.process.stderr if "listening on" in line)
        threading.Thread(target=lambda: [None for _ in self.process.stderr], daemon=True).start()
        self.vocabulary = 32000

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def round(self, clients: int, new: int):
        """Tokens per second, the median time to the first token, and HTTP's part of the requests' time."""
        before, began = self.numbers(), time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            waited = list(pool.map(lambda _: self.ask(new), range(clients)))
        seconds, after = time.perf_counter() - began, self.numbers()
        first, whole = (after[name] - before[name] for name in ("time_to_first_token", "e2e_request_latency"))
        return clients * new / seconds, first / clients, 1 - whole / sum(waited)

    def ask(self, new: int) -> float:
        """Seconds that one client waits for its whole answer."""
        self.asked += 1
        prompt = [(7919 * place + 104729 * self.asked + 13) % self.vocabulary for place in range(self.options.prompt)]
        body = {"prompt": prompt, "max_tokens": new, "ignore_eos": True, "temperature": 0, "stream": True}
        began = time.perf_counter()
        connection = http.client.HTTPConnection(self.address)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        text = connection.getresponse().read().decode()
        if not text.endswith("data: [DONE]\n\n"):
            sys.exit(f"the server did not answer: {text[-300:]}")
        return time.perf_counter() - began

    def numbers(self):
        """The sums of the server's own times."""
        lines = urllib.request.urlopen(f"http://{self.address}/metrics").read().decode().splitlines()
        return {name: sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}_seconds_sum")) for name in ("time_to_first_token", "e2e_request_latency")}


def peer(options, gguf: Path, clients: int):
    """The same of llama.cpp: all prompts and answers by the time of both, and the time of the prompts."""
    arguments = ["-m", gguf, "-c", 16384, "-b", 512, "-ub", 512, "-npp", options.prompt, "-ntg", options.new, "-npl", clients]
    printed = quiet(options.peer, *arguments, "-t", options.threads, "-tb", options.threads, "--output-format", "jsonl")
    result = next(json.loads(line) for line in printed.splitlines() if line.startswith("{"))
    return clients * options.new / result["t"], result["t_pp"] + result["t_tg"] / options.new


def shown(row) -> str:
    name, precision, clients, speed, peer_speed, first, peer_first, http_part = row
    speeds = f"{speed:.1f} | {peer_speed:.1f} | **{speed / peer_speed:.2f}x**"
    return f"| {name} | {precision} | {clients} | {speeds} | {1000 * first:.0f} | {1000 * peer_first:.0f} | {http_part:.1%} |"


def table(rows) -> str:
    head = "| model | precision | clients | qhx tok/s | llama.cpp tok/s | ratio | qhx first token, ms | llama.cpp, ms | HTTP |"
    return "\n".join([head, "|---|---|---:|---:|---:|---:|---:|---:|---:|", *map(shown, rows)])


def publish(text: str):
    page = ROOT / "docs/benchmarks.md"
    before, rest = page.read_text().split(BEGIN, 1)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END, 1)[1]}")


if __name__ == "__main__":
    main()
