"""Each model with its way from a batch of rows to losses; towers are warmed up with small heads that are thrown away later.

Training calls the parts of the models of transformers directly where that saves time: only positions that are trained get
logits, all experts run on all tokens, and pictures of one size go through a vision tower as one batch.
"""

import math
from pathlib import Path
from types import MethodType

import torch
import torch.nn.functional as functional
import transformers
from torch import nn

import chat
import configurations
import features
import speech

HERE = Path(__file__).parent
Batch = dict[str, torch.Tensor]


class Learner(nn.Module):
    """A model for text; the other learners add what they see and hear."""

    def __init__(self, demo: configurations.Demo) -> None:
        super().__init__()
        config = transformers.AutoConfig.from_pretrained(HERE / demo.name)
        self.model = getattr(transformers, demo.model_class)._from_config(config, dtype=torch.float32)

    def states(self, kind: str, batch: Batch) -> torch.Tensor:
        """The last hidden states `[B, T, hidden]`."""
        return self.model.model(input_ids=batch["ids"], use_cache=False).last_hidden_state

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(states)

    def answers(self, states: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits at the positions before trained tokens, and those tokens."""
        wanted = labels[:, 1:] != chat.IGNORE
        return self.logits(states[:, :-1][wanted]), labels[:, 1:][wanted]

    def loss(self, kind: str, batch: Batch, progress: float) -> torch.Tensor:
        """What to minimise when `progress` (0 to 1) of the training is done."""
        return functional.cross_entropy(*self.answers(self.states(kind, batch), batch["labels"]))

    @torch.no_grad()
    def exact(self, kind: str, batch: Batch) -> torch.Tensor:
        """Per row: would greedy decoding give the whole answer and its end? (It would iff each next token is the best.)"""
        logits, labels = self.answers(self.states(kind, batch), batch["labels"])
        rows = (batch["labels"][:, 1:] != chat.IGNORE).nonzero()[:, 0]
        wrong = torch.zeros(len(batch["labels"]), device=labels.device).index_add(0, rows, (logits.argmax(-1) != labels).float())
        return wrong == 0


class ExpertLearner(Learner):
    """PhiMoE: all experts on all tokens, weighed with the router's choice; a small loss keeps all experts in use."""

    def __init__(self, demo: configurations.Demo) -> None:
        super().__init__(demo)
        for layer in self.model.model.layers:
            layer.mlp.experts.forward = MethodType(run_all_experts, layer.mlp.experts)
            layer.mlp.router.register_forward_hook(lambda module, inputs, outputs: self.routed.append(outputs))
        self.routed = []

    def loss(self, kind: str, batch: Batch, progress: float) -> torch.Tensor:
        self.routed.clear()
        loss = super().loss(kind, batch, progress)
        for scores, _, chosen in self.routed:
            used = functional.one_hot(chosen, scores.shape[-1]).float().sum(-2).mean(0)
            loss = loss + 0.01 * scores.shape[-1] / 2 * (used * scores.softmax(-1).mean(0)).sum() / len(self.routed)
        return loss


def run_all_experts(self: nn.Module, states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    share = torch.zeros(len(states), self.num_experts, device=states.device).scatter_add(1, chosen, weights)
    gate, up = torch.einsum("th,eih->eti", states, self.gate_up_proj).chunk(2, dim=-1)
    return torch.einsum("eti,ehi,te->th", self.act_fn(gate) * up, self.down_proj, share)


class SceneHead(nn.Module):
    """Reads the content of each quarter of a picture from its soft tokens."""

    SIZES = [4, 3, 9, 7]
    """Values of count, size, colour, shape; see `features.scene_labels`."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.read = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, sum(self.SIZES)))

    def forward(self, soft: torch.Tensor, contents: torch.Tensor) -> torch.Tensor:
        """The loss for soft tokens `[B, n, n, hidden]` and contents `[B, 4, 4]`."""
        batch, side = soft.shape[:2]
        quarters = soft.reshape(batch, 2, side // 2, 2, side // 2, -1).mean((2, 4)).reshape(batch, 4, -1)
        guesses = self.read(quarters).split(self.SIZES, dim=-1)
        return sum(functional.cross_entropy(guess.flatten(0, 1), contents[..., index].flatten()) for index, guess in enumerate(guesses))


class QwenVisionLearner(Learner):
    """Qwen3-VL; pictures are 128 x 128: 8 x 8 patches, 4 x 4 soft tokens, always behind the same few tokens."""

    WARM_UP = 0.25
    """Share of the training in which the tower learns from its own head alone."""

    def __init__(self, demo: configurations.Demo) -> None:
        super().__init__(demo)
        self.head = SceneHead(self.model.config.text_config.hidden_size)

    def see(self, pictures: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Soft tokens `[B * 16, hidden]`, and those for DeepStack."""
        tower = self.model.model.visual
        batch, count = len(pictures), 64
        rows, columns = block_order(8, pictures.device)
        states = tower.patch_embed(features.qwen_patches(pictures).flatten(0, 1)).reshape(batch, count, -1)
        states = (states + self.positions(rows, columns)).flatten(0, 1)
        dim = states.shape[-1] // tower.config.num_heads
        frequencies = 10_000.0 ** (-torch.arange(0, dim // 2, 2, device=pictures.device).float() / (dim // 2))
        angles = torch.cat([rows[:, None] * frequencies, columns[:, None] * frequencies], dim=-1).repeat(1, 2)
        turned = angles.cos().repeat(batch, 1), angles.sin().repeat(batch, 1)
        deep = []
        for index, block in enumerate(tower.blocks):
            states = states + self.attend(block.attn, block.norm1(states), turned, batch)
            states = states + block.mlp(block.norm2(states))
            if index in tower.deepstack_visual_indexes:
                deep.append(tower.deepstack_merger_list[tower.deepstack_visual_indexes.index(index)](states))
        return tower.merger(states), deep

    def positions(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """The learned grid of positions, stretched bilinearly over the patches."""
        table = self.model.model.visual.pos_embed.weight
        side = math.isqrt(len(table))
        total = 0
        scale = (side - 1) / rows.max()
        y, x = rows * scale, columns * scale
        for down in (0, 1):
            for right in (0, 1):
                row, column = (y.floor() + down).clamp(max=side - 1), (x.floor() + right).clamp(max=side - 1)
                weight = (1 - (y - y.floor() - down).abs()) * (1 - (x - x.floor() - right).abs())
                total = total + weight[:, None] * table[(row * side + column).long()]
        return total

    @staticmethod
    def attend(attention: nn.Module, states: torch.Tensor, turned: tuple, batch: int) -> torch.Tensor:
        """The tower's attention for `batch` pictures of one size at once."""
        count = len(states)
        query, key, value = attention.qkv(states).reshape(count, 3, attention.num_heads, -1).unbind(1)
        cos, sin = (part[:, None] for part in turned)
        query, key = (part * cos + rotate_half(part) * sin for part in (query, key))
        query, key, value = (part.reshape(batch, count // batch, attention.num_heads, -1).transpose(1, 2) for part in (query, key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return attention.proj(mixed.transpose(1, 2).reshape(count, -1))

    def states(self, kind: str, batch: Batch) -> torch.Tensor:
        tower = self.model.model.language_model
        if kind != "picture":
            return tower(input_ids=batch["ids"], use_cache=False).last_hidden_state
        soft, deep = batch["seen"] if "seen" in batch else self.see(batch["pictures"])
        ids = batch["ids"]
        is_soft = ids == self.model.config.image_token_id
        embeddings = tower.embed_tokens(ids).masked_scatter(is_soft[..., None], soft)
        return tower(inputs_embeds=embeddings, position_ids=self.rotary_positions(ids), visual_pos_masks=is_soft,
                     deepstack_visual_embeds=deep, use_cache=False).last_hidden_state

    def rotary_positions(self, ids: torch.Tensor) -> torch.Tensor:
        """Positions `[3, B, T]`: all rows have their 16 soft tokens at the same place."""
        start = int((ids[0] == self.model.config.image_token_id).nonzero()[0])
        positions = torch.arange(ids.shape[1], device=ids.device).repeat(3, 1)
        positions[:, start + 16:] -= 12
        grid = torch.arange(4, device=ids.device)
        positions[0, start:start + 16] = start
        positions[1, start:start + 16] = start + grid.repeat_interleave(4)
        positions[2, start:start + 16] = start + grid.repeat(4)
        return positions[:, None].expand(-1, len(ids), -1)

    def loss(self, kind: str, batch: Batch, progress: float) -> torch.Tensor:
        if kind != "picture":
            return super().loss(kind, batch, progress)
        soft, deep = self.see(batch["pictures"])
        reading = self.head(soft.reshape(len(batch["ids"]), 4, 4, -1), batch["contents"])
        if progress < self.WARM_UP:
            return reading
        return super().loss(kind, batch | {"seen": (soft, deep)}, progress) + 0.3 * reading


class GemmaLearner(Learner):
    """Gemma 4: text, the same pictures (enlarged to 24 x 24 patches, 8 x 8 soft tokens), and speech."""

    WARM_UP = 0.28

    def __init__(self, demo: configurations.Demo) -> None:
        super().__init__(demo)
        hidden = self.model.config.text_config.hidden_size
        nn.init.normal_(self.model.model.vision_tower.patch_embedder.position_embedding_table, std=0.02)
        self.scene_head = SceneHead(hidden)
        self.word_head = nn.Linear(hidden, 1 + len(speech.LEXICON))
        self.register_buffer("filters", features.mel_filters(), persistent=False)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        cap = self.model.config.text_config.final_logit_softcapping
        return cap * torch.tanh(self.model.lm_head(states) / cap)

    def inputs(self, kind: str, batch: Batch) -> dict:
        if kind == "picture":
            patches, positions = features.gemma_patches(batch["pictures"])
            return {"pixel_values": patches, "image_position_ids": positions}
        if kind == "sound":
            sounds, whole = features.log_mel(batch["samples"], batch["lengths"], self.filters)
            return {"input_features": sounds, "input_features_mask": whole}
        return {}

    def run(self, kind: str, batch: Batch):
        ids = batch["ids"]
        types = (ids == self.model.config.image_token_id).long() + 3 * (ids == self.model.config.audio_token_id).long()
        return self.model.model(input_ids=ids, mm_token_type_ids=types, use_cache=False, **self.inputs(kind, batch))

    def states(self, kind: str, batch: Batch) -> torch.Tensor:
        return self.run(kind, batch).last_hidden_state

    def loss(self, kind: str, batch: Batch, progress: float) -> torch.Tensor:
        if kind not in ("picture", "sound"):
            return super().loss(kind, batch, progress)
        if progress < self.WARM_UP:
            soft = self.encode(kind, batch)
            return self.reading(kind, soft, batch)
        outputs = self.run(kind, batch)
        soft = outputs.image_hidden_states if kind == "picture" else outputs.audio_hidden_states
        loss = functional.cross_entropy(*self.answers(outputs.last_hidden_state, batch["labels"]))
        return loss + (0.3 if kind == "picture" else 0.2) * self.reading(kind, soft, batch)

    def encode(self, kind: str, batch: Batch) -> torch.Tensor:
        """Soft tokens alone, of all inputs in a row."""
        core, inputs = self.model.model, self.inputs(kind, batch)
        if kind == "picture":
            return torch.cat(tuple(core.get_image_features(**inputs, return_dict=True).pooler_output))
        output = core.get_audio_features(**inputs, return_dict=True)
        return output.pooler_output[output.attention_mask]

    def reading(self, kind: str, soft: torch.Tensor, batch: Batch) -> torch.Tensor:
        if kind == "picture":
            return self.scene_head(soft.reshape(len(batch["ids"]), 8, 8, -1), batch["contents"])
        lengths = (batch["ids"] == self.model.config.audio_token_id).sum(-1)
        places = torch.arange(int(lengths.max()), device=soft.device)[None] < lengths[:, None]
        padded = soft.new_zeros(*places.shape, soft.shape[-1]).masked_scatter(places[..., None], soft)
        guesses = self.word_head(padded).log_softmax(-1).transpose(0, 1)
        said = batch["words"] >= 0
        return functional.ctc_loss(guesses, batch["words"][said] + 1, lengths, said.sum(-1), zero_infinity=True)


def block_order(side: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and columns of patches, 2 x 2 blocks one after the other."""
    order = torch.arange(side * side, device=device).reshape(side // 2, 2, side // 2, 2).transpose(1, 2).flatten()
    return order // side, order % side


def rotate_half(values: torch.Tensor) -> torch.Tensor:
    first, second = values.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


LEARNERS = {"phimoe": ExpertLearner, "qwen3_5": Learner, "qwen3-vl": QwenVisionLearner, "gemma4": GemmaLearner}
