"""llama.cpp's own tools, which `cargo xtask` compiles against the prebuilt libraries (`xtask/src/llama.rs`)."""

import json
import shutil
import subprocess
import sys
from pathlib import Path


def quiet(*command) -> str:
    """What a command prints; ends the script where the command fails."""
    return both(*command).stdout


def both(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stderr}")
    return done


def speeds(bench: Path, gguf: Path, threads: int, prompt: int, new: int, before: list = []):
    """Tokens per second by test, and the variant of the libraries that was chosen. Each test has an untimed run before it; `before` is put before the command."""
    done = both(*before, bench, "-m", gguf, "-t", threads, "-p", prompt, "-n", new, "-r", 1, "-o", "json")
    loaded = [line for line in done.stderr.splitlines() if "loaded CPU backend from" in line]
    variant = loaded[-1].rsplit("libggml-cpu-", 1)[-1].removesuffix(".so") if loaded else "?"
    found = json.loads(done.stdout)
    return {f"pp{test['n_prompt']}" if test["n_prompt"] else f"tg{test['n_gen']}": test["avg_ts"] for test in found}, variant


def only(bench: Path, variant: str, place: Path) -> Path:
    """The same tool beside one variant of the libraries, which it then takes whatever the CPU has."""
    place.mkdir()
    for library in bench.parent.glob("*.so"):
        if not library.name.startswith("libggml-cpu-") or library.name == f"libggml-cpu-{variant}.so":
            (place / library.name).symlink_to(library)
    if not list(place.glob("libggml-cpu-*.so")):
        sys.exit(f"llama.cpp has no variant {variant}")
    return Path(shutil.copy(bench, place))
