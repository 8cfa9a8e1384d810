"""Thousands of requests, most of them bad: clients that leave in the queue, while their prompt is read and while they are answered, that send half a request or none at all, that read slowly.
Afterwards nothing runs or waits, no descriptor or thread is left, good requests had the right answers all along, and the second half of the requests took no more memory than the first.

    python chaos.py PATH/TO/qhx [REQUESTS IN EACH HALF]
"""

import concurrent.futures
import json
import os
import random
import sys
import time

from serving import Server, chat, endless, rest

QHX, COUNT = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 500
ANSWER = "The capital of Portugal is Lisbon."
ROUNDS = 4
# What is kept of prompts is bounded, and the bound is soon reached.
PREFIX_CACHE = 4

limits = ["--context", "1024", "--parallel", "4", "--connections", "64", "--prefix-cache", str(PREFIX_CACHE)]
# One arena: what is measured is what the server holds, not what the C library keeps for each of its threads.
server = Server(QHX, *limits, environment={**os.environ, "MALLOC_ARENA_MAX": "1"})
send = server.send


def good(draw):
    with send("/v1/chat/completions", chat()) as stream:
        answer = rest(stream).decode()
    assert answer.startswith("HTTP/1.1 200") and ANSWER in answer, answer[:500]


def good_stream(draw):
    with send("/v1/chat/completions", chat(stream=True)) as stream:
        frames = [line[6:] for line in rest(stream).decode().splitlines() if line.startswith("data: ")]
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
        answer = rest(stream).decode()
    assert answer.startswith("HTTP/1.1 400") and '"error"' in answer, answer[:300]


def sends_half(draw):
    with send("/v1/chat/completions", b'{"messages": [', length=5000):
        time.sleep(draw.random() * 0.02)


def speaks_nonsense(draw):
    with server.connect() as stream:
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


try:
    good(random)
    seen, after, before = {}, [], server.held()
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        for part in range(2 * ROUNDS):
            for name in pool.map(one, range(part * COUNT // ROUNDS, (part + 1) * COUNT // ROUNDS)):
                seen[name] = seen.get(name, 0) + 1
            # The question is a connection itself.
            waited = server.settle(before.descriptors + 2)
            after.append(server.held())
            print(f"after {sum(seen.values())} requests, idle within {waited:.2f} s: {after[-1].memory:.1f} MiB, of which kept of prompts {after[-1].kept:.1f}; {after[-1].threads} threads", flush=True)
    good(random)
    assert min(seen.get(kind.__name__, 0) for kind in KINDS) > COUNT / 20, seen
    first, second = (max(held.memory for held in half) for half in (after[:ROUNDS], after[ROUNDS:]))
    assert second < first * 1.02 + 1, f"memory grows: {first:.1f} MiB, then {second:.1f}"
    assert max(held.kept for held in after) <= PREFIX_CACHE, after
    assert max(held.threads for held in after) <= 24, f"threads are left: {after}"
    assert server.process.poll() is None
    print(f"chaos: as expected; at most {first:.1f} MiB in the first half, {second:.1f} in the second; {seen}")
finally:
    server.process.kill()
