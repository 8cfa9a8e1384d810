"""The systemd unit and the container's recipe: systemd and hadolint find nothing wrong with them, and what they start is a server that wants their keys and ends on SIGTERM. The container's files
are put together as the recipe says, with this machine's C library for a base, and run without a network.

    python installation.py PATH/TO/qhx BUNDLE SYSTEMD-ANALYZE HADOLINT
"""

import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

PACKAGING = Path(__file__).resolve().parents[2] / "packaging"
KEY = "a-key-of-this-test"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def status(port, headers={}):
    try:
        return urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/v1/models", headers=headers), timeout=5).status
    except urllib.error.HTTPError as error:
        return error.code


def judge_server(command, port, **how):
    """Starts a server that wants keys, and stops it while it answers."""
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **how)
    try:
        lines = iter(server.stderr.readline, "")
        assert any("listening on" in line for line in lines), f"{command} does not listen"
        keys = {"authorization": f"Bearer {KEY}"}
        assert (status(port), status(port, keys)) == (401, 200)
        body = json.dumps({"prompt": "Once", "max_tokens": 100, "ignore_eos": True, "stream": True}).encode()
        answer = urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, {**keys, "content-type": "application/json"}), timeout=60)
        answer.read(100)
        server.send_signal(signal.SIGTERM)
        assert answer.read().endswith(b"data: [DONE]\n\n"), "SIGTERM cut an answer off"
        assert server.wait(timeout=30) == 0
    finally:
        server.kill()


def judge_unit(qhx, bundle, systemd_analyze, place):
    text = (PACKAGING / "qhx.service").read_text()
    # It is installed elsewhere; all else is as it stands.
    unit = place / "qhx.service"
    unit.write_text(text.replace("/usr/local/bin/qhx", str(qhx)))
    verified = subprocess.run([systemd_analyze, "verify", "--man=no", unit], capture_output=True, text=True)
    assert verified.returncode == 0 and not verified.stderr, verified.stderr
    setting = lambda name: re.search(rf"^{name}=(.*)$", text, re.MULTILINE)[1]
    # systemd waits longer than the server may take to finish its answers.
    assert int(setting("TimeoutStopSec")) > 30
    (place / "keys").write_text(KEY + "\n")
    port = free_port()
    started = setting("ExecStart").replace("${CREDENTIALS_DIRECTORY}", str(place)).replace("/usr/local/bin/qhx", str(qhx))
    started = started.replace("/var/lib/qhx/model", str(bundle)).replace("8080", str(port))
    judge_server(shlex.split(started), port)


def judge_container(qhx, bundle, hadolint, place):
    recipe = PACKAGING / "Containerfile"
    linted = subprocess.run([hadolint, recipe], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout
    steps = [line.split(maxsplit=1) for line in recipe.read_text().splitlines() if line and not line.startswith("#")]
    sources = {"target/dist/qhx": qhx, "model": bundle}
    root = place / "root"
    for folder in ("tmp", "run/secrets", "usr/local/bin"):
        (root / folder).mkdir(parents=True)
    for library in re.findall(r"(/\S+) \(0x", subprocess.run(["ldd", qhx], capture_output=True, text=True).stdout):
        (root / library[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, root / library[1:])
    for source, to in (rest.split() for step, rest in steps if step == "COPY"):
        copy = shutil.copytree if sources[source].is_dir() else shutil.copy
        copy(sources[source], root / to[1:])
    (root / "run/secrets/qhx-keys").write_text(KEY + "\n")
    settings = dict(steps)
    command = json.loads(settings["ENTRYPOINT"]) + json.loads(settings["CMD"])
    environment = dict([settings["ENV"].split("=", 1)])
    assert settings["STOPSIGNAL"] == "SIGTERM" and settings["USER"].split(":")[0].isdigit()
    inside = [sys.executable, __file__, "--inside", str(root), settings["EXPOSE"], json.dumps(environment), *command]
    subprocess.run(["unshare", "--map-root-user", "--net", *inside], check=True)


def inside(root, port, environment, *command):
    """In a network of its own, which has nothing but the way to itself."""
    with socket.socket() as any_socket:
        up = struct.pack("16sh", b"lo", 1)
        fcntl.ioctl(any_socket, 0x8914, up)
    assert [line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]] == ["lo"]
    judge_server(command, int(port), env=json.loads(environment), preexec_fn=lambda: (os.chroot(root), os.chdir("/")))


if sys.argv[1] == "--inside":
    inside(*sys.argv[2:])
else:
    qhx, bundle = (Path(path).resolve() for path in sys.argv[1:3])
    with tempfile.TemporaryDirectory() as place:
        began = time.time()
        judge_unit(qhx, bundle, sys.argv[3], Path(place))
        judge_container(qhx, bundle, sys.argv[4], Path(place))
        print(f"packaging: as expected ({time.time() - began:.1f} s)")
