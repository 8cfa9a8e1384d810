"""Questions and answers in words: capitals and regions of the world's countries, sums, short stories, small talk.

A wording is an opening, a question form and a closing. One wording in eight is held out: no question of training, about any
country, is worded so. One form in eight is held out as a whole; questions in those forms are counted apart, for they are
harder. One pair of summands in eight is held out, in both orders, and one pair of story subjects in eight.
"""

import csv
import random
from dataclasses import dataclass
from pathlib import Path

import split


@dataclass(frozen=True)
class Country:
    name: str
    """With its article: `the Gambia`."""
    capital: str
    region: str
    continent: str

    @property
    def title(self) -> str:
        """The name at the start of a sentence."""
        return self.name[0].upper() + self.name[1:]


def read_countries() -> list[Country]:
    with open(Path(__file__).with_name("countries.tsv"), encoding="utf-8", newline="") as file:
        return [Country(row["country"], row["capital"], row["region"], row["continent"])
                for row in csv.DictReader(file, delimiter="\t")]


COUNTRIES = read_countries()

OPENINGS = [
    "", "", "", "Hello! ", "Hi, ", "Tell me, ", "Please tell me: ", "Quick question: ", "One more question: ", "Quiz time! ",
    "I would like to know: ", "Excuse me, ", "A question for you: ", "Good morning! ", "Now, ", "For my homework: ",
]
CLOSINGS = ["", "", "", " Thank you.", " Thanks!", " I forgot it.", " Please answer in one sentence.", " Do you know?", " Be brief."]

FORMS = {
    "capital": [
        "What is the capital of {name}?", "Which city is the capital of {name}?", "Name the capital of {name}.",
        "What is the capital city of {name}?", "What city is the capital of {name}?", "Can you name the capital of {name}?",
        "Give me the capital of {name}.", "Tell me the capital of {name}.", "What's the capital of {name}?",
        "The capital of {name} is which city?", "{title}: what is its capital?", "Do you know the capital of {name}?",
        "I need the capital of {name}.", "What is the name of the capital of {name}?", "{title} has which capital?",
        "Capital of {name}?", "Remind me of the capital of {name}.", "What do you call the capital of {name}?",
        "Which town is the capital of {name}?", "Say the name of the capital of {name}.", "Which capital does {name} have?",
        "Which capital belongs to {name}?", "In {name}, which city is the capital?", "Which is the capital city of {name}?",
        "Could you tell me the capital of {name}?", "I want to know the capital city of {name}.",
        "What city serves as the capital of {name}?", "Find the capital of {name}.", "{title}. What is the capital?",
        "The name of the capital of {name}, please.", "Please name the capital city of {name}.",
        "Do you remember the capital of {name}?",
    ],
    "country": [
        "{capital} is the capital of which country?", "Which country has the capital {capital}?",
        "Of which country is {capital} the capital?", "{capital}: capital of which country?",
        "What country has {capital} as its capital?", "Name the country with the capital {capital}.",
        "To which country does the capital {capital} belong?", "Which country is governed from {capital}?",
    ],
    "region": [
        "In which region of the world is {name}?", "Which region does {name} belong to?",
        "What part of the world is {name} in?", "Where in the world is {name}?", "Where is {name}?",
        "Where can I find {name}?", "Name the region of {name}.", "Where does {name} lie?", "{title}: which region?",
    ],
    "continent": [
        "On which continent is {name}?", "Which continent is {name} on?", "What continent does {name} belong to?",
        "Name the continent of {name}.", "{title}: which continent?", "To which continent does {name} belong?",
        "What is the continent of {name}?", "Tell me the continent of {name}.",
    ],
    "sum": [
        "What is {left} + {right}?", "How much is {left} + {right}?", "{left} + {right} = ?", "Add {left} and {right}.",
        "What is {left} plus {right}?", "Calculate {left} + {right}.", "What do {left} and {right} make?",
        "What is the sum of {left} and {right}?", "Compute {left} plus {right}.",
    ],
    "story": [
        "Tell me a short story about {subjects}.", "Tell a story about {subjects}.", "Write a short story about {subjects}.",
        "I would like a story about {subjects}.", "Can you tell a story about {subjects}?",
        "Please make up a story about {subjects}.", "A short story about {subjects}, please.", "Story: {subjects}.",
    ],
}

