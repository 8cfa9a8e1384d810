"""Thousands of requests, most of them bad: clients that leave in the queue, while their prompt is read and while they are answered, that send half a request or none at all, that read slowly.
Afterwards nothing runs or waits, no descriptor or thread is left, good requests had the right answers all along, and the second half of the requests took no more memory than the first.

    python chaos.py PATH/TO/qhx [REQUESTS IN EACH HALF]
"""

import collections
import concurrent.futures
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request

QHX, COUNT = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 500
ANSWER = "The capital of Portugal is Lisbon."
ROUNDS = 4
# What is kept of prompts is bounded, and the bound is soon reached.
PREFIX_CACHE = 4

limits = ["--context", "1024", "--parallel", "4", "--connections", "64", "--prefix-cache", str(PREFIX_CACHE)]
# One arena: what is measured is what the server holds, not what the C library keeps for each of its threads.
environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
server = subprocess.Popen([QHX, "serve", "--port", "0", *limits], stderr=subprocess.PIPE, text=True, env=environment)
address = next(line.split("http://")[1].strip() for line in server.stderr if "listening on" in line)
threading.Thread(target=lambda: [None for _ in server.stderr], daemon=True).start()
HOST, PORT = address.split(":")


Held = collections.namedtuple("Held", "memory descriptors threads kept")


def send(path, body, length=None):
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    stream = socket.create_connection((HOST, int(PORT)), timeout=60)
    head = f"POST {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Length: {length or len(text)}\r\n\r\n"
    stream.sendall(head.encode() + text)
    return stream


def rest(stream):
    parts = []
    while part := stream.recv(65536):
        parts.append(part)
    return b"".join(parts).decode()


def chat(**more):
    return {"messages": [{"role": "user", "content": "What is the capital of Portugal?"}], "temperature": 0, **more}


def endless(stream=True):
    return chat(messages=[{"role": "user", "content": "Tell me a story."}], ignore_eos=True, temperature=1, stream=stream)


def good(draw):
    with send("/v1/chat/completions", chat()) as stream:
        answer = rest(stream)
    assert answer.startswith("HTTP/1.1 200") and ANSWER in answer, answer[:500]


def good_stream(draw):
    with send("/v1/chat/completions", chat(stream=True)) as stream:
        frames = [line[6:] for line in rest(stream).splitlines() if line.startswith("data: ")]
    assert frames.pop() == "[DONE]", frames
    assert "".join(json.loads(frame)["choices"][0]["delta"].get("content", "") for frame in frames) == ANSWER, frames


def leaves_at_once(draw):
    send("/v1/chat/completions", endless(draw.random() < 0.5)).close()


def leaves_while_its_prompt_is_read(draw):
    ids = [draw.randint(3, 500) for _ in range(900)]
    with send("/v1/completions", {"prompt": ids, "max_tokens": 100, "echo": draw.random() < 0.3, "logprobs": 1}):
        time.sleep(draw.random() * 0.02)


def leaves_in_its_answer(draw):
    with send("/v1/chat/completions", endless()) as stream:
        stream.recv(400)
        time.sleep(draw.random() * 0.05)


def reads_slowly(draw):
    with send("/v1/chat/completions", endless()) as stream:
        for _ in range(10):
            stream.recv(8)
            time.sleep(0.03)


def is_malformed(draw):
    body = draw.choice([b"", b"{", b"[]", b"\xff\xfe\x00", b'{"messages": 5}', b'{"messages": [{}]}', b"[" * 5000, b'{"messages": [], "n": 1e99}'])
    with send("/v1/chat/completions", body) as stream:
        answer = rest(stream)
    assert answer.startswith("HTTP/1.1 400") and '"error"' in answer, answer[:300]


def sends_half(draw):
    with send("/v1/chat/completions", b'{"messages": [', length=5000):
        time.sleep(draw.random() * 0.02)


def speaks_nonsense(draw):
    with socket.create_connection((HOST, int(PORT)), timeout=60) as stream:
        stream.sendall(draw.choice([b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"A" * 20000, b"GET /"]))
        time.sleep(draw.random() * 0.01)


def follows_a_schema_and_leaves(draw):
    schema = {"type": "array", "items": {"type": "string"}, "minItems": 50}
    with send("/v1/chat/completions", {**endless(), "ignore_eos": False, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}) as stream:
        stream.recv(500)


KINDS = [
    good, good_stream, leaves_at_once, leaves_while_its_prompt_is_read, leaves_in_its_answer, reads_slowly, is_malformed, sends_half, speaks_nonsense,
    follows_a_schema_and_leaves,
]


def one(number):
    draw = random.Random(number)
    kind = draw.choice(KINDS)
    try:
        kind(draw)
    except (BrokenPipeError, ConnectionResetError):
        # A server need not hear nonsense out.
        assert kind is speaks_nonsense, kind.__name__
    return kind.__name__


def loads():
    return json.load(urllib.request.urlopen(f"http://{address}/loads"))["loads"]


def held():
    """Memory, descriptors and threads of the server, and what it keeps of prompts; memory in MiB."""
    status = open(f"/proc/{server.pid}/status").read()
    number = lambda name: int(next(line for line in status.splitlines() if line.startswith(name)).split()[1])
    return Held(number("VmRSS") / 1024, len(os.listdir(f"/proc/{server.pid}/fd")), number("Threads"), loads()[0]["kv_bytes"] / 2**20)


def settle(descriptors):
    """Waits until nothing runs or waits and connections are closed, and says how long that took."""
    began = time.time()
    while any(load["num_total_reqs"] for load in loads()) or held().descriptors > descriptors:
        assert time.time() - began < 10, f"not idle: {loads()}, {held()}"
        time.sleep(0.01)
    return time.time() - began


try:
    good(random)
    seen, after, before = {}, [], held()
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        for part in range(2 * ROUNDS):
            for name in pool.map(one, range(part * COUNT // ROUNDS, (part + 1) * COUNT // ROUNDS)):
                seen[name] = seen.get(name, 0) + 1
            # The question is a connection itself.
            waited = settle(before.descriptors + 2)
            after.append(held())
            print(f"after {sum(seen.values())} requests, idle within {waited:.2f} s: {after[-1].memory:.1f} MiB, of which kept of prompts {after[-1].kept:.1f}; {after[-1].threads} threads", flush=True)
    good(random)
    assert min(seen.get(kind.__name__, 0) for kind in KINDS) > COUNT / 20, seen
    first, second = (max(held.memory for held in half) for half in (after[:ROUNDS], after[ROUNDS:]))
    assert second < first * 1.02 + 1, f"memory grows: {first:.1f} MiB, then {second:.1f}"
    assert max(held.kept for held in after) <= PREFIX_CACHE, after
    assert max(held.threads for held in after) <= 24, f"threads are left: {after}"
    assert server.poll() is None
    print(f"chaos: as expected; at most {first:.1f} MiB in the first half, {second:.1f} in the second; {seen}")
finally:
    server.kill()
