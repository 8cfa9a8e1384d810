"""Texts, id sequences and chats, with the results of the tokenizer and the chat template."""

import json
from pathlib import Path

import jinja2
from tokenizers import Tokenizer

import weights

TEXTS = [
    "", " ", "a", "Hello, world!", " leading", "trailing ", "  two  spaces  ", "The capital of France is Paris.",
    "line one\nline two\r\nline three\n", "\n\n\n", "\n\n\n\n\n\n", "a\n b\n  c", "\ttab\tseparated\t\tvalues", " \t \n ", "     ",
    "I'm sure they've said it's what we'LL do; he'd SAY he isn't.", "don’t ‘quote’ “this”", "CamelCase snake_case kebab-case",
    "1234567890 3.14159 -42 1e10 ½ ٣ ４２", "fn main() {\n    println!(\"{}\", 1 + 2);\n}\n",
    "def f(x):\n\treturn x ** 2  # square\n", "<html><body class=\"a\">&amp;</body></html>", "{\"key\": [1, 2, null]}",
    "http://example.org/a?b=c&d=%20#e", "été café naïve", "e\u0301te\u0301 cafe\u0301 n\u0303", "a\u0300\u0301\u0302b",
    "ạ̈ q̣̇", "Straße über Dächer", "¿Dónde está el niño?", "Это просто текст", "今天天气很好。", "これは本です。カタカナ",
    "한국어 텍스트", "각", "ไทย ภาษา", "हिन्दी में", "العربية مُشَكَّلة", "עִבְרִית",
    "🎉", "👍🏽 ok", "👩‍👩‍👧‍👦 family", "🇫🇷🇩🇪", "☃️ snow❄", "text🎉text", "𝒳𝓎𝔷", "\u200bzero\u200dwidth\ufeff", "a\u00a0b\u2003c\u3000d",
    "ﬁ ligature Å Å Ω Ω", "\u0000 \u0001 \u007f", "\ufffd", "▁ ▁▁ ▁a", "<0x41> <0xE2>", "Ġ Ċ", "!!!???...", "---===***", "a" * 70,
    "word " * 12, "mixed 中文 and English и русский 🎈 text",
]

CHATS = {
    "one_turn": [{"role": "user", "content": "What is the capital of France?"}],
    "spaces_and_newlines": [{"role": "user", "content": "  keep\n\n  this \t layout  "}],
    "with_system": [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Hello!"},
    ],
    "empty_system": [{"role": "system", "content": ""}, {"role": "user", "content": "Hello!"}],
    "multi_turn": [
        {"role": "user", "content": "Hi, I'm Ada."},
        {"role": "assistant", "content": "Hello Ada! 👋"},
        {"role": "user", "content": "今天天气很好。 What does it mean?"},
    ],
    "multi_turn_with_system": [
        {"role": "system", "content": "Answer in one word.\n"},
        {"role": "user", "content": "Capital of France?"},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "Of Italy?"},
        {"role": "assistant", "content": "Rome."},
        {"role": "user", "content": "Of café?"},
    ],
    "answered": [
        {"role": "user", "content": "Two plus two?"},
        {"role": "assistant", "content": "Four."},
    ],
    "thoughts": [
        {"role": "user", "content": "Two plus two?"},
        {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\nFour."},
        {"role": "user", "content": "Are you sure?"},
    ],
    "system_only": [{"role": "system", "content": "Alone."}],
    "assistant_first": [{"role": "assistant", "content": "Hm?"}],
    "unknown_role": [{"role": "narrator", "content": "Once upon a time"}],
}


def write(tokenizer, seed: int, folder: Path) -> None:
    """Write `tokenizer_cases.json`; `tokenizer` is the one of transformers, with the chat template."""
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    literal = Tokenizer.from_file(str(folder / "tokenizer.json"))
    literal.encode_special_tokens = True  # special tokens inside text stay text
    cases = {
        "texts": [text_case(plain, literal, text) for text in TEXTS + special_texts(plain)],
        "decodes": [decode_case(plain, ids) for ids in random_sequences(plain, seed)],
        "chats": [chat_case(plain, tokenizer, name, messages, prompt, {})
                  for name, messages in chats(plain).items() for prompt in (False, True)]
        + [chat_case(plain, tokenizer, "one_turn", CHATS["one_turn"], True, {"enable_thinking": thinking})
           for thinking in (False, True)],
    }
    sections = [f' "{name}": [\n' + ",\n".join("  " + json.dumps(case, ensure_ascii=False) for case in items) + "\n ]"
                for name, items in cases.items()]
    (folder / "tokenizer_cases.json").write_text("{\n" + ",\n".join(sections) + "\n}\n", encoding="utf-8")


def text_case(plain: Tokenizer, literal: Tokenizer, text: str) -> dict:
    """`ids_literal` is present if it differs from `ids`: the text's special tokens treated as ordinary characters."""
    ids = plain.encode(text, add_special_tokens=False).ids
    case = {"text": text, "ids": ids, "ids_with_special": plain.encode(text, add_special_tokens=True).ids}
    unparsed = literal.encode(text, add_special_tokens=False).ids
    if unparsed != ids:
        case["ids_literal"] = unparsed
        case["decoded_literal"] = plain.decode(unparsed, skip_special_tokens=False)
    return case | decoded(plain, ids)


def decode_case(plain: Tokenizer, ids: list[int]) -> dict:
    return {"ids": ids} | decoded(plain, ids)


def decoded(plain: Tokenizer, ids: list[int]) -> dict:
    kept, skipped = (plain.decode(ids, skip_special_tokens=skip) for skip in (False, True))
    return {"decoded": kept} | ({"decoded_skip_special": skipped} if skipped != kept else {})


def chat_case(plain: Tokenizer, tokenizer, name: str, messages: list[dict], prompt: bool, options: dict) -> dict:
    """`error` instead of `text` if the template refuses the conversation."""
    case = {"name": name, "messages": messages, "add_generation_prompt": prompt} | options
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **options)
    except jinja2.exceptions.TemplateError as refusal:
        return case | {"error": str(refusal)}
    return case | {"text": text, "ids": plain.encode(text, add_special_tokens=False).ids}


def chats(plain: Tokenizer) -> dict[str, list[dict]]:
    special = special_tokens(plain)
    return CHATS | {"special_inside": [{"role": "user", "content": f"say {special[-1]} and {special[1]}\nnow"}]}


def special_tokens(plain: Tokenizer) -> list[str]:
    return [token.content for _, token in sorted(plain.get_added_tokens_decoder().items()) if token.special]


def special_texts(plain: Tokenizer) -> list[str]:
    """Every added token alone, glued to text, surrounded by white space, and cut short."""
    added = [token.content for _, token in sorted(plain.get_added_tokens_decoder().items())]
    texts = []
    for token in added:
        texts += [token, f"a{token}b", f"x {token} \n y"]
    return texts + [added[1] * 3, added[1][:-1], f"{added[1]}\n{added[-1]}\n\n text"]


def random_sequences(plain: Tokenizer, seed: int) -> list[list[int]]:
    """Any ids in any order: broken characters, control tokens in the middle, byte tokens without their partners."""
    generator = weights.generator(seed, "decodes")
    sequences = [generator.integers(plain.get_vocab_size(), size=length).tolist() for length in (1, 2, 3, 5, 8, 13, 21, 34, 34)]
    letters = [plain.encode(text, add_special_tokens=False).ids for text in ("🎉", "天", "é", "🎉天🎉")]
    return sequences + [ids[:cut] for ids in letters for cut in range(1, len(ids))] + [letters[0] * 2, letters[0][1:] + letters[1]]