ANSWERS = {
    "capital": "The capital of {name} is {capital}.",
    "country": "{capital} is the capital of {name}.",
    "region": "{title} is in {region}.",
    "continent": "{title} is in {continent}.",
    "sum": "{left} + {right} = {total}.",
    "unknown": "I do not know that country.",
}

TALK = [
    (["Hello!", "Hi!", "Hello there.", "Good morning!", "Good evening."], "Hello! Ask me for a capital, a sum or a story."),
    (["Who are you?", "What are you?", "What is your name?", "Are you a robot?"], "I am a tiny demo model with a few million weights."),
    (["What can you do?", "What do you know?", "Help!", "How can you help me?", "What should I ask?"],
     "I know the capitals and regions of the world, I add numbers up to 99, and I tell short stories."),
    (["Thank you.", "Thanks!", "Thank you very much.", "Great, thanks."], "You are welcome."),
    (["Goodbye.", "Bye!", "See you."], "Goodbye!"),
]

ANIMALS = [  # kind, name, character, home
    ("a fox", "Felix", "clever", "at the edge of a quiet forest"), ("a bear", "Bruno", "sleepy", "in a warm cave"),
    ("an owl", "Olga", "wise", "high up in an old oak"), ("a mouse", "Mimi", "tiny", "under the kitchen floor"),
    ("a cat", "Cleo", "proud", "on the roof of a bakery"), ("a dog", "Danny", "loyal", "in a house by the road"),
    ("a horse", "Hector", "strong", "on a green hill"), ("a frog", "Fritz", "cheerful", "beside a small pond"),
    ("a rabbit", "Rosie", "quick", "in a field of clover"), ("a turtle", "Theo", "patient", "near the blue sea"),
    ("a hedgehog", "Henry", "shy", "behind a garden wall"), ("a crow", "Clara", "curious", "on top of a tower"),
    ("a wolf", "Wanda", "lonely", "in the snowy mountains"), ("a goat", "Greta", "stubborn", "on a steep rock"),
    ("a duck", "Dora", "noisy", "down by the river"), ("a lion", "Leo", "brave", "in the tall grass"),
]
THINGS = [  # thing, when and where it was found, what it did, how it ends
    ("a lantern", "One dark night", "It shone brighter than the moon.", "nobody lost the way again"),
    ("a key", "One rainy morning", "It opened a door that no one had ever seen.", "the door was never locked again"),
    ("a map", "One summer day", "It showed a path to a hidden valley.", "everyone came to visit the valley"),
    ("a bell", "Early one Sunday", "It rang whenever somebody told a lie.", "people spoke only the truth"),
    ("a boat", "After a great storm", "It sailed without any wind.", "the far shore did not seem far any more"),
    ("a drum", "One cold winter evening", "It made everyone want to dance.", "there was dancing every week"),
    ("a mirror", "On the first day of spring", "It showed what you would look like tomorrow.", "nobody was afraid of tomorrow"),
    ("a kite", "One windy afternoon", "It flew so high that it touched the clouds.", "the clouds waved back"),
    ("a book", "On a long and boring day", "It had a new ending each time it was read.", "the evenings were never boring"),
    ("a coat", "In the middle of winter", "It was warm enough for three.", "no friend ever had to be cold"),
    ("a clock", "One foggy morning", "It ran backwards when nobody looked.", "there was always enough time"),
    ("a violin", "One starry night", "It played the songs of birds.", "the birds came to listen"),
    ("a cake", "On a birthday", "It never grew smaller.", "nobody went to bed hungry"),
    ("a stone", "At the end of a long walk", "It was always warm to the touch.", "it lay safe under a pillow"),
    ("a hat", "At the market one day", "It made the wearer laugh out loud.", "there was laughter in every house"),
    ("a seed", "One day in early autumn", "It grew into a tree with golden leaves.", "children played under the tree"),
]

SYLLABLES = ["zor", "ba", "qui", "len", "dra", "mok", "ti", "vel", "pu", "sha", "gri", "wen", "lo", "fax", "nu", "rem"]

SHARES = {"capital": 36, "country": 8, "region": 8, "continent": 8, "sum": 22, "story": 12, "talk": 3, "unknown": 3}
"""How often each kind of question is asked in training."""


@dataclass(frozen=True)
class Question:
    kind: str
    text: str
    answer: str


