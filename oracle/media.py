"""Media cases of a fixture: procedural images and audio, the towers' results, and whole prompts with media."""

import json
import math
import wave
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer

import record
import weights
from families import Family
from record import Answer, Health

RATE = 16000
TAPPED = "two_images"
STEP_LOGITS = ["image", "two_images", "sound", "image_and_sound"]
LOOSE_TOLERANCE = 4e-3
STEPS = 12
"""The number of tokens whose logits are kept."""


@dataclass
class Tower:
    """What a tower of transformers computes for one image or audio clip, in the row order that qhx uses."""

    inputs: dict[str, torch.Tensor]
    """Program inputs by name; `levels` stands for patches before scaling."""
    soft_rows: torch.Tensor
    deepstack: list[torch.Tensor] = field(default_factory=list)
    taps: dict[str, torch.Tensor] = field(default_factory=dict)
    about: dict = field(default_factory=dict)
    """Its entry in `media.json`: sizes and counts."""


@dataclass(frozen=True)
class Media:
    """What is specific to the media of a family."""

    files: Callable[[dict], dict[str, dict]]
    """The JSON files of its processor, given `config.json`."""
    image: Callable[[object, torch.nn.Module, Image.Image], Tower]
    """Runs the vision tower: (processor, model, image)."""
    expand: Callable[[list[int], list[int], list[int], dict], list[int]]
    """(template ids, soft rows of each image, of each sound, config) → prompt ids."""
    prompts: dict[str, list]
    """Name to turns: a turn is a list of texts, `IMAGE n` and `SOUND n`; users and models take turns."""
    sound: Callable[[object, torch.nn.Module, numpy.ndarray], Tower] | None = None
    load: Callable[[Path], object] = transformers.AutoProcessor.from_pretrained
    """The processor of a folder."""


def image(n: int) -> tuple[str, int]:
    return ("image", n)


def sound(n: int) -> tuple[str, int]:
    return ("audio", n)


