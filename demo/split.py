"""The one rule that parts training data from held-out data: a hash of what a case is about."""

import hashlib
import random


def number(key: str) -> int:
    """A number that depends on the key alone, the same on every machine."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")


def held_out(key: str, one_in: int = 8) -> bool:
    """Whether the case with this key is kept away from training: one in `one_in` is."""
    return number(f"held-out/{key}") % one_in == 0


def generator(*key: object) -> random.Random:
    """Random choices that depend on the key alone."""
    return random.Random(number("/".join(map(str, key))))