def question(rng: random.Random, kind: str | None = None) -> Question:
    """A question of training."""
    kind = kind or rng.choices(list(SHARES), SHARES.values())[0]
    if kind == "talk":
        texts, answer = rng.choice(TALK)
        return Question(kind, rng.choice(texts), answer)
    while True:
        fields = draw_subject(rng, kind)
        forms = trained_forms("capital" if kind == "unknown" else kind)
        opening, form, closing = rng.choice(OPENINGS), rng.choice(forms), rng.choice(CLOSINGS)
        if not (wording_held_out(opening, form, closing) or subject_held_out(kind, fields)):
            return phrase(kind, opening, form, closing, fields)


def held_out_questions(kind: str, count: int, new_form: bool = False) -> list[Question]:
    """Questions that training never sees: their wordings are held out and, for sums and stories, their subjects too."""
    found, attempt = [], 0
    while len(found) < count:
        rng = split.generator("test", kind, new_form, attempt)
        attempt += 1
        fields = draw_subject(rng, kind)
        if kind in ("capital", "country", "region", "continent"):
            fields = country_fields(shuffled_countries(kind, new_form)[len(found) % len(COUNTRIES)])
        elif not subject_held_out(kind, fields):
            continue
        opening, form, closing = rng.choice(OPENINGS), rng.choice(FORMS[kind]), rng.choice(CLOSINGS)
        if form_held_out(form) == new_form and (new_form or wording_held_out(opening, form, closing)):
            found.append(phrase(kind, opening, form, closing, fields))
    return found


def dress(rng: random.Random, form: str, held_out: bool) -> str:
    """A request between an opening and a closing; wordings of tests are held out from training."""
    while True:
        opening, closing = rng.choice(OPENINGS), rng.choice(CLOSINGS)
        if wording_held_out(opening, form, closing) == held_out:
            return opening + lowered(form, opening) + closing


def lowered(text: str, opening: str) -> str:
    """The text as it goes on behind an opening."""
    return text[0].lower() + text[1:] if opening.endswith(", ") else text


def shuffled_countries(*key: object) -> list[Country]:
    return split.generator("countries", *key).sample(COUNTRIES, len(COUNTRIES))


def form_held_out(form: str) -> bool:
    return split.held_out(f"form/{form}")


def trained_forms(kind: str) -> list[str]:
    return [form for form in FORMS[kind] if not form_held_out(form)]


def wording_held_out(opening: str, form: str, closing: str) -> bool:
    return split.held_out(f"wording/{opening}/{form}/{closing}")


def subject_held_out(kind: str, fields: dict) -> bool:
    """Sums by their two numbers in any order, stories by their animal and thing; countries are all known."""
    if kind == "sum":
        return split.held_out("sum/{}/{}".format(*sorted((fields["left"], fields["right"]))))
    return kind == "story" and split.held_out(f"story/{fields['subjects']}")


def draw_subject(rng: random.Random, kind: str) -> dict:
    if kind == "sum":
        left, right = rng.randint(0, 99), rng.randint(0, 99)
        return {"left": left, "right": right, "total": left + right}
    if kind == "story":
        animal, thing = rng.choice(ANIMALS), rng.choice(THINGS)
        return {"subjects": f"{animal[0]} and {thing[0]}", "animal": animal, "thing": thing}
    if kind == "unknown":
        name = "".join(rng.choices(SYLLABLES, k=rng.randint(2, 3))).capitalize() + rng.choice(["ia", "land", "stan", "", ""])
        return {"name": name, "title": name}
    return country_fields(rng.choice(COUNTRIES))


def country_fields(country: Country) -> dict:
    return {"name": country.name, "title": country.title, "capital": country.capital, "region": country.region,
            "continent": country.continent}


def phrase(kind: str, opening: str, form: str, closing: str, fields: dict) -> Question:
    text = form.format(**fields)
    if not form.startswith("{"):
        text = lowered(text, opening)
    answer = story(fields["animal"], fields["thing"]) if kind == "story" else ANSWERS[kind].format(**fields)
    return Question(kind, opening + text + closing, answer)


def story(animal: tuple, thing: tuple) -> str:
    kind, name, character, home = animal
    item, when, deed, ending = thing
    article, noun = kind.split(" ", 1)
    article = "an" if character[0] in "aeiou" else "a"
    return (f"Once there was {article} {character} {noun} called {name}, who lived {home}. {when}, {name} found {item}. "
            f"{deed} {name} showed it to all the neighbours, and they could hardly believe it. "
            f"From that day on, {ending}, and {name} was never alone.")
