"""Three servers behind the gateway smg: one prefix goes to one server; a server that gets SIGTERM finishes its stream while others answer what is new; and after `kill -9` of a server a begun
stream ends in an error, requests without a first byte are answered by another server, and so are later ones.

    python fleet.py PATH/TO/qhx
"""

import concurrent.futures
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

QHX = sys.argv[1]


def serve():
    server = subprocess.Popen([QHX, "serve", "--port", "0", "--context", "1024"], stderr=subprocess.PIPE, text=True)
    address = next(line.split("listening on ")[1].strip() for line in server.stderr if "listening on" in line)
    threading.Thread(target=lambda: [None for _ in server.stderr], daemon=True).start()
    return server, address


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def get(address):
    return urllib.request.urlopen(address, timeout=30).read().decode()


def answered(address):
    lines = get(f"{address}/metrics").splitlines()
    return sum(int(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:request_success_total"))


def requests(address):
    return sum(load["num_total_reqs"] for load in json.loads(get(f"{address}/loads"))["loads"])


port = free_port()
started = [serve() for _ in range(3)]
workers = list(started)
command = [Path(sys.executable).with_name("smg"), "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware", "--worker-urls"]
gateway = subprocess.Popen([*command, *(address for _, address in workers)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def ask(text, **more):
    body = {"model": "builtin", "messages": [{"role": "user", "content": text}], **more}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    return urllib.request.urlopen(request, timeout=60)


def endless_stream():
    """A stream that has begun, and the server that writes it."""
    stream = ask("Tell me a story.", stream=True, ignore_eos=True, temperature=1, max_tokens=900)
    stream.read(300)
    return stream, next(worker for worker in workers if requests(worker[1]))


try:
    for attempt in range(120):
        try:
            answer = json.load(ask("What is the capital of Portugal?"))
            break
        except OSError:
            time.sleep(0.5)
    assert answer["choices"][0]["message"]["content"] == "The capital of Portugal is Lisbon.", answer
    before = [answered(address) for _, address in workers]
    for _ in range(10):
        ask("Tell me a story. " + "Please. " * 40, max_tokens=2).read()
    shares = sorted(answered(address) - first for (_, address), first in zip(workers, before))
    assert shares == [0, 0, 10], f"requests with one prefix went to several servers: {shares}"
    # One is stopped as an update stops it: nobody notices.
    stream, (leaving, address) = endless_stream()
    leaving.send_signal(signal.SIGTERM)
    drain_began = time.time()
    for number in range(20):
        json.load(ask(f"What is {number} plus 3?"))
    rest = stream.read().decode()
    assert rest.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in rest, f"a stream was cut off: {rest[-300:]}"
    assert leaving.wait(timeout=30) == 0
    workers.remove((leaving, address))
    print(f"drained in {time.time() - drain_began:.1f} s")
    # One is killed.
    stream, (victim, address) = endless_stream()
    # Of these nothing has been sent yet.
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        whole = [pool.submit(lambda: json.load(ask("Tell me a story.", ignore_eos=True, temperature=1, seed=7, max_tokens=300))) for _ in range(8)]
        while requests(address) < 2 and not all(answer.done() for answer in whole):
            time.sleep(0.005)
        victim.send_signal(signal.SIGKILL)
        rest = stream.read().decode()
        assert '"error"' in rest and '"finish_reason":"' not in rest, f"a stream that was cut off looks complete: {rest[-300:]}"
        texts = {answer.result()["choices"][0]["message"]["content"] for answer in whole}
    assert len(texts) == 1 and all(answer.result()["usage"]["completion_tokens"] == 300 for answer in whole), texts
    for number in range(20):
        json.load(ask(f"What is {number} plus 4?"))
    print("smg: as expected")
finally:
    for process in [gateway, *(server for server, _ in started)]:
        process.kill()
