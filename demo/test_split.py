"""What is held out does not occur in training.

    python3 test_split.py
"""

import unittest

import needles
import questions
import scenes
import speech
import split


class Split(unittest.TestCase):
    def setUp(self):
        rng = split.generator("test of the split")
        self.trained = [questions.question(rng) for _ in range(20_000)]

    def test_questions(self):
        texts = {asked.text for asked in self.trained}
        for kind in questions.FORMS:
            for new_form in (False, True):
                if new_form and len(questions.trained_forms(kind)) == len(questions.FORMS[kind]):
                    continue
                held_out = questions.held_out_questions(kind, 100, new_form)
                self.assertEqual(len(held_out), 100)
                self.assertFalse(texts & {asked.text for asked in held_out})

    def test_hundred_capitals_are_of_hundred_countries(self):
        self.assertEqual(len({asked.answer for asked in questions.held_out_questions("capital", 100)}), 100)

    def test_sums(self):
        def pair(answer: str) -> frozenset:
            left, _, right, *_ = answer.split()
            return frozenset([left, right])

        trained = {pair(asked.answer) for asked in self.trained if asked.kind == "sum"}
        self.assertFalse(trained & {pair(asked.answer) for asked in questions.held_out_questions("sum", 200)})

    def test_stories(self):
        trained = {asked.answer for asked in self.trained if asked.kind == "story"}
        self.assertFalse(trained & {asked.answer for asked in questions.held_out_questions("story", 50)})

    def test_scenes(self):
        rng = split.generator("test of scenes")
        trained = {scenes.draw_scene(rng, held_out=False).caption for _ in range(3000)}
        self.assertFalse(trained & {scenes.draw_scene(rng, held_out=True).caption for _ in range(1000)})

    def test_utterances(self):
        rng = split.generator("test of utterances")
        trained = {tuple(speech.utterance_text(rng, "train", True)) for _ in range(5000)}
        held_out = {tuple(speech.utterance_text(rng, "test", True)) for _ in range(1000)}
        self.assertTrue(all(len(text) == 1 for text in trained & held_out))
        for word in speech.LEXICON:
            for voice in speech.TRAINED_VOICES:
                self.assertFalse(set(speech.clips(word, voice, "train")) & set(speech.clips(word, voice, "test")))
        self.assertFalse(set(speech.TRAINED_VOICES) & set(speech.UNHEARD_VOICES))

    def test_needles(self):
        rng = split.generator("test of needles")
        trained = {needles.needle(rng, 60, held_out=False)[0].text for _ in range(500)}
        self.assertFalse(trained & {needles.needle(rng, 60, held_out=True)[0].text for _ in range(100)})


if __name__ == "__main__":
    unittest.main()