def write_files(family: Family, folder: Path) -> None:
    """The processor's files, as published beside `config.json`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for name, content in family.media.files(config).items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def record_media(family: Family, name: str, seed: int, model: torch.nn.Module, folder: Path) -> None:
    """Write `media/`, `media.json` and `media.safetensors` for the model in `folder`."""
    media = family.media
    (folder / "media").mkdir(exist_ok=True)
    processor = media.load(folder)
    model.generation_config.eos_token_id = None  # answers have a fixed length
    images = [keep_image(folder, stem, picture) for stem, picture in pictures(seed).items()]
    sounds = [keep_sound(folder, stem, samples) for stem, samples in recordings(seed).items()] if media.sound else []
    tensors, about = {}, {"images": [], "sounds": []}
    with torch.no_grad():
        towers = [media.image(processor, model, picture) for _, picture in images]
        heard = [media.sound(processor, model, samples) for _, samples in sounds]
    for kind, files, results in [("image", images, towers), ("sound", sounds, heard)]:
        for index, ((file, _), tower) in enumerate(zip(files, results)):
            about[f"{kind}s"].append({"file": file, "soft_rows": len(tower.soft_rows)} | tower.about)
            prefix = f"{kind}.{index}"
            tensors |= {f"{prefix}.{key}": value for key, value in tower.inputs.items()}
            tensors[f"{prefix}.soft_rows"] = tower.soft_rows
            tensors |= {f"{prefix}.deepstack.{key}": value for key, value in enumerate(tower.deepstack)}
            if index == 0:
                tensors |= {f"{prefix}.tap.{key}": value for key, value in tower.taps.items()}

    prompts = Prompts(family, processor, folder, images, sounds, [len(t.soft_rows) for t in towers], [len(t.soft_rows) for t in heard])
    models = [model, record.nudged(model)]
    answers = {}
    for prompt in media.prompts:
        answers[prompt] = find_seen(family, models, prompt, lambda attempt: prompts.propose(prompt, attempt))
        if prompt in STEP_LOGITS:
            tensors[f"{prompt}.step_logits"] = answers[prompt].logits[:STEPS]
        answers[prompt].positions = positions(model, answers[prompt])
    streams = residual_streams(model, answers[TAPPED])
    tensors |= {f"{TAPPED}.tap.{stage}": stream for stage, stream in streams.items()}
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "media.safetensors")
    write_json(name, seed, about, answers, folder)


def find_seen(family: Family, models: list[torch.nn.Module], name: str, propose) -> Answer:
    """A prompt with a healthy answer; towers that amplify rounding errors get a larger tolerance."""
    try:
        return record.find_healthy(family, models, name, Seen(models[0], record.ROUNDING_TOLERANCE, 40), propose)
    except SystemExit:
        return record.find_healthy(family, models, name, Seen(models[0], LOOSE_TOLERANCE, 200), propose)


@dataclass
class Seen(Health):
    """Also requires that the media matter: with blank media the answer must differ."""

    def __init__(self, model: torch.nn.Module, rounding: float, attempts: int):
        super().__init__(rounding=rounding, attempts=attempts)
        self.model = model

    def accepts(self, answer: Answer) -> bool:
        if not super().accepts(answer):
            return False
        blind = Answer(answer.ids, inputs={key: torch.zeros_like(value) if key in ("pixel_values", "input_features") else value
                                           for key, value in answer.inputs.items()})
        record.generate(self.model, blind, Health(margin=0.0))
        return blind.greedy[:6] != answer.greedy[:6]


@dataclass
class Prompts:
    """Renders conversations with media and lets the processor of transformers expand them."""

    family: Family
    processor: object
    folder: Path
    images: list
    sounds: list
    image_rows: list[int]
    sound_rows: list[int]

    def propose(self, name: str, attempt: int) -> Answer:
        messages, pictures, recordings = [], [], []
        for number, turn in enumerate(self.family.media.prompts[name]):
            content = []
            for part in turn:
                if isinstance(part, str):
                    content.append({"type": "text", "text": part.replace("#", str(attempt))})
                else:
                    content.append({"type": part[0]})
                    (pictures if part[0] == "image" else recordings).append(part[1])
            messages.append({"role": "assistant", "content": content[0]["text"]} if number % 2 else {"role": "user", "content": content})
        text = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        options = {"images": [self.images[n][1] for n in pictures]} if pictures else {}
        if recordings:
            options["audio"] = [self.sounds[n][1] for n in recordings]
        inputs = dict(self.processor(text=[text], return_tensors="pt", add_special_tokens=False, **options))
        ids = inputs.pop("input_ids")[0].tolist()
        inputs.pop("attention_mask")
        plain = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        template = plain.encode(text, add_special_tokens=False).ids
        config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        expanded = self.family.media.expand(
            template, [self.image_rows[n] for n in pictures], [self.sound_rows[n] for n in recordings], config)
        if expanded != ids:
            raise SystemExit(f"{name}: the processor's ids are not the template's ids with placeholders expanded:\n{ids}\n{expanded}")
        answer = Answer(ids, text=text, messages=messages, inputs=inputs)
        answer.extra = {"template_ids": template, "images": pictures, "sounds": recordings}
        return answer


@torch.no_grad()
def positions(model: torch.nn.Module, answer: Answer) -> list[list[int]] | None:
    """Time, height and width positions of a prompt's rows, if the model has all three."""
    kept = []
    hook = model.model.language_model.rotary_emb.register_forward_pre_hook(
        lambda module, args, options: kept.append(args[1] if len(args) > 1 else options["position_ids"]), with_kwargs=True)
    model(input_ids=torch.tensor([answer.ids]), use_cache=False, **answer.inputs)
    hook.remove()
    return kept[0][:, 0].tolist() if kept[0].dim() == 3 else None


@torch.no_grad()
def residual_streams(model: torch.nn.Module, answer: Answer) -> dict[str, torch.Tensor]:
    """The text's residual stream after the embedding and each layer of one prompt, rows added by early layers of the tower included."""
    streams, hooks = {}, []

    def keep(stage: str, value: torch.Tensor) -> None:
        streams[stage] = value[0].detach().clone()

    text = model.model.language_model
    stages = ["embed"] + [f"layers.{index}.ffn" for index in range(len(text.layers))]
    for stage, module in zip(stages, [*text.layers, text.norm]):
        hooks.append(module.register_forward_pre_hook(lambda module, args, stage=stage: keep(stage, args[0])))
    model(input_ids=torch.tensor([answer.ids]), use_cache=False, **answer.inputs)
    for hook in hooks:
        hook.remove()
    return streams


