"""The text from which the vocabularies are learned: everything that can be said in training, once or a few times."""

import re

import needles
import questions
import scenes
import speech
import split


def sentences() -> list[str]:
    """Numbers are left out and marks stand apart, so that digits and marks become tokens of their own."""
    found = []
    for country in questions.COUNTRIES:
        fields = questions.country_fields(country)
        found += [questions.ANSWERS[kind].format(**fields) for kind in ("capital", "country", "region", "continent")] * 3
    blank = {"name": "", "title": "", "capital": "", "left": "", "right": "", "subjects": ""}
    for forms in questions.FORMS.values():
        found += [" ".join(form.format(**blank).split()) for form in forms] * 12
    found += (questions.OPENINGS + questions.CLOSINGS) * 40
    for texts, answer in questions.TALK:
        found += texts * 8 + [answer] * 24
    for number, animal in enumerate(questions.ANIMALS):
        for thing in questions.THINGS[number % 4::4]:
            found += [questions.story(animal, thing)] * 3
    rng = split.generator("corpus")
    for _ in range(200):
        scene = scenes.draw_scene(rng, held_out=False)
        found += [scene.caption, scenes.question(scene, rng, new_form=False).text, scenes.question(scene, rng, new_form=False).answer]
    found += speech.REQUESTS * 12 + [" ".join(speech.LEXICON)] * 20
    names = needles.OWNERS + ["Anna", "Boris", "Carla", "David", "Emma", "Frank", "Gina", "Hugo"]
    words = needles.PASSWORDS + ["silver", "copper"]
    found += [f"The password of {name} is {word}." for name, word in zip(names, words)] * 4
    found += [f"What is the password of {name}? {word.capitalize()}." for name, word in zip(names, words[16:])] * 2
    found += ["system user assistant model thought"] * 40
    return [" ".join(re.sub(r"([.,:?!])", r" \1", sentence).split()) for sentence in found]
