"""A server of a binary, and what its judges ask of it."""

import collections
import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.request

Held = collections.namedtuple("Held", "memory descriptors threads kept")


class Server:
    """`qhx serve` with the built-in model; on a core of its own, if one is given."""

    def __init__(self, qhx, *arguments, key=None, environment=None, core=None):
        self.key = key
        command = [qhx, "serve", "--port", "0", *arguments, *(["--api-key", key] if key else [])]
        pin = (lambda: os.sched_setaffinity(0, {core})) if core is not None else None
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=pin)
        self.address = next(line.split("http://")[1].strip() for line in self.process.stderr if "listening on" in line)
        threading.Thread(target=lambda: [None for _ in self.process.stderr], daemon=True).start()

    def connect(self):
        host, port = self.address.split(":")
        return socket.create_connection((host, int(port)), timeout=60)

    def head(self, path, *headers):
        """What stands before a body; headers that are given replace those of the same name."""
        own = [f"Host: {self.address}", "Connection: close", *([f"Authorization: Bearer {self.key}"] if self.key else [])]
        names = {header.split(":")[0] for header in headers}
        lines = [line for line in own if line.split(":")[0] not in names] + list(headers)
        return "".join(f"{line}\r\n" for line in [f"POST {path} HTTP/1.1", *lines, ""]).encode("latin-1")

    def send(self, path, body, length=None):
        """Sends a request and leaves the rest to the caller."""
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        stream = self.connect()
        stream.sendall(self.head(path, f"Content-Length: {length or len(text)}") + text)
        return stream

    def loads(self):
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return json.load(urllib.request.urlopen(urllib.request.Request(f"http://{self.address}/loads", headers=headers)))["loads"]

    def held(self):
        """Memory, descriptors and threads, and what is kept of prompts; memory in MiB."""
        folder = f"/proc/{self.process.pid}"
        status = open(f"{folder}/status").read()
        number = lambda name: int(next(line for line in status.splitlines() if line.startswith(name)).split()[1])
        return Held(number("VmRSS") / 1024, len(os.listdir(f"{folder}/fd")), number("Threads"), self.loads()[0]["kv_bytes"] / 2**20)

    def settle(self, descriptors):
        """Waits until nothing runs or waits and connections are closed, and says how long that took."""
        began = time.time()
        while any(load["num_total_reqs"] for load in self.loads()) or self.held().descriptors > descriptors:
            assert time.time() - began < 20, f"not idle: {self.loads()}, {self.held()}"
            time.sleep(0.01)
        return time.time() - began

    def terminate(self):
        """Asks it to end, and says how long that took."""
        began = time.time()
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(120)
        assert status == 0, f"it ended with {status}"
        return time.time() - began


def rest(stream):
    """What comes until the server closes the connection."""
    parts = []
    while part := stream.recv(65536):
        parts.append(part)
    return b"".join(parts)


def chat(**more):
    return {"messages": [{"role": "user", "content": "What is the capital of Portugal?"}], "temperature": 0, **more}


def endless(stream=True):
    return chat(messages=[{"role": "user", "content": "Tell me a story."}], ignore_eos=True, temperature=1, stream=stream)
