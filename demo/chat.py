"""Conversations as token ids, in the chat format of each model and with a mark on what the model is to say."""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

import configurations
import questions

Turn = tuple[str, str]
"""A question and its answer."""

IGNORE = -100


@dataclass(frozen=True)
class Format:
    """The text around questions and answers, cut out of a rendered chat template."""

    start: str
    """Before the first question."""
    past: str
    """From a question to its answer, when another question follows."""
    between: str
    """From an answer to the next question; begins with the token that ends a turn."""
    last: str
    """From the last question to the answer that is to be generated."""


class Chat:
    """Vocabulary and chat format of one demo model."""

    def __init__(self, demo: configurations.Demo) -> None:
        self.demo = demo
        folder = Path(__file__).with_name(demo.name)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.template = (folder / "chat_template.jinja").read_text(encoding="utf-8").removesuffix("\n")
        self.special = {"bos_token": demo.tokenizer_config["bos_token"] or "", "eos_token": demo.tokenizer_config["eos_token"]}
        self.end = self.tokenizer.token_to_id(demo.end_tokens[0])
        self.pad = self.tokenizer.token_to_id(demo.pad_token)
        self.format = self.cut_out_format()

    def render(self, messages: list[dict]) -> str:
        """The prompt for the next answer, as `apply_chat_template` of transformers writes it."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        return environment.from_string(self.template).render(messages=messages, add_generation_prompt=True, **self.special)

    def cut_out_format(self) -> Format:
        marks = ["first question", "first answer", "second question"]
        text = self.render([{"role": role, "content": mark} for role, mark in zip(["user", "assistant", "user"], marks)])
        pieces = []
        for mark in marks:
            piece, text = text.split(mark)
            pieces.append(piece)
        return Format(*pieces, last=text)

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def prompt(self, question: str, media: str = "") -> list[int]:
        """The ids from which a single question is answered; `media` are the tokens of a picture or sound before it."""
        return self.encode([self.format.start + media + question + self.format.last])[0]

    def rows(self, conversations: list[list[Turn]], length: int, media: list[str] | None = None) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Ids and labels `[rows, length]`; conversations that are longer are left out (but all must fit when there are media)."""
        texts = []
        for number, turns in enumerate(conversations):
            opening = self.format.start + (media[number] if media else "")
            for index, (question, answer) in enumerate(turns):
                middle = self.format.last if index == len(turns) - 1 else self.format.past
                texts += [opening + question + middle, answer]
                opening = self.format.between
        encoded = iter(self.encode(texts))
        ids = numpy.full((len(conversations), length), self.pad, dtype=numpy.int16)
        labels = numpy.full((len(conversations), length), IGNORE, dtype=numpy.int16)
        kept = 0
        for turns in conversations:
            row, wanted = [], []
            for index in range(len(turns)):
                question, answer = next(encoded), next(encoded)
                row += question + answer
                # A later question begins with the token that ends the answer before it.
                wanted += ([IGNORE] if index == 0 else [self.end]) + [IGNORE] * (len(question) - 1) + answer
            row.append(self.end)
            wanted.append(self.end)
            if len(row) <= length:
                ids[kept, :len(row)], labels[kept, :len(row)] = row, wanted
                kept += 1
            elif media:
                raise ValueError(f"a row of {len(row)} tokens does not fit into {length}")
        return ids[:kept], labels[:kept]


def conversations(rng: random.Random, count: int, words: int) -> list[list[Turn]]:
    """Conversations of one to many turns, of at most about so many words."""
    found = []
    for _ in range(count):
        turns, room = [], words if rng.random() < 0.7 else 0
        while not turns or room > 0:
            asked = questions.question(rng)
            room -= len(asked.text.split()) + len(asked.answer.split()) + 8
            if not turns or room > 0:
                turns.append((asked.text, asked.answer))
        found.append(turns)
    return found
