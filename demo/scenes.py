"""Drawn scenes: up to three groups of equal shapes, each in its own quarter of the picture, and what can be said about them.

One scene in eight (by what its caption says) is held out, and so is one form of a request in eight.
"""

import itertools
import random
from dataclasses import dataclass

import numpy

import questions
import split

SIDE = 128
QUARTER = SIDE // 2

COLOURS = {
    "red": (215, 40, 40), "green": (40, 160, 60), "blue": (45, 80, 215), "yellow": (240, 205, 40),
    "purple": (140, 50, 170), "orange": (245, 130, 30), "black": (25, 25, 25), "pink": (245, 140, 190),
}
SHAPES = ["circle", "square", "triangle", "star", "cross", "diamond"]
SIZES = {"small": 7.0, "large": 13.0}
"""Half the width, in pixels."""
COUNTS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
PLACES = ["top left", "top right", "bottom left", "bottom right"]


@dataclass(frozen=True)
class Group:
    count: int
    size: str
    colour: str
    shape: str

    def __str__(self) -> str:
        if self.count == 1:
            return f"a {self.size} {self.colour} {self.shape}"
        return f"{COUNTS[self.count]} {self.size} {self.colour} {self.shape}{'es' if self.shape == 'cross' else 's'}"


@dataclass(frozen=True)
class Scene:
    groups: dict[int, Group]
    """Place (an index into `PLACES`) to what is there, in the order of the places."""

    @property
    def caption(self) -> str:
        parts = [f"{group} at the {PLACES[place]}" for place, group in self.groups.items()]
        text = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
        return text[0].upper() + text[1:] + "."

    @property
    def held_out(self) -> bool:
        return split.held_out(f"scene/{self.caption}")


REQUESTS = {
    "caption": [
        "Describe the picture.", "What is in the picture?", "What do you see?", "Describe this image.", "Write a caption.",
        "What does the picture show?", "Tell me what is in the image.", "Please describe the image.",
        "Give a caption for this picture.", "What can you see in this picture?", "What does this image show?",
        "Caption this image.",
    ],
    "place": [
        "What is at the {place}?", "What do you see at the {place}?", "Describe the {place}.", "What is drawn at the {place}?",
        "Tell me what is at the {place}.", "Which shapes are at the {place}?", "Look at the {place}. What is there?",
    ],
    "count": [
        "How many shapes are there?", "How many shapes do you see?", "Count the shapes.", "What is the number of shapes?",
        "How many shapes are in the picture?", "Tell me the number of shapes.",
    ],
}
SHARES = {"caption": 70, "place": 18, "count": 12}


def draw_scene(rng: random.Random, held_out: bool) -> Scene:
    while True:
        places = sorted(rng.sample(range(4), rng.randint(1, 3)))
        scene = Scene({place: Group(rng.randint(1, 3), rng.choice(list(SIZES)), rng.choice(list(COLOURS)), rng.choice(SHAPES))
                       for place in places})
        if scene.held_out == held_out:
            return scene


def request_held_out(request: str) -> bool:
    return split.held_out(f"request/{request}")


def question(scene: Scene, rng: random.Random, new_form: bool, kind: str | None = None) -> questions.Question:
    """A request about the scene and its answer; requests in new forms are never trained."""
    kind = kind or rng.choices(list(SHARES), SHARES.values())[0]
    request = rng.choice([text for text in REQUESTS[kind] if request_held_out(text) == new_form])
    if kind == "caption":
        return questions.Question(kind, request, scene.caption)
    if kind == "count":
        total = sum(group.count for group in scene.groups.values())
        answer = "There is one shape." if total == 1 else f"There are {COUNTS[total]} shapes."
        return questions.Question(kind, request, answer)
    place = rng.randrange(4)
    there = str(scene.groups[place]) if place in scene.groups else "nothing"
    return questions.Question(kind, request.format(place=PLACES[place]), there[0].upper() + there[1:] + ".")


