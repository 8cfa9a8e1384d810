"""llama.cpp's quantisations of an f32 GGUF file: their size, and how far their predictions of texts are from those of the f32 model."""

import hashlib
import math
import subprocess
from functools import cached_property
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

# Two f32 programs of one model differ by the order of their sums.
SAME_KL = 1e-6


class Wrong(Exception):
    """Something was not as it has to be; the text says what."""


def transformers_model(folder: Path, threads: int):
    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class Peer:
    """llama.cpp's runs of the texts."""

    def __init__(self, options, place: Path, texts: dict):
        self.options, self.place, self.texts = options, place, texts
        # Its libraries are named after their version.
        self.version = next(path.name.split(".so")[0].removeprefix("libllama.") for path in options.llama_logits.parent.glob("libllama.v*.so"))

    @cached_property
    def windows(self) -> dict:
        return {name: windows(self.options, self.place, path) for name, path in self.texts.items()}

    @cached_property
    def f32(self) -> dict:
        return self.logits(self.place / "f32.gguf")

    def facts(self) -> dict:
        """Facts about the model and the texts; checks that llama.cpp's f32 model is that of transformers."""
        _, model = transformers_model(self.place / "checkpoint", self.options.threads)
        facts = {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "llama_cpp": self.version,
            "window": self.options.window,
            "tokens": {name: sum(len(window) - 1 for window in found) for name, found in self.windows.items()},
            "sha256": {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in self.texts.items()},
            "perplexity": {},
            "f32_kl": {},
        }
        for name, found in self.windows.items():
            with torch.inference_mode():
                expected = [model(torch.tensor([window])).logits[0, :-1].numpy() for window in found]
            facts["f32_kl"][name] = float(np.mean(divergence(expected, self.f32[name])[0]))
            facts["perplexity"][name] = perplexity(expected, found)
            if not facts["f32_kl"][name] < SAME_KL:
                raise Wrong(f"llama.cpp and transformers differ in f32: mean KL {facts['f32_kl'][name]} on text ({name})")
        return facts

    def logits(self, path: Path) -> dict:
        """For each text and window the logits after each token but the last."""
        found = {}
        for name, windows in self.windows.items():
            ids, out = self.place / "ids", self.place / "logits"
            np.array([id for window in windows for id in window], dtype=np.int32).tofile(ids)
            run(self.options.llama_logits, "logits", path, ids, out, self.options.window, self.options.threads)
            rows = [len(window) - 1 for window in windows]
            logits = np.fromfile(out, dtype=np.float32).reshape(sum(rows), -1)
            found[name] = np.split(logits, np.cumsum(rows)[:-1])
            out.unlink()
        return found

    def quantised(self, name: str) -> dict:
        """Bytes of the weights in a type, and the divergence from f32 on each text."""
        path = self.place / f"{name}.gguf"
        try:
            run(self.options.quantize, self.place / "f32.gguf", path, name, self.options.threads)
            texts = {text: summary(*divergence(self.f32[text], rows)) for text, rows in self.logits(path).items()}
            return {"bytes": sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors), "texts": texts, "note": ""}
        finally:
            path.unlink(missing_ok=True)


def windows(options, place: Path, text: Path) -> list:
    """A text's tokens in the windows of `qhx eval`: ids without any in front, cut every so many. llama.cpp must make the same."""
    words = text.read_text()
    ids = Tokenizer.from_file(str(place / "checkpoint/tokenizer.json")).encode(words).ids
    run(options.llama_logits, "tokens", place / "f32.gguf", text, place / "ids")
    if np.fromfile(place / "ids", dtype=np.int32).tolist() != ids:
        raise Wrong(f"llama.cpp makes other tokens of {text} than the tokenizer of the checkpoint")
    found = [ids[first : first + options.window] for first in range(0, len(ids), options.window)]
    return [window for window in found if len(window) > 1]


def run(*command):
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if result.returncode != 0:
        raise Wrong(f"{' '.join(str(part) for part in command)}: {result.stderr.strip()}")


def divergence(expected: list, found: list):
    """KL of each row of `found` from that of `expected`, and whether its largest logit is another one."""
    kl, flips = [], []
    for a, b in zip(expected, found, strict=True):
        for first in range(0, len(a), 64):
            rows = slice(first, first + 64)
            p, q = (torch.from_numpy(logits[rows]).double().log_softmax(-1) for logits in (a, b))
            kl.append((p.exp() * (p - q)).sum(-1).clamp(min=0).numpy())
            flips.append(a[rows].argmax(-1) != b[rows].argmax(-1))
    return np.concatenate(kl), np.concatenate(flips)


def summary(kl, flips):
    """As `qhx eval` sums up: quantiles by nearest rank."""
    return {"tokens": len(kl), "kl": float(kl.mean()), "p99": float(np.sort(kl)[math.ceil(0.99 * len(kl)) - 1]), "flips": float(flips.mean())}


def perplexity(logits: list, windows: list) -> float:
    loss = 0.0
    for rows, window in zip(logits, windows, strict=True):
        loss += torch.nn.functional.cross_entropy(torch.from_numpy(rows).double(), torch.tensor(window[1:]), reduction="sum").item()
    return math.exp(loss / sum(len(rows) for rows in logits))
