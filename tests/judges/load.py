"""A server under a load of which a fifth is hostile, compared with the same load without malice.

Each client asks one thing after the other. In the first run a fifth of the requests are good ones, padded with blanks to the sizes of the hostile ones; in the second run they are those.
Every good answer must be the one that the request gets alone, none may take more than two seconds longer than the slowest of its kind in the first run, and the second run may leave no memory
behind. At the end the server is told to stop while it looks up texts that are forced.

    python load.py PATH/TO/qhx [CLIENTS] [SECONDS OF EACH RUN]
"""

import collections
import concurrent.futures
import http.client
import json
import os
import random
import sys
import time

from serving import Server, chat, endless, rest

QHX = sys.argv[1]
CLIENTS, SECONDS = (int(text) for text in sys.argv[2:4]) if len(sys.argv) > 3 else (20, 5)
HOSTILE = 0.2
MIB = 1 << 20
# Seconds that a good request may take beyond the slowest of its kind without hostile ones, and that the end may take beyond the time for running answers.
SLACK = 2
DRAIN = 2
# MiB that the hostile run may leave behind.
LEFT = 50

# ---- what is asked ----

QUESTION = [{"role": "user", "content": "What is the capital of Portugal?"}]
LONG = [{"role": "user", "content": "Tell me a story about a journey over the sea. " * 12}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Lisbon", "Porto"]}, "people": {"type": "integer", "maximum": 9}}, "required": ["city", "people"], "additionalProperties": False}


def formatted(schema, **more):
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, **more)


GOOD = {
    "chat": ("/v1/chat/completions", chat()),
    "chat, streamed": ("/v1/chat/completions", chat(stream=True)),
    "chat, long prompt": ("/v1/chat/completions", chat(messages=LONG, max_tokens=24)),
    "chat, schema": ("/v1/chat/completions", formatted(CITY, max_tokens=40)),
    "completion": ("/v1/completions", {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 48, "logprobs": 1}),
    "completion, streamed": ("/v1/completions", {"prompt": "The sea is", "temperature": 0, "max_tokens": 48, "stream": True}),
    "responses": ("/v1/responses", {"input": "What is the capital of Portugal?", "temperature": 0}),
    "responses, streamed": ("/v1/responses", {"input": "What is the capital of Portugal?", "temperature": 0, "stream": True}),
    "messages": ("/v1/messages", {"model": "builtin", "max_tokens": 40, "messages": QUESTION, "temperature": 0}),
    "messages, streamed": ("/v1/messages", {"model": "builtin", "max_tokens": 40, "messages": QUESTION, "temperature": 0, "stream": True}),
    "ollama, streamed": ("/api/chat", {"model": "builtin", "messages": QUESTION, "options": {"temperature": 0}}),
    "tokenize": ("/tokenize", {"messages": LONG}),
}
# What of an answer must always be the same: what was said, why it ended, and how long it is.
SAID = {"content", "text", "delta", "response", "finish_reason", "stop_reason", "done_reason", "completion_tokens", "output_tokens", "eval_count", "tokens", "token_logprobs"}


