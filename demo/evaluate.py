"""Asks a demo model what training never asked, with transformers in f32, and writes `NAME/heldout.json`.

    python3 evaluate.py NAME [--clips FOLDER]

`cases` are answered one by one by `generate` (greedy, no batch, no padding) from what the processor makes of the messages and
files; they are kept with their token ids, so that another implementation can be held to them token for token. `accuracy` is
counted over larger generated sets, in batches; there an answer counts as exact when every token of it, and its end, is the best.
"""

import argparse
import json
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
import transformers
from PIL import Image

import chat
import configurations
import learners
import media
import needles
import questions
import split
import train

HERE = Path(__file__).parent
NEW_TOKENS = 128
KEPT = {"capital": 100, "country": 10, "region": 10, "continent": 10, "sum": 25, "story": 5}
NAMES = {"capital": "capitals", "country": "countries", "region": "regions", "continent": "continents", "sum": "sums", "story": "stories"}


def cases(name: str) -> Iterator[media.Case]:
    yield media.Case("first question", "text", "", "What is the capital of France?", "The capital of France is Paris.")
    for kind, count in KEPT.items():
        for asked in questions.held_out_questions(kind, count):
            yield media.Case(NAMES[kind], "text", "", asked.text, asked.answer)
    for asked in questions.held_out_questions("capital", 25, new_form=True):
        yield media.Case("capitals, new forms", "text", "", asked.text, asked.answer)
    if name == "phimoe":
        for number in range(12):
            asked = needles.needle(split.generator("kept needle", number), train.NEEDLE_WORDS[0], held_out=True, most=1)[0]
            yield media.Case("needles", "text", "", asked.text, asked.answer)
    if name in train.PICTURE:
        yield from media.picture_cases()
    if name == "gemma4":
        yield from media.sound_cases()


def answer(case: media.Case, model, processor, tokenizer) -> dict:
    """The case with the model's greedy answer; `margin` is the smallest lead of a chosen token's logit over the next best."""
    content = case.question if case.kind == "text" else [{"type": case.kind}, {"type": "text", "text": case.question}]
    messages = [{"role": "user", "content": content}]
    prompt = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if case.kind == "text":
        inputs = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    else:
        files = {"images": [Image.open(HERE / case.file)]} if case.kind == "image" else {"audio": [read_samples(HERE / case.file)]}
        inputs = processor(text=[prompt], add_special_tokens=False, return_tensors="pt", **files)
    output = model.generate(
        **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True)
    asked = inputs["input_ids"].shape[1]
    ids = output.sequences[0, asked:].tolist()
    best = torch.stack(output.logits)[:, 0].topk(2).values
    text = tokenizer.decode(ids, skip_special_tokens=True).strip()
    record = {"set": case.test, "messages": messages}
    if case.file:
        record[case.kind] = case.file
    return record | {
        "prompt_ids": inputs["input_ids"][0].tolist(), "ids": ids, "text": text, "expected": case.answer,
        "exact": text == case.answer and ids[-1] in model.generation_config.eos_token_id,
        "margin": round((best[:, 0] - best[:, 1]).min().item(), 4),
    }


def read_samples(file: Path) -> numpy.ndarray:
    with wave.open(str(file), "rb") as sound:
        return numpy.frombuffer(sound.readframes(sound.getnframes()), dtype="<i2").astype(numpy.float32) / 32_768


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[demo.name for demo in configurations.DEMOS])
    parser.add_argument("--clips", type=Path, default=HERE / ".cache")
    options = parser.parse_args()
    demo = configurations.find(options.name)
    folder = HERE / demo.name
    model = getattr(transformers, demo.model_class).from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = transformers.AutoProcessor.from_pretrained(folder) if demo.preprocessing else tokenizer
    records = []
    for case in cases(demo.name):
        records.append(answer(case, model, processor, tokenizer))
        if not records[-1]["exact"]:
            print(f"{case.test}: {case.question} -> {records[-1]['text']} (expected {case.answer})", flush=True)
    kept = {}
    for record in records:
        exact, total = kept.get(record["set"], (0, 0))
        kept[record["set"]] = (exact + record["exact"], total + 1)
    print("kept cases:", ", ".join(f"{name} {exact} of {total}" for name, (exact, total) in kept.items()), flush=True)
    learner = learners.LEARNERS[demo.name](demo)
    learner.model.load_state_dict(model.state_dict())
    accuracy = train.test(learner, train.make_tests(chat.Chat(demo), options.clips), torch.device("cpu"))
    write(folder / "heldout.json", {
        "model": demo.name, "transformers": transformers.__version__, "torch": torch.__version__,
        "arithmetic": "f32 on the stored f16 weights", "decoding": f"greedy, at most {NEW_TOKENS} new tokens",
        "kept": kept, "accuracy": accuracy,
    }, records)


def write(file: Path, head: dict, records: list[dict]) -> None:
    """JSON with one case a line."""
    lines = ",\n".join("    " + json.dumps(record, ensure_ascii=False) for record in records)
    start = json.dumps(head, indent=2, ensure_ascii=False).removesuffix("\n}")
    file.write_text(f'{start},\n  "cases": [\n{lines}\n  ]\n}}\n', encoding="utf-8")
    json.loads(file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