def paint(scene: Scene, rng: random.Random) -> numpy.ndarray:
    """The scene as a picture of 128 x 128 RGB pixels: shapes at random spots of their quarters on a pale ground."""
    noise = numpy.random.default_rng(rng.getrandbits(64))
    picture = numpy.full((SIDE, SIDE, 3), [rng.randint(222, 255) for _ in range(3)], dtype=numpy.float32)
    for place, group in scene.groups.items():
        top, left = place // 2 * QUARTER, place % 2 * QUARTER
        radius = SIZES[group.size]
        colour = numpy.array(COLOURS[group.colour], dtype=numpy.float32) + noise.uniform(-12, 12, 3).astype(numpy.float32)
        for y, x in spots(group.count, radius, rng):
            stamp(picture, group.shape, top + y, left + x, radius * rng.uniform(0.92, 1.08), colour)
    picture += noise.normal(0.0, 2.0, picture.shape).astype(numpy.float32)
    return numpy.clip(numpy.round(picture), 0, 255).astype(numpy.uint8)


def spots(count: int, radius: float, rng: random.Random) -> list[tuple[float, float]]:
    """Centres inside a quarter: one anywhere, more each in a cell of its own."""
    if count == 1:
        return [(rng.uniform(radius + 2, QUARTER - radius - 2), rng.uniform(radius + 2, QUARTER - radius - 2))]
    half = QUARTER / 2
    cells = rng.sample(list(itertools.product((0, 1), repeat=2)), count)
    slack = half / 2 - radius - 1
    return [((row + 0.5) * half + rng.uniform(-slack, slack), (column + 0.5) * half + rng.uniform(-slack, slack))
            for row, column in cells]


def stamp(picture: numpy.ndarray, shape: str, y: float, x: float, radius: float, colour: numpy.ndarray) -> None:
    """Blend one shape in, with soft edges from 3 x 3 samples a pixel."""
    top, left, reach = int(y - radius) - 1, int(x - radius) - 1, int(2 * radius) + 4
    top, left = min(max(top, 0), SIDE - reach), min(max(left, 0), SIDE - reach)
    steps = (numpy.arange(3 * reach, dtype=numpy.float32) + 0.5) / 3
    v, u = (top + steps - y)[:, None] / radius, (left + steps - x)[None, :] / radius
    inside = INSIDE[shape](v, u).reshape(reach, 3, reach, 3).mean((1, 3))[..., None]
    region = picture[top:top + reach, left:left + reach]
    region += inside * (colour - region)


def in_star(v: numpy.ndarray, u: numpy.ndarray) -> numpy.ndarray:
    """Five points: a circle's radius that swings with the angle in straight lines."""
    angle = numpy.arctan2(u, -v) % (2 * numpy.pi / 5)
    angle = numpy.abs(angle - numpy.pi / 5)
    inner = 0.42
    # The edge from the outer point (at pi/5 from the middle of the sector) to the inner one (in its middle).
    edge = inner * numpy.sin(numpy.pi / 5) / (
        numpy.sin(angle) * (inner - numpy.cos(numpy.pi / 5)) + numpy.sin(numpy.pi / 5) * numpy.cos(angle))
    return numpy.hypot(v, u) <= edge * 1.08


INSIDE = {
    "circle": lambda v, u: v * v + u * u <= 1,
    "square": lambda v, u: numpy.maximum(abs(v), abs(u)) <= 0.88,
    "triangle": lambda v, u: (v <= 0.85) & (abs(u) * 1.7 <= (v + 1.0)),
    "star": in_star,
    "cross": lambda v, u: numpy.minimum(abs(v), abs(u)) + 0 * v * u <= 0.3 * (numpy.maximum(abs(v), abs(u)) <= 0.97),
    "diamond": lambda v, u: abs(v) + 1.35 * abs(u) <= 1.05,
}