def texts(value, key=None):
    """All that is said in JSON, in order."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from texts(below, key)
    elif isinstance(value, list):
        for below in value:
            yield from texts(below, key)
    elif key in SAID and value is not None:
        yield str(value)


def said(body):
    """What an answer or the frames of one say, however it was cut into frames."""
    lines = [line.removeprefix("data: ") for line in body.splitlines() if not line.startswith("event: ")]
    return "".join(text for line in lines if line.startswith("{") for text in texts(json.loads(line)))


def ask(path, body):
    connection = http.client.HTTPConnection(server.address, timeout=60)
    connection.request("POST", path, body, {"Authorization": f"Bearer {server.key}"})
    response = connection.getresponse()
    answer = response.status, response.read().decode()
    connection.close()
    return answer


# ---- what is hostile: bodies, and what may be answered to them ----

def lark(grammar, **more):
    return chat(response_format={"type": "lark", "grammar": grammar}, **more)


def chain(count):
    return "start: r0\n" + "".join(f'r{n}: "a" r{n + 1}\n' for n in range(count)) + f'r{count}: "b"\n'


def doublings(count):
    return "start: r0\n" + "".join(f"r{n}: r{n + 1} r{n + 1}\n" for n in range(count)) + f'r{count}: "ab"\n'


def references(count):
    definitions = {f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{count}": {"type": "null"}}}


def properties(count):
    return {"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(count)}, "additionalProperties": False}


def nested(field, piece, size):
    """A body of so many bytes that has almost nothing but small values in a field."""
    value = f'[{piece * (size // len(piece))}{piece.rstrip(",")}]'
    return f'{{"messages": [{{"role": "user", "content": "Hi"}}], "{field}": {value if field == "tools" else f"""{{"x": {value}}}"""}}}'.encode()


def calls(size):
    piece = '{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}},'
    return f'{{"messages": [{{"role": "assistant", "content": null, "tool_calls": [{piece * (size // len(piece))}{piece[:-1]}]}}]}}'.encode()


def bodies(*statuses):
    """A kind of hostile requests whose bodies are all sent alike."""
    def of(*requests):
        encoded = [request if isinstance(request, bytes) else json.dumps(request).encode() for request in requests]
        return [sized(body, statuses) for body in encoded], max(map(len, encoded))
    return of


def raw(body, expected, *headers):
    """A request by its bytes. A server that refuses need not read it to the end, and then its answer may be lost, too."""
    def send(draw):
        answer = b""
        with server.connect() as stream:
            try:
                stream.sendall(server.head("/v1/chat/completions", *headers) + body)
                answer = rest(stream)
            except (BrokenPipeError, ConnectionResetError):
                assert len(body) > MIB, "a request was cut off"
        assert not answer and len(body) > MIB or answer[:12] in [f"HTTP/1.1 {status}".encode() for status in expected], answer[:300]
    return send


def sized(body, expected):
    return raw(body, {*expected, 503}, f"Content-Length: {len(body)}")


def unfinished(size):
    def send(draw):
        with server.connect() as stream:
            try:
                stream.sendall(server.head("/v1/chat/completions", f"Content-Length: {size + 1000}") + b" " * size)
                time.sleep(draw.random() * 0.5)
            except (BrokenPipeError, ConnectionResetError):
                pass
    return send


def leaves(body, wait):
    def send(draw):
        with server.send("/v1/chat/completions", body) as stream:
            if wait:
                stream.settimeout(draw.random() * wait)
                try:
                    stream.recv(200)
                except TimeoutError:
                    pass
    return send


def reads_slowly(draw):
    with server.send("/v1/chat/completions", {**endless(), "max_tokens": 60}) as stream:
        for _ in range(10):
            stream.recv(16)
            time.sleep(0.03)


FORCED = [formatted({"const": "zq9-" * 1000}, max_tokens=4), formatted({"const": "zq9-" * 2000}, max_tokens=4, stream=True)]
REGEX = chat(response_format={"type": "regex", "regex": "a{20000}"}, max_tokens=4)
CHUNKED = "Transfer-Encoding: chunked"


def hostile():
    """Kinds of hostile requests, and the bytes of the largest of each."""
    refused, any_end = bodies(400), bodies(200, 400)
    return {
        "grammars": any_end(lark(chain(657), max_tokens=4), lark(chain(20_000)), lark(doublings(18), max_tokens=4), lark(doublings(40), max_tokens=4), REGEX),
        "schemas": any_end(
            *(formatted(references(count), max_tokens=4) for count in (287, 9000)),
            *(formatted(properties(count), max_tokens=4) for count in (6751, 30_000)),
            formatted({"type": "array", "prefixItems": [{"const": f"item {n}"} for n in range(1000)], "minItems": 1000}, max_tokens=4),
        ),
        "forced texts": bodies(200)(*FORCED),
        "trees": refused(nested("chat_template_kwargs", "[],", 26 * MIB), nested("tools", "{},", 26 * MIB), calls(26 * MIB)),
        "bodies": refused(b'{"messages": [{"role": "user", "role": "user"}]}', b"[" * 5000, b'{"messages": [', b'{"messages": [], "n": 1e99}'),
        "unfinished": ([unfinished(size) for size in (10, 900_000, 8 * MIB)], 8 * MIB),
        "HTTP": (
            [
                raw(b"xyz\r\n", {400}, CHUNKED),
                raw(b"2\r\n{}{}\r\n0\r\n\r\n", {400}, CHUNKED),
                raw(b"10000000000000000\r\n", {400}, CHUNKED),
                raw(b"", {400}, "Host: user@localhost"),
                raw(b"", {400}, "Host: l\u00f6calhost"),
                raw(b"", {403}, "Origin: https://example.com"),
                raw(b"{}", {415}, "Content-Encoding: gzip", "Content-Length: 2"),
            ],
            0,
        ),
        "keys": ([raw(b"{}", {401}, f"Authorization: {text}", "Content-Length: 2") for text in ("Bearer wrong", "Basic load", "load", "")], 0),
        "leaving": (
            [leaves(endless(), 0), leaves(endless(), 0.3), leaves(endless(False), 0.3), leaves({**REGEX, "max_tokens": 900}, 0.3), leaves(nested("tools", "{},", 8 * MIB), 0), reads_slowly],
            8 * MIB,
        ),
    }


# ---- a run ----

def run(kinds, seconds):
    """So many clients for so long; how long good requests of each kind took, and how many there were of each of the others."""
    until = time.monotonic() + seconds

    def client(number):
        draw, took, others = random.Random(number), [], collections.Counter()
        while time.monotonic() < until:
            if draw.random() < HOSTILE:
                kind = draw.choice(list(kinds))
                draw.choice(kinds[kind])(draw)
                others[kind] += 1
            else:
                kind = draw.choice(list(GOOD))
                began = time.monotonic()
                status, answer = ask(GOOD[kind][0], json.dumps(GOOD[kind][1]))
                took.append((kind, time.monotonic() - began))
                assert status == 200 and said(answer) == alone[kind], f"{kind}: {status}, {answer}, expected {alone[kind]!r}"
        return took, others

    times, others = collections.defaultdict(list), collections.Counter()
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        for took, counted in pool.map(client, range(CLIENTS)):
            others += counted
            for kind, time_taken in took:
                times[kind].append(time_taken)
    server.settle(before.descriptors + 2)
    return times, others


def held_at_last(most):
    """What is held once memory is no more than so many MiB: what was freed is given back within a moment."""
    began = time.time()
    while (held := server.held()).memory > most and time.time() - began < 5:
        time.sleep(0.01)
    return held


def padded(size):
    """A good request of so many bytes."""
    body = json.dumps(chat()).encode()
    return [sized(body[:-1] + b" " * max(0, size - len(body)) + b"}", [200])]


def stop():
    """Ends the server while it looks up forced texts and answers others."""
    forced = {**FORCED[0], "max_tokens": 900}
    open_streams = [server.send("/v1/chat/completions", body) for body in [forced, {**REGEX, "max_tokens": 900}, lark(doublings(16), max_tokens=900), endless()] * 4]
    while server.loads()[0]["num_total_reqs"] < 8:
        time.sleep(0.01)
    took = server.terminate()
    for stream in open_streams:
        stream.close()
    return took


cores = sorted(os.sched_getaffinity(0))
own, theirs = cores[-1], cores[0] if len(cores) > 1 else None
server = Server(QHX, "--context", "1024", "--prefix-cache", "64", "--drain", str(DRAIN), key="load", core=theirs)
os.sched_setaffinity(0, {own})
try:
    alone = {kind: said(ask(path, json.dumps(body))[1]) for kind, (path, body) in GOOD.items()}
    assert all(alone.values()) and "Lisbon" in alone["chat"], alone
    before = server.held()
    kinds = hostile()
    benign, others = run({kind: padded(size) for kind, (_, size) in kinds.items()}, SECONDS)
    middle = server.held()
    mixed, attacks = run({kind: requests for kind, (requests, _) in kinds.items()}, SECONDS)
    after = held_at_last(middle.memory + LEFT)
    count = lambda times: sum(map(len, times.values()))
    print(f"{CLIENTS} clients, {SECONDS} s: {count(benign)} good requests and {others.total()} of the same sizes, then {count(mixed)} and {attacks.total()} hostile: {dict(attacks)}")
    for kind in GOOD:
        slowest = [max(times[kind], default=0) for times in (benign, mixed)]
        median = [sorted(times[kind])[len(times[kind]) // 2] if times[kind] else 0 for times in (benign, mixed)]
        print(f"  {kind}: median {median[0]:.3f} s, then {median[1]:.3f}; slowest {slowest[0]:.3f} s, then {slowest[1]:.3f}")
        assert slowest[1] <= slowest[0] + SLACK, f"{kind} takes {slowest[1]:.2f} s among hostile requests, {slowest[0]:.2f} without"
    print(f"  memory: {before.memory:.1f} MiB, {middle.memory:.1f} after benign requests, {after.memory:.1f} after hostile ones, of which kept of prompts {middle.kept:.1f} and {after.kept:.1f}; {after.threads} threads")
    assert after.memory <= middle.memory + LEFT, f"{after.memory - middle.memory:.0f} MiB are left"
    assert set(attacks) == set(kinds) and server.process.poll() is None, attacks
    took = stop()
    assert took <= DRAIN + SLACK, f"it took {took:.1f} s to end"
    print(f"load: as expected; ended {took:.2f} s after SIGTERM, {DRAIN} s of which running answers may take")
finally:
    server.process.kill()
