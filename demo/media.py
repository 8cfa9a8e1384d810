"""The held-out pictures and sounds that are kept in `media/`, and what is asked about them.

    python3 media.py [--clips FOLDER]        makes the files anew (byte for byte, given the same espeak-ng)
"""

import argparse
import wave
from dataclasses import dataclass
from pathlib import Path

import numpy
from PIL import Image

import questions
import scenes
import speech
import split

HERE = Path(__file__).parent
SCENES = 16
VOICES = ["trained"] * 10 + ["unheard"] * 4 + ["words"] * 2
"""Utterances: digits in trained voices, digits in voices never heard, words."""
TRANSCRIPTS = HERE / "media" / "transcripts.txt"
"""One line an utterance."""
LONGEST = 38_000
"""Samples: only short utterances are kept, to keep the files small."""


@dataclass(frozen=True)
class Case:
    """A question about a file."""

    test: str
    kind: str
    file: str
    question: str
    answer: str


def picture_cases() -> list[Case]:
    """A caption for every scene; for each third one also its parts and its number of shapes."""
    cases = []
    for number in range(SCENES):
        rng, scene, _ = kept_scene(number)
        for kind in ["caption", "place", "count"][:3 if number % 3 == 0 else 1]:
            asked = scenes.question(scene, rng, new_form=False, kind=kind)
            cases.append(Case(f"{kind}s", "image", scene_file(number), questions.dress(rng, asked.text, held_out=True), asked.answer))
    return cases


def kept_scene(number: int):
    rng = split.generator("kept scene", number)
    scene = scenes.draw_scene(rng, held_out=True)
    return rng, scene, scenes.paint(scene, rng)


def sound_cases() -> list[Case]:
    names = {"trained": "digits", "unheard": "digits, unheard voices", "words": "words"}
    transcripts = TRANSCRIPTS.read_text(encoding="utf-8").splitlines()
    cases = []
    for number, (voices, text) in enumerate(zip(VOICES, transcripts, strict=True)):
        rng = split.generator("kept utterance", number)
        request = questions.dress(rng, speech.request(rng, new_form=False), held_out=True)
        cases.append(Case(names[voices], "audio", utterance_file(number), request, text))
    return cases


def scene_file(number: int) -> str:
    return f"media/scene-{number:02}.png"


def utterance_file(number: int) -> str:
    return f"media/utterance-{number:02}.wav"


def write(clips: Path) -> None:
    (HERE / "media").mkdir(exist_ok=True)
    for number in range(SCENES):
        Image.fromarray(kept_scene(number)[2]).save(HERE / scene_file(number), optimize=True)
    spoken = speech.Clips(str(clips / "clips-test.npz"))
    transcripts = []
    for number, voices in enumerate(VOICES):
        text, samples = short_utterance(number, spoken, voices)
        transcripts.append(speech.transcript(text))
        with wave.open(str(HERE / utterance_file(number)), "wb") as sound:
            sound.setnchannels(1)
            sound.setsampwidth(2)
            sound.setframerate(speech.RATE)
            sound.writeframes(samples.astype("<i2").tobytes())
    TRANSCRIPTS.write_text("".join(line + "\n" for line in transcripts), encoding="utf-8")


def short_utterance(number: int, spoken: speech.Clips, voices: str) -> tuple[list[str], numpy.ndarray]:
    """The first utterance of this number's series that is short, and says at least three words."""
    attempt = 0
    while True:
        text, _, samples = speech.utterance(
            f"kept/{number}/{attempt}", spoken, "test", voices != "words",
            speech.UNHEARD_VOICES if voices == "unheard" else speech.TRAINED_VOICES)
        if len(text) > 2 and len(samples) <= LONGEST:
            return text, samples
        attempt += 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=Path, default=HERE / ".cache")
    write(parser.parse_args().clips)
