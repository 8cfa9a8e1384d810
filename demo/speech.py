"""Spoken digits and words: single clips made with espeak-ng, joined at random into utterances.

A clip is one word in one voice at one speed and pitch. For every word and voice, the clip whose hash is smallest is held out;
so is one in eight texts of two words or more, in all voices; and two voices are never trained on at all. A held-out utterance
has a held-out text and is joined from held-out clips only.

    python3 speech.py TRAIN.npz TEST.npz        makes all clips (needs the program espeak-ng; 1.51 was used)
"""

import itertools
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy

import split

RATE = 16_000
LONGEST = 76_800
"""Samples of the longest utterance: 4.8 seconds."""

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
WORDS = [
    "apple", "bird", "blue", "book", "bread", "cat", "chair", "cloud", "dog", "door", "fish", "flower", "garden", "green",
    "hello", "horse", "house", "lamp", "moon", "mountain", "music", "orange", "paper", "red", "river", "star", "sun", "table",
    "tree", "water", "window", "yellow",
]
LEXICON = DIGITS + WORDS

REQUESTS = [
    "What is said?", "Transcribe the recording.", "Write down what you hear.", "What do you hear?", "Transcribe this.",
    "Write down the words.", "Which words are spoken?", "Please transcribe the audio.", "What does the voice say?",
    "Transcribe the audio.", "What is being said?", "Listen and write it down.",
]

TRAINED_VOICES = [
    "en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp", "en-029", "en-us-nyc", "en-gb-x-gbclan", "en-gb-x-gbcwmd",
    "en-us+f1", "en-us+f2", "en-gb+f3", "en-us+f5", "en-us+m1", "en-us+m3", "en-gb+m4", "en-us+m6", "en-gb+m7",
    "en-us+Andy", "en-us+Annie", "en-gb+steph", "en-us+Michael", "en-gb+linda", "en-us+david", "en-gb+rob",
]
UNHEARD_VOICES = ["en-us+f4", "en-gb+Gene"]

SPEEDS = [130, 165, 200]
PITCHES = [30, 50, 70]


@dataclass(frozen=True)
class Clip:
    """What espeak-ng is asked to say."""

    word: str
    voice: str
    speed: int
    pitch: int

    @property
    def key(self) -> str:
        return f"{self.word}/{self.voice}/{self.speed}/{self.pitch}"


def clips(word: str, voice: str, purpose: str) -> list[Clip]:
    """The clips of a word in a voice for `train` or `test`."""
    settings = [Clip(word, voice, speed, pitch) for speed, pitch in itertools.product(SPEEDS, PITCHES)]
    settings.sort(key=lambda clip: split.number(clip.key))
    if voice in UNHEARD_VOICES:
        return settings[:2] if purpose == "test" else []
    return settings[:1] if purpose == "test" else settings[1:6] if word in DIGITS else settings[1:3]


def all_clips(purpose: str) -> list[Clip]:
    return [clip for word in LEXICON for voice in TRAINED_VOICES + UNHEARD_VOICES for clip in clips(word, voice, purpose)]


def speak(clip: Clip) -> numpy.ndarray:
    """The clip as espeak-ng says it, at 16 kHz, without the silence around it, at full scale."""
    command = ["espeak-ng", "-v", clip.voice, "-s", str(clip.speed), "-p", str(clip.pitch), "--stdout", clip.word]
    wav = subprocess.run(command, check=True, capture_output=True).stdout
    rate = int.from_bytes(wav[24:28], "little")
    samples = numpy.frombuffer(wav[44:], dtype="<i2").astype(numpy.float64)
    samples = resample(samples, rate)
    loud = numpy.flatnonzero(numpy.abs(samples) > 0.02 * numpy.abs(samples).max())
    samples = samples[max(loud[0] - 160, 0):loud[-1] + 480]
    return numpy.round(samples / numpy.abs(samples).max() * 32_000).astype(numpy.int16)


def resample(samples: numpy.ndarray, rate: int) -> numpy.ndarray:
    """To 16 kHz by cutting the spectrum; the clip starts and ends in silence, so its ends do not matter."""
    length = round(len(samples) * RATE / rate)
    spectrum = numpy.fft.rfft(samples)[:length // 2 + 1]
    return numpy.fft.irfft(spectrum, length) * length / len(samples)


def utterance_text(rng: random.Random, purpose: str, digits: bool) -> list[str]:
    """Words to say: a string of one to five digits, or one to three words; texts for `test` are held out."""
    while True:
        length = rng.randint(1, 5) if digits else rng.randint(1, 3)
        text = [rng.choice(DIGITS if digits else WORDS) for _ in range(length)]
        if length == 1 or split.held_out(" ".join(text)) == (purpose == "test"):
            return text


def request(rng: random.Random, new_form: bool) -> str:
    """What a listener is asked; new forms are never trained."""
    return rng.choice([text for text in REQUESTS if split.held_out(f"request/{text}") == new_form])


def transcript(text: list[str]) -> str:
    """How an utterance is written down: `Three one four.`"""
    return " ".join(text).capitalize() + "."


def join(parts: list[numpy.ndarray], rng: numpy.random.Generator) -> numpy.ndarray:
    """One utterance from clips: random gaps, gain and noise; 16-bit samples."""
    def silence(shortest: float, longest: float) -> numpy.ndarray:
        return numpy.zeros(int(rng.uniform(shortest, longest) * RATE))

    pieces = [silence(0.05, 0.3)]
    for part in parts:
        pieces += [part.astype(numpy.float64), silence(0.03, 0.25)]
    signal = numpy.concatenate(pieces + [silence(0.1, 0.25)])[:LONGEST]
    gain = 10 ** (rng.uniform(-14, -1) / 20)
    noise = 32_000 * 10 ** (rng.uniform(-50, -28) / 20)
    signal = gain * (signal + noise * rng.standard_normal(len(signal)))
    return numpy.clip(numpy.round(signal), -32_768, 32_767).astype(numpy.int16)


def utterance(key: str, spoken: "Clips", purpose: str, digits: bool, voices: list[str]) -> tuple[list[str], str, numpy.ndarray]:
    """The words, the voice and the samples of the utterance number `key`; every clip has its own speed and pitch."""
    rng = split.generator("utterance", purpose, key)
    text = utterance_text(rng, purpose, digits)
    voice = rng.choice(voices)
    parts = [spoken[rng.choice(clips(word, voice, purpose))] for word in text]
    return text, voice, join(parts, numpy.random.default_rng(rng.getrandbits(64)))


class Clips:
    """Clips in one file: all samples in a row, and where each clip starts."""

    def __init__(self, path: str) -> None:
        stored = numpy.load(path)
        self.samples, starts = stored["samples"], stored["starts"]
        self.range = {key: (start, end) for key, start, end in zip(stored["keys"].tolist(), starts, starts[1:])}

    def __getitem__(self, clip: Clip) -> numpy.ndarray:
        start, end = self.range[clip.key]
        return self.samples[start:end]

    @staticmethod
    def write(path: str, wanted: list[Clip]) -> None:
        with ThreadPoolExecutor(4) as pool:
            spoken = list(pool.map(speak, wanted))
        starts = numpy.cumsum([0] + [len(samples) for samples in spoken])
        numpy.savez(path, samples=numpy.concatenate(spoken), starts=starts, keys=numpy.array([clip.key for clip in wanted]))


if __name__ == "__main__":
    train_path, test_path = sys.argv[1:]
    Clips.write(train_path, all_clips("train"))
    Clips.write(test_path, all_clips("test"))
