"""Tiny tokenizers with the real pipelines: byte-level (Qwen), SentencePiece-style BPE (Llama, Phi) and Gemma's.

Only the vocabularies are small. Normaliser, pre-tokeniser, model, post-processor and decoder are those of the published
`tokenizer.json` files, and so are the special tokens. The merges are learned here from `corpus.txt` by a plain, fully
deterministic trainer.
"""

import collections
import itertools
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

CORPUS = Path(__file__).with_name("corpus.txt")

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

QWEN_SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]
QWEN_PLAIN_ADDED = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
PHI_ADDED = [
    "<|endoftext|>", "<|assistant|>", "<|placeholder1|>", "<|placeholder2|>", "<|placeholder3|>", "<|placeholder4|>",
    "<|system|>", "<|end|>", "<|placeholder5|>", "<|placeholder6|>", "<|user|>",
]
GEMMA_CONTROL = [
    "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|image>", "<|image|>", "<image|>",
    "<|audio>", "<|audio|>", "<audio|>", "<|video|>",
]


def qwen(merges: int, split: str = QWEN_SPLIT) -> Tokenizer:
    """Byte-level BPE: the 256 byte letters, the merges, then the added tokens; no BOS."""
    pipeline = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(split), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    words = [word for line in corpus_lines() for word, _ in pipeline.pre_tokenize_str(line)]
    pairs = learn_merges(words, merges)
    vocab = enumerate_tokens(sorted(pre_tokenizers.ByteLevel.alphabet()) + [left + right for left, right in pairs])
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, byte_fallback=False, fuse_unk=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pipeline
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in QWEN_SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in QWEN_PLAIN_ADDED])
    return tokenizer


def qwen35(merges: int) -> Tokenizer:
    """Qwen3.5's: the same but for a split that keeps combining marks with their letters."""
    return qwen(merges, QWEN35_SPLIT)


def llama(merges: int) -> Tokenizer:
    """SentencePiece-style BPE with byte fallback; `<s>` is put in front."""
    tokenizer = sentencepiece_style(merges)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def phi(merges: int) -> Tokenizer:
    """As `llama`, without BOS, with chat tokens that swallow the white space after them."""
    tokenizer = sentencepiece_style(merges)
    tokenizer.add_special_tokens([AddedToken(PHI_ADDED[0], normalized=False)])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, rstrip=True) for text in PHI_ADDED[1:]])
    return tokenizer


def gemma(merges: int) -> Tokenizer:
    """BPE over whole texts with spaces written as `▁`, byte fallback, runs of newlines and spaces as added tokens."""
    texts = [text.replace(" ", "▁") for text in corpus_lines()]
    words = [piece for text in texts for piece in split_before(text, "▁")]
    pieces = learn_pieces(words, merges)
    start = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "[multimodal]"]
    runs = ["\n" * count for count in (2, 3, 4)] + ["▁" * count for count in (2, 3, 4)]
    vocab = enumerate_tokens(start + GEMMA_CONTROL + runs + byte_tokens() + ["\n", "\t"] + pieces)
    merges = all_splits(runs + pieces, vocab)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous", invert=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in start[:5] + GEMMA_CONTROL])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in start[5:] + runs])
    return tokenizer


PIPELINES = {"qwen": qwen, "qwen35": qwen35, "llama": llama, "phi": phi, "gemma": gemma}


def sentencepiece_style(merges: int) -> Tokenizer:
    """What the published conversion of a SentencePiece BPE model looks like (Llama 2, Phi 3)."""
    words = [piece for text in corpus_lines() for piece in split_before("▁" + text.replace(" ", "▁"), "▁")]
    pieces = learn_pieces(words, merges)
    vocab = enumerate_tokens(["<unk>", "<s>", "</s>"] + byte_tokens() + pieces)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=all_splits(pieces, vocab), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    return tokenizer


def learn_pieces(words: list[str], merges: int) -> list[str]:
    """Merged pieces in the order they were learned, then the single characters, as SentencePiece numbers them.

    Rare characters get no piece, so that ordinary text uses byte fallback too.
    """
    counts = collections.Counter(itertools.chain.from_iterable(words))
    ascii_letters = {chr(code) for code in range(33, 127)}
    common = {letter for letter, count in counts.items() if count >= 3 and letter not in "\n\t"}
    letters = sorted(ascii_letters | common, key=lambda letter: (-counts[letter], letter))
    known = [word for word in words if all(letter in letters for letter in word)]
    return [left + right for left, right in learn_merges(known, merges)] + letters


def learn_merges(words: list[str], count: int) -> list[tuple[str, str]]:
    """Byte-pair encoding: `count` times, join the most frequent neighbours (ties: the smaller pair)."""
    splits = {word: list(word) for word in words}
    frequency = collections.Counter(words)
    merges = []
    while len(merges) < count:
        pairs = collections.Counter()
        for word, parts in splits.items():
            for pair in zip(parts, parts[1:]):
                pairs[pair] += frequency[word]
        if not pairs:
            raise ValueError(f"the corpus yields only {len(merges)} merges, {count} were asked for")
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for word, parts in splits.items():
            splits[word] = join_pair(parts, best)
    return merges


def join_pair(parts: list[str], pair: tuple[str, str]) -> list[str]:
    joined = []
    for part in parts:
        if joined and (joined[-1], part) == pair:
            joined[-1] += part
        else:
            joined.append(part)
    return joined


def all_splits(pieces: list[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to build a piece from two others, best piece first.

    SentencePiece joins any two neighbours that form a piece; so a converted tokenizer lists all of them.
    """
    merges = []
    for piece in pieces:
        cuts = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        merges += sorted((cut for cut in cuts if cut[0] in vocab and cut[1] in vocab),
                         key=lambda cut: (-len(cut[0]), vocab[cut[0]]))
    return merges


def split_before(text: str, mark: str) -> list[str]:
    """Cut in front of every `mark`: pieces are learned inside words, never across them."""
    head, *rest = text.split(mark)
    return [piece for piece in [head] + [mark + tail for tail in rest] if piece]


def corpus_lines() -> list[str]:
    return CORPUS.read_text(encoding="utf-8").splitlines(keepends=True)


def byte_tokens() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def enumerate_tokens(tokens: list[str]) -> dict[str, int]:
    vocab = {token: index for index, token in enumerate(tokens)}
    assert len(vocab) == len(tokens), "a token is listed twice"
    return vocab
