"""Needle recall: a long text with a few codes strewn in, and questions for them; and, to learn copying, words to repeat.

Fillers are facts about countries and sentences of stories. One text in eight is held out.
"""

import random

import questions
import split

OWNERS = [animal[1] for animal in questions.ANIMALS]
PASSWORDS = [thing[0].split(" ")[1] for thing in questions.THINGS] + [
    "apple", "bird", "bread", "chair", "cloud", "door", "fish", "flower", "garden", "house", "lamp", "moon", "mountain",
    "music", "orange", "paper", "river", "star", "table", "tree", "water", "window",
]


def needle(rng: random.Random, words: int, held_out: bool, most: int = 6) -> list[questions.Question]:
    """A text of about so many words with some codes (at most so many), and questions for up to four of them.

    The first question follows right behind the text; a held-out text has this one only.
    """
    while True:
        count = rng.randint(min(2, most), most)
        pairs = list(zip(rng.sample(OWNERS, count), rng.sample(PASSWORDS, count)))
        sentences = filler(rng, words - 5 * count)
        for owner, password in pairs:
            sentences.insert(rng.randint(0, len(sentences)), f"The code is {owner} {password}.")
        text = " ".join(sentences)
        if split.held_out(f"needle/{text}") == held_out:
            break
    asked = [questions.Question("needle", f"Which code begins with {owner}?", f"The code is {owner} {password}.")
             for owner, password in pairs[:1 if held_out else 4]]
    first = questions.Question("needle", text + " " + asked[0].text, asked[0].answer)
    return [first] + asked[1:]


def filler(rng: random.Random, words: int) -> list[str]:
    """Sentences of about so many words in all."""
    sentences = []
    while words > 0:
        country = questions.country_fields(rng.choice(questions.COUNTRIES))
        animal, thing = rng.choice(questions.ANIMALS), rng.choice(questions.THINGS)
        sentence = rng.choice([
            questions.ANSWERS["capital"].format(**country), questions.ANSWERS["region"].format(**country),
            questions.ANSWERS["country"].format(**country), thing[2], f"Once there was {animal[0]}, who lived {animal[3]}.",
            f"{thing[1]}, all the neighbours went for a walk.",
        ])
        sentences.append(sentence)
        words -= len(sentence.split())
    return sentences


def repetition(rng: random.Random) -> questions.Question:
    """Words to say again; the more of them, the more often some occur twice."""
    words = [rng.choice(OWNERS + PASSWORDS) for _ in range(rng.randint(4, 36))]
    return questions.Question("repeat", "Repeat: " + " ".join(words) + ".", " ".join(words) + ".")
