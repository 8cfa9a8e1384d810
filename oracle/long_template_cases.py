"""Published chat templates with what transformers' Jinja makes of long conversations, for `crates/qhx-text/tests/suite/long.rs`.

usage: long_template_cases.py OUT.json TEMPLATE.jinja…        (needs transformers, not torch)
"""

import json
import pathlib
import sys

from transformers.utils.chat_template_utils import _compile_jinja_template

MESSAGES = 2001
TOOL_TURNS = 300
# Words of a message: about 50 bytes, 1 kB and 4 kB.
WORDS = [10, 200, 800]


def conversation(words):
    return [{"role": ["user", "assistant"][number % 2], "content": f"{number}{' word' * words}"} for number in range(MESSAGES)]


def tool_turns():
    for number in range(TOOL_TURNS):
        call = {"type": "function", "id": f"call{number:05}", "function": {"name": "look", "arguments": {"at": number, "why": "to see " * 40}}}
        yield {"role": "user", "content": "Look!"}
        yield {"role": "assistant", "content": "", "tool_calls": [call]}
        yield {"role": "tool", "tool_call_id": f"call{number:05}", "name": "look", "content": "seen " * 60}
        yield {"role": "assistant", "content": "I see."}


cases = []
for path in map(pathlib.Path, sys.argv[2:]):
    template = _compile_jinja_template(path.read_text())
    for messages in [*map(conversation, WORDS), list(tool_turns())]:
        text = template.render(messages=messages, tools=None, add_generation_prompt=True, bos_token="<s>", eos_token="</s>")
        cases.append({"name": path.name, "template": path.read_text(), "messages": messages, "text": text})
pathlib.Path(sys.argv[1]).write_text(json.dumps(cases))
