"""The training and test sets of each model, as arrays of token ids with their pictures or sounds."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy

import chat
import configurations
import features
import needles
import questions
import scenes
import speech
import split

SHORT, LONG = 128, 704
"""Tokens of a row: a few questions; a long conversation or a needle prompt."""


@dataclass
class Rows:
    """Rows of equal length; `media` are further arrays with one entry a row."""

    ids: numpy.ndarray
    labels: numpy.ndarray
    media: dict[str, numpy.ndarray] = field(default_factory=dict)


def text(talk: chat.Chat, count: int, words: int, length: int = SHORT) -> Rows:
    """Conversations of training."""
    return joined(partial(some_text, talk.demo.name, words, length), count)


def some_text(name: str, words: int, length: int, part: int, count: int) -> Rows:
    talk = chat.Chat(configurations.find(name))
    return Rows(*talk.rows(chat.conversations(split.generator("conversations", length, part), count, words), length))


def text_test(talk: chat.Chat, kind: str, count: int, new_form: bool = False) -> Rows:
    return Rows(*talk.rows([[(asked.text, asked.answer)] for asked in questions.held_out_questions(kind, count, new_form)], SHORT))


def needle_prompts(talk: chat.Chat, count: int, held_out: bool, words: tuple[int, int], length: int, most: int = 6) -> Rows:
    """Texts of so many words with two codes or more, or with just one."""
    return joined(partial(some_needles, talk.demo.name, held_out, words, length, most), count)


def some_needles(name: str, held_out: bool, words: tuple[int, int], length: int, most: int, part: int, count: int) -> Rows:
    rng = split.generator("needles", held_out, length, part)
    found = [needles.needle(rng, rng.randint(*words), held_out, most) for _ in range(count)]
    talk = chat.Chat(configurations.find(name))
    return Rows(*talk.rows([[(asked.text, asked.answer) for asked in asked_for] for asked_for in found], length))


def repetitions(talk: chat.Chat, count: int) -> Rows:
    return joined(partial(some_repetitions, talk.demo.name), count)


def some_repetitions(name: str, part: int, count: int) -> Rows:
    rng = split.generator("repetitions", part)
    found = [needles.repetition(rng) for _ in range(count)]
    return Rows(*chat.Chat(configurations.find(name)).rows([[(asked.text, asked.answer)] for asked in found], SHORT))


def pictures(talk: chat.Chat, count: int, before: str, purpose: str, kind: str | None = None, new_form: bool = False,
             length: int = SHORT) -> Rows:
    """Scenes with one question each; `before` are the tokens of a picture."""
    return joined(partial(some_pictures, talk.demo.name, before, purpose, kind, new_form, length), count)


def some_pictures(name: str, before: str, purpose: str, kind: str | None, new_form: bool, length: int, part: int, count: int) -> Rows:
    asked, drawn, contents = [], [], []
    for number in range(count):
        rng = split.generator("picture", purpose, part, number)
        scene = scenes.draw_scene(rng, held_out=purpose == "test")
        one = scenes.question(scene, rng, new_form, kind)
        asked.append((one.text if new_form else questions.dress(rng, one.text, purpose == "test"), one.answer))
        drawn.append(scenes.paint(scene, rng))
        contents.append(features.scene_labels(scene))
    talk = chat.Chat(configurations.find(name))
    ids, labels = talk.rows([[turn] for turn in asked], length, media=[before] * count)
    return Rows(ids, labels, {"pictures": numpy.stack(drawn), "contents": numpy.array(contents)})


def sounds(talk: chat.Chat, clips: str, count: int, purpose: str, voices: list[str], digits_share: float, length: int) -> Rows:
    """Utterances with the request to write them down; `clips` is the file of their clips."""
    return joined(partial(some_sounds, talk.demo.name, clips, purpose, voices, digits_share, length), count)


def some_sounds(name: str, clips: str, purpose: str, voices: list[str], digits_share: float, length: int, part: int, count: int) -> Rows:
    spoken = speech.Clips(clips)
    turns, media = [], []
    waves = numpy.zeros((count, speech.LONGEST), dtype=numpy.int16)
    words = numpy.full((count, 5), -1)
    lengths = numpy.zeros(count, dtype=numpy.int64)
    for number in range(count):
        key = f"{part}/{number}"
        rng = split.generator("sound", purpose, key)
        said, _, wave = speech.utterance(key, spoken, purpose, rng.random() < digits_share, voices)
        waves[number, :len(wave)], lengths[number] = wave, len(wave)
        words[number, :len(said)] = [speech.LEXICON.index(word) for word in said]
        media.append("<|audio>" + "<|audio|>" * features.soft_tokens(len(wave)) + "<audio|>")
        request = questions.dress(rng, speech.request(rng, new_form=False), purpose == "test")
        turns.append([(request, speech.transcript(said))])
    talk = chat.Chat(configurations.find(name))
    ids, labels = talk.rows(turns, length, media)
    return Rows(ids, labels, {"samples": waves, "lengths": lengths, "words": words})


def joined(make: Callable[[int, int], Rows], count: int, part: int = 500) -> Rows:
    """`count` rows, made in parts by several processes; a part depends on its number alone."""
    sizes = [min(part, count - start) for start in range(0, count, part)]
    with ProcessPoolExecutor() as pool:
        parts = list(pool.map(make, range(len(sizes)), sizes))
    return Rows(
        numpy.concatenate([rows.ids for rows in parts]), numpy.concatenate([rows.labels for rows in parts]),
        {name: numpy.concatenate([rows.media[name] for rows in parts]) for name in parts[0].media})
