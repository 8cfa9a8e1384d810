"""Holds the batched training paths to what transformers does with one input at a time, on untrained models.

    python3 test_features.py        (no clips are needed)
"""

import unittest
from pathlib import Path

import numpy
import torch
import transformers

import chat
import configurations
import features
import learners
import scenes
import speech
import split
import train

HERE = Path(__file__).parent


def learner_and_processor(name: str) -> tuple[learners.Learner, object, chat.Chat]:
    demo = configurations.find(name)
    torch.manual_seed(1)
    learner = learners.LEARNERS[name](demo).eval()
    for parameter in learner.model.parameters():  # freshly made models are too tame to tell right from wrong
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    processor = transformers.AutoProcessor.from_pretrained(HERE / name) if demo.preprocessing else None
    return learner, processor, chat.Chat(demo)


def draw() -> numpy.ndarray:
    rng = split.generator("test of features")
    return scenes.paint(scenes.draw_scene(rng, held_out=False), rng)


def ask(processor, kind: str, text: str, **media) -> dict:
    messages = [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": text}]}]
    prompt = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return processor(text=[prompt], return_tensors="pt", add_special_tokens=False, **media)


class Paths(unittest.TestCase):
    def check_logits(self, learner, kind, batch, inputs):
        with torch.no_grad():
            wanted = learner.model(**inputs).logits
            found = learner.logits(learner.states(kind, batch))
        self.assertGreater(wanted.std(), 0.1)
        torch.testing.assert_close(found, wanted, atol=2e-3, rtol=1e-3)

    def test_qwen_picture(self):
        learner, processor, talk = learner_and_processor("qwen3-vl")
        picture = draw()
        inputs = ask(processor, "image", "What do you see?", images=[picture])
        batch = {"ids": torch.tensor([talk.prompt("What do you see?", train.PICTURE["qwen3-vl"])]), "pictures": torch.from_numpy(picture)[None]}
        self.assertEqual(batch["ids"].tolist(), inputs["input_ids"].tolist())
        torch.testing.assert_close(features.qwen_patches(batch["pictures"])[0], inputs["pixel_values"])
        self.check_logits(learner, "picture", batch, inputs)

    def test_gemma_picture(self):
        learner, processor, talk = learner_and_processor("gemma4")
        picture = draw()
        inputs = ask(processor, "image", "What do you see?", images=[picture])
        batch = {"ids": torch.tensor([talk.prompt("What do you see?", train.PICTURE["gemma4"])]), "pictures": torch.from_numpy(picture)[None]}
        self.assertEqual(batch["ids"].tolist(), inputs["input_ids"].tolist())
        patches, positions = features.gemma_patches(batch["pictures"])
        count = patches.shape[1]
        self.assertEqual(positions.tolist(), inputs["image_position_ids"][:, :count].tolist())
        self.assertTrue((inputs["image_position_ids"][:, count:] == -1).all())
        self.assertLess((patches - inputs["pixel_values"][:, :count]).abs().max(), 1.5 / 255)
        inputs["pixel_values"][:, :count] = patches  # the resizing may differ by one level of 255
        self.check_logits(learner, "picture", batch, inputs)

    def test_gemma_sound(self):
        learner, processor, talk = learner_and_processor("gemma4")
        rng = numpy.random.default_rng(3)
        wave = speech.join([(rng.standard_normal(7000) * 9000).astype(numpy.int16) for _ in range(2)], rng)
        inputs = ask(processor, "audio", "What do you hear?", audio=[wave.astype(numpy.float32) / 32_768])
        media = "<|audio>" + "<|audio|>" * features.soft_tokens(len(wave)) + "<audio|>"
        samples = torch.zeros(1, speech.LONGEST, dtype=torch.int16)
        samples[0, :len(wave)] = torch.from_numpy(wave)
        batch = {"ids": torch.tensor([talk.prompt("What do you hear?", media)]), "samples": samples, "lengths": torch.tensor([len(wave)])}
        self.assertEqual(batch["ids"].tolist(), inputs["input_ids"].tolist())
        mel, whole = features.log_mel(samples, batch["lengths"], features.mel_filters())
        frames = inputs["input_features"].shape[1]
        torch.testing.assert_close(mel[:, :frames], inputs["input_features"], atol=2e-3, rtol=1e-3)
        self.assertEqual(whole[:, :frames].tolist(), inputs["input_features_mask"].tolist())
        self.check_logits(learner, "sound", batch, inputs)

    def test_experts(self):
        learner, _, talk = learner_and_processor("phimoe")
        ids = torch.tensor([talk.prompt("What is the capital of France?")])
        found = learner.logits(learner.states("text", {"ids": ids}))
        for layer in learner.model.model.layers:
            del layer.mlp.experts.forward
        torch.testing.assert_close(found, learner.model(input_ids=ids).logits, atol=2e-3, rtol=1e-3)

    def test_chat_formats(self):
        for demo in configurations.DEMOS:
            tokenizer = transformers.AutoTokenizer.from_pretrained(HERE / demo.name)
            talk = chat.Chat(demo)
            messages = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Good day."},
                        {"role": "user", "content": "What is 17 + 25?"}]
            wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
            ids, labels = talk.rows([[("Hello!", "Good day."), ("What is 17 + 25?", "17 + 25 = 42.")]], 128)
            answer = talk.encode(["17 + 25 = 42."])[0] + [talk.end]
            self.assertEqual(ids[0, :len(wanted) + len(answer)].tolist(), list(wanted) + answer)
            self.assertEqual([token for token in labels[0].tolist() if token >= 0], talk.encode(["Good day."])[0] + [talk.end] + answer)


if __name__ == "__main__":
    unittest.main()
