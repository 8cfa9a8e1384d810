"""Compares decoding with drafts and without, alternating in one run: work that copies, and prose. SmolLM2 beside llama.cpp.

usage: cargo xtask bench-drafts [--rounds N] [--threads N] [--new N] [--real-time]
       drafts.py QHX SMOLLM2.gguf LLAMA_LOOKUP …

SmolLM2 is the GGUF file that `cargo xtask demo` fetches; the demo models are those of this repository. Each task is one prompt, answered with `--draft none` and with the default or the source that the task names, in turns; the ids must be the same. LLAMA_LOOKUP is
llama.cpp's own example of lookup decoding beside its prebuilt libraries (`xtask/src/llama.rs`): in the same rounds it answers the same prompts from the same file, with as many tokens, without drafts and with the most that it was best with (PEER_DRAFTS). The table
has medians of the decode speed, and replaces the one between the markers in docs/benchmarks.md.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- drafts: begin -->", "<!-- drafts: end -->"

STORY = (
    "The old lighthouse stood at the end of the pier. Every evening the keeper climbed the stairs, lit the lamp and wrote the weather into his book. "
    "The harbour master came on Mondays, counted the boats and drank a cup of tea. In winter the storms took the rope, the ladder and once the door. "
    "Nobody in the village remembered who had built the lighthouse, but everybody knew the keeper by his name."
)
PEOPLE = [
    ("Ada", 36, "London"), ("Grace", 45, "New York"), ("Alan", 41, "Manchester"), ("Edsger", 52, "Rotterdam"), ("Barbara", 39, "Los Angeles"), ("Donald", 48, "Milwaukee"),
    ("Margaret", 33, "Boston"), ("Linus", 28, "Helsinki"),
]
CODE = '''def total_price(items, tax):
    total = 0
    for item in items:
        price = item["price"] * item["count"]
        total = total + price
    total = total + total * tax
    return round(total, 2)


def print_price(items, tax):
    total = total_price(items, tax)
    print("items:", len(items))
    print("total:", total)
    return total
'''


def copied(what: str, change: str, given: str, begun: str = "") -> str:
    """A request of a kind that a base model continues: what is given, then the same once more."""
    return f"{what}\n\n{given}\n\n{change}\n\n{begun}"


def json_lines(people) -> str:
    return "\n".join(f'{{"name": "{name}", "age": {age}, "city": "{city}"}}' for name, age, city in people)


TASKS = {
    "rewrite with one change": copied("The text:", 'The text again, with "captain" instead of "keeper":', STORY, STORY.split(" the keeper")[0] + " the captain"),
    "JSON from a table": "| name | age | city |\n|---|---|---|\n" + "\n".join(f"| {name} | {age} | {city} |" for name, age, city in PEOPLE)
    + "\n\nThe same table as JSON, one object in each line:\n\n" + json_lines(PEOPLE[:3]) + "\n",
    "code with one rename": copied("The code:", "The code again, with the function `print_price` renamed to `show_price`:", f"```python\n{CODE}```", "```python\ndef total_price(items, tax):\n"),
    "prose": "It was a cold morning in November when the letter came. She opened it and read:",
}
PROSE = "prose"
STORY_REQUEST = "Tell me a story about a fox and a lantern."
SHORT_REQUEST = "What is the capital of France?"
MTP = "`--draft mtp`"
WORDS = "apple bird Felix bread chair cloud Olga door fish flower garden Bruno house lamp moon mountain Clara music orange paper river Theo star table tree Greta water window"
DEMOS = {
    "phimoe": {"repeat": f"Repeat: {WORDS}.", PROSE: STORY_REQUEST},
    "qwen3_5": {
        PROSE: STORY_REQUEST, f"{PROSE}, {MTP}": STORY_REQUEST, f"other prose, {MTP}": "Tell me a story about an owl and a bell.",
        "short answer": SHORT_REQUEST, f"short answer, {MTP}": SHORT_REQUEST,
    },
}
SMOLLM2_FLAGS = ["--ignore-eos"]
PEER_DRAFTS = [3, 8]
"""Numbers of tokens that llama.cpp drafts at a time: its default, and more."""
PROSE_FLAGS = ["--temperature", 0.9, "--seed", 3]
"""Greedy prose of a small model soon repeats itself. With a seed, sampled answers too are the same with drafts and without."""
TASK_FLAGS = {PROSE: PROSE_FLAGS, "code with one rename": ["--stop", "```"]}
"""For SmolLM2, which goes on with something else behind the code."""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("qhx", type=Path)
    parser.add_argument("smollm2", type=Path)
    parser.add_argument("lookup", type=Path)
    parser.add_argument("--real-time", action="store_true", help="measure with real-time priority, where the machine has other work to do (chrt -r 5)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new", type=int, default=96)
    options = parser.parse_args()
    options.before = ["chrt", "-r", "5"] if options.real_time else []
    rows = []
    with tempfile.TemporaryDirectory() as place:
        sources = [("SmolLM2-135M Q4_1", options.smollm2, "native", [*SMOLLM2_FLAGS, "--prompt"], TASKS)]
        sources += [(f"demo {name}", ROOT / "demo" / name, "w8", ["--user"], tasks) for name, tasks in DEMOS.items()]
        for name, source, precision, flags, tasks in sources:
            bundle = Path(place) / name.replace(" ", "-")
            run(options.qhx, "forge", source, "--out", bundle, "--precision", precision)
            for task, prompt in tasks.items():
                own = TASK_FLAGS.get(task, []) if source == options.smollm2 else []
                draft = "mtp" if task.endswith(MTP) else "auto"
                sampling = ["--temp", 0.9, "--seed", 3] if task == PROSE else ["--temp", 0]
                peer = (prompt, sampling) if source == options.smollm2 else None
                rows.append((name, task, *measured(options, bundle, draft, [*own, *flags, prompt], peer)))
                print(rows[-1], file=sys.stderr, flush=True)
    text = table(rows)
    print(text)
    publish(text)


def measured(options, bundle: Path, draft: str, asked: list, peer: tuple | None):
    """Median tokens per second without drafts and with those of a source, the median of the rounds' ratios, and the drafts of an answer: right ones, all; then llama.cpp's speeds for the prompt and with the sampling of `peer`, plain and its best with drafts."""
    plain, drafted, timing = [], [], None
    theirs = {most: [] for most in (0, *PEER_DRAFTS)} if peer else {}
    for _ in range(options.rounds):
        answers = []
        for source, speeds in (("none", plain), (draft, drafted)):
            limits = ["--max-new", options.new, "--device", "cpu", "--threads", options.threads]
            answers.append(json.loads(run(*options.before, options.qhx, "generate", bundle, *limits, "--draft", source, "--json", *asked)))
            timing = answers[-1]["timing"]
            speeds.append(timing["decode_tokens_per_second"])
        if answers[0]["ids"] != answers[1]["ids"]:
            raise SystemExit(f"{bundle.name}: drafts changed an answer to {asked[-1]!r}")
        for most, speeds in theirs.items():
            speeds.append(peer_speed(options, *peer, len(answers[0]["ids"]), most))
    ratio = statistics.median(with_ / without for with_, without in zip(drafted, plain, strict=True))
    medians = [statistics.median(speeds) for speeds in theirs.values()]
    return statistics.median(plain), statistics.median(drafted), ratio, timing["accepted"], timing["drafted"], *([medians[0], max(medians[1:])] if medians else [None, None])


def peer_speed(options, prompt: str, sampling: list, new: int, most: int) -> float:
    """Tokens per second of llama.cpp's lookup decoding with at most so many drafts; 0: none."""
    flags = ["-t", options.threads, "-n", new, *sampling, "--ignore-eos", "--spec-draft-n-max", most]
    done = subprocess.run([str(part) for part in (*options.before, options.lookup, "-m", options.smollm2, "-p", prompt, *flags)], capture_output=True, text=True)
    found = re.search(r"decoded +\d+ tokens in +[\d.]+ seconds, speed: +([\d.]+) t/s", done.stdout + done.stderr)
    if done.returncode != 0 or not found:
        raise SystemExit(f"{options.lookup} failed:\n{done.stderr}")
    return float(found[1])


def run(*command) -> str:
    return subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True).stdout


def table(rows):
    lines = ["| model | task | plain t/s | with drafts t/s | ratio | drafts right | llama.cpp plain | its lookup | qhx / the better of these |", "|---|---|---:|---:|---:|---:|---:|---:|---:|"]
    for name, task, plain, drafted, ratio, right, all_, their_plain, lookup in rows:
        peer = f"{their_plain:.1f} | {lookup:.1f} | {drafted / max(their_plain, lookup):.2f}x" if lookup else " | | "
        lines.append(f"| {name} | {task} | {plain:.1f} | {drafted:.1f} | **{ratio:.2f}x** | {right} of {all_} | {peer} |")
    return "\n".join(lines)


def publish(text: str):
    page = ROOT / "docs/benchmarks.md"
    before, rest = page.read_text().split(BEGIN, 1)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END, 1)[1]}")


if __name__ == "__main__":
    main()
