"""Writes `NAME/prompts.json`: the held-out questions that are text alone, as `qhx forge --prompts` takes them.

    python3 prompts.py [NAME …]
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    names = sys.argv[1:] or sorted(path.parent.name for path in HERE.glob("*/heldout.json"))
    for name in names:
        cases = json.loads((HERE / name / "heldout.json").read_text())["cases"]
        turns = [case["messages"] for case in cases]
        asked = [turn[0]["content"] for turn in turns if len(turn) == 1 and isinstance(turn[0]["content"], str)]
        lines = [json.dumps({"user": text}, ensure_ascii=False) for text in dict.fromkeys(asked)]
        (HERE / name / "prompts.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
