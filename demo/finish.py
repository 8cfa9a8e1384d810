"""Makes the checkpoint of a demo model from the weights that `train.py` wrote: names and file as transformers saves them, f16.

    python3 finish.py NAME WEIGHTS.safetensors [--clips FOLDER]

The towers of Gemma 4 have bounds around their linear layers; they are set here, a quarter wider than what training data reach.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

import chat
import configurations
import learners
import lessons
import speech
import train

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[demo.name for demo in configurations.DEMOS])
    parser.add_argument("weights", type=Path)
    parser.add_argument("--clips", type=Path, default=HERE / ".cache")
    options = parser.parse_args()
    demo = configurations.find(options.name)
    learner = learners.LEARNERS[demo.name](demo).eval()
    missing, unknown = learner.model.load_state_dict(load_file(options.weights), strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unknown, (missing, unknown)
    learner.model.tie_weights()
    if demo.name == "gemma4":
        set_bounds(learner, options.clips)
    with tempfile.TemporaryDirectory() as scratch:
        learner.model.half().save_pretrained(scratch)
        shutil.copy(Path(scratch) / "model.safetensors", HERE / demo.name / "model.safetensors")
    check(demo, learner)


@torch.no_grad()
def set_bounds(learner: learners.GemmaLearner, clips: Path) -> None:
    """Run some training data through both towers and note the extremes at each bounded layer."""
    talk = chat.Chat(configurations.find("gemma4"))
    data = {
        "picture": lessons.pictures(talk, 48, train.PICTURE["gemma4"], "train", length=train.PICTURE_ROW["gemma4"]),
        "sound": lessons.sounds(talk, str(clips / "clips-train.npz"), 96, "train", speech.TRAINED_VOICES, 0.7, train.SOUND_ROW),
    }
    reached: dict[torch.nn.Module, list[float]] = {}

    def note(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        low_in, high_in, low_out, high_out = reached.get(module, [0.0] * 4)
        reached[module] = [min(low_in, inputs[0].min().item()), max(high_in, inputs[0].max().item()),
                           min(low_out, output.min().item()), max(high_out, output.max().item())]

    bounded = [module for module in learner.model.modules() if hasattr(module, "input_min")]
    hooks = [module.register_forward_hook(note) for module in bounded]
    for kind, rows in data.items():
        learner.encode(kind, train.Sampler(rows, torch.device("cpu")).next(len(rows.ids)))
    for hook in hooks:
        hook.remove()
    for module in bounded:
        for name, extreme in zip(["input_min", "input_max", "output_min", "output_max"], reached[module]):
            getattr(module, name).fill_(1.25 * extreme)


def check(demo: configurations.Demo, learner: learners.Learner) -> None:
    """The written file, read back by transformers, holds the same weights."""
    model, report = getattr(transformers, demo.model_class).from_pretrained(
        HERE / demo.name, dtype=torch.float32, output_loading_info=True)
    assert not (report["missing_keys"] or report["unexpected_keys"] or report["mismatched_keys"]), report
    written = learner.model.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, written[name].float()), name
    size = (HERE / demo.name / "model.safetensors").stat().st_size
    print(f"{demo.name}: {sum(parameter.numel() for parameter in model.parameters())} weights, {size} bytes")


if __name__ == "__main__":
    main()