def write_json(name: str, seed: int, about: dict, answers: dict[str, Answer], folder: Path) -> None:
    """One line per image, audio clip and prompt."""
    def lines(entries: list[dict]) -> str:
        return "[\n" + ",\n".join("    " + json.dumps(entry, ensure_ascii=False) for entry in entries) + "\n  ]" if entries else "[]"

    prompts = []
    for prompt, answer in answers.items():
        entry = {"name": prompt, "messages": answer.messages, "text": answer.text} | answer.extra
        entry |= {"ids": answer.ids, "greedy": answer.greedy, "min_margin": round(answer.margins.min().item(), 4)}
        if answer.positions is not None:
            entry["positions"] = answer.positions
        prompts.append(entry)
    head = {"family": name, "transformers": transformers.__version__, "seed": seed}
    text = "{\n" + "\n".join(f'  "{key}": {json.dumps(value)},' for key, value in head.items())
    text += f'\n  "images": {lines(about["images"])},\n  "sounds": {lines(about["sounds"])},\n  "prompts": {lines(prompts)}\n}}\n'
    (folder / "media.json").write_text(text, encoding="utf-8")


def pictures(seed: int) -> dict[str, numpy.ndarray]:
    """Small images of different shapes: one that barely changes size, one to enlarge, one to shrink."""
    def draw(name: str, height: int, width: int) -> numpy.ndarray:
        noise = weights.generator(seed, f"picture/{name}")
        y, x = numpy.mgrid[0:height, 0:width]
        waves = [noise.uniform(0.03, 0.3, size=2) for _ in range(3)]
        phases = noise.uniform(0, 2 * math.pi, size=3)
        channels = [numpy.sin(a * x + b * y + phase) for (a, b), phase in zip(waves, phases)]
        centre, radius = noise.uniform(0.3, 0.7, size=2) * (height, width), 0.3 * min(height, width)
        inside = (y - centre[0]) ** 2 + (x - centre[1]) ** 2 < radius**2
        picture = numpy.stack([127.5 + 127.5 * channel for channel in channels], axis=-1)
        picture[inside] = noise.uniform(0, 255, size=3)
        return numpy.clip(numpy.rint(picture), 0, 255).astype(numpy.uint8)

    return {"wide": draw("wide", 70, 100), "tiny": draw("tiny", 24, 20), "large": draw("large", 130, 150)}


def recordings(seed: int) -> dict[str, numpy.ndarray]:
    """Sweeps with a little noise, 16-bit, of different lengths: one soft row, a few, more than the attention's window."""
    def play(name: str, samples: int) -> numpy.ndarray:
        noise = weights.generator(seed, f"recording/{name}")
        t = numpy.arange(samples) / RATE
        voice = sum(noise.uniform(0.05, 0.25) * numpy.sin(2 * math.pi * (noise.uniform(100, 3000) * t + noise.uniform(-800, 800) * t * t))
                    for _ in range(4))
        voice = voice * (0.6 + 0.4 * numpy.sin(2 * math.pi * 3.0 * t)) + 0.01 * noise.standard_normal(samples)
        return numpy.clip(numpy.rint(voice * 32768), -32768, 32767).astype(numpy.int16)

    return {"phrase": play("phrase", 14001), "click": play("click", 161), "word": play("word", 4160)}


def keep_image(folder: Path, stem: str, picture: numpy.ndarray) -> tuple[str, Image.Image]:
    opened = Image.fromarray(picture)
    opened.save(folder / "media" / f"{stem}.png", optimize=True)
    return f"media/{stem}.png", opened


def keep_sound(folder: Path, stem: str, samples: numpy.ndarray) -> tuple[str, numpy.ndarray]:
    with wave.open(str(folder / "media" / f"{stem}.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(samples.tobytes())
    return f"media/{stem}.wav", samples.astype(numpy.float32) / 32768


def to_levels(pixels: torch.Tensor, scale: float, offset: float) -> torch.Tensor:
    """The 8-bit levels from which scaled pixels were computed: `pixels = levels · scale + offset`."""
    levels = ((pixels - offset) / scale).round()
    assert (levels * scale + offset - pixels).abs().max() < 1e-6 and levels.min() >= 0 and levels.max() <= 255
    return levels.to(torch.uint8)


def hooked(modules: dict[str, torch.nn.Module], embed: str, first: torch.nn.Module, run: Callable[[], object]) -> tuple[dict, object]:
    """Runs and keeps the outputs of `modules`, and under the name `embed` the input of `first`."""
    kept, hooks = {}, []
    hooks.append(first.register_forward_pre_hook(lambda module, args: kept.__setitem__(embed, args[0].detach().clone())))
    for name, module in modules.items():
        hooks.append(module.register_forward_hook(lambda module, args, output, name=name: kept.__setitem__(
            name, (output[0] if isinstance(output, tuple) else output).detach().clone())))
    result = run()
    for hook in hooks:
        hook.remove()
    return kept, result
