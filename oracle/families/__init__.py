"""What is specific to each model family: its published configuration, its vocabulary style, how its weights are drawn."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field

NAMES = ["qwen3_vl", "qwen3", "llama", "phimoe", "qwen3_5", "gemma4"]


@dataclass(frozen=True)
class Family:
    """One family; its variants differ only in dimensions and options."""

    model_class: str
    """The transformers class that computes the expected results."""
    pipeline: str
    """Which of `vocabulary.PIPELINES` its tokenizer uses."""
    template: str
    """File in `templates/`."""
    template_home: str
    """Where a published checkpoint of this family keeps it: `chat_template.jinja`, `tokenizer_config.json`, …"""
    tokenizer_config: dict
    """The fields of `tokenizer_config.json` besides the template."""
    eos: list[str]
    """Tokens that end a generation."""
    variants: dict[str, Callable[["Vocabulary"], dict]]
    """Variant name to its `config.json`, given the vocabulary."""
    merges: dict[str, int] = field(default_factory=dict)
    """Number of tokenizer merges by variant; 90 by default."""
    rules: list[tuple[str, float, float | str]] = field(default_factory=list)
    """How to draw tensors whose name matches: (pattern, mean, deviation); see `weights.draw`."""
    extra_tensors: Callable[[dict], dict[str, tuple[int, ...]]] | None = None
    """Tensors that published files carry and the model does not use: name to shape."""
    bos: str | None = None
    """Token that starts a text."""
    shard_bytes: int | None = None
    """Split the weights into files of at most this size."""
    attention_residual: str = "post_attention_layernorm"
    """The norm whose input is the residual stream after attention (or what replaces it)."""
    feed_forward_stage: str = "ffn"
    """Name of the second stage of a layer."""
    load_options: dict = field(default_factory=dict)
    """Arguments for loading the model, besides f32 and plain attention."""
    forward_options: dict = field(default_factory=dict)
    """Arguments that make a forward pass return what `decision_margin` looks at."""
    decision_margin: Callable[[object, object], float] | None = None
    """Given the outputs of a pass and the configuration: the smallest margin of any hard decision inside the model."""
    quiet: list[str] = field(default_factory=list)
    """Placeholder tokens that must not be generated: their output rows are drawn small."""
    media_module: str | None = None
    """The module whose `MEDIA` says how images and audio are recorded; see `media.py`."""

    @property
    def media(self):
        return importlib.import_module(self.media_module).MEDIA if self.media_module else None


@dataclass(frozen=True)
class Vocabulary:
    """What a configuration needs to know about the tokenizer."""

    ids: dict[str, int]

    @property
    def size(self) -> int:
        return len(self.ids)

    def __getitem__(self, token: str) -> int:
        return self.ids[token]


def load(name: str) -> Family:
    if name not in NAMES:
        raise SystemExit(f"unknown family {name!r}; known: {', '.join(NAMES)}")
    return importlib.import_module(f"families.{name}").FAMILY
