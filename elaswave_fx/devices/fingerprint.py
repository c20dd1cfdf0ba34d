"""Everything besides the program that decides the bits of a result, and the text for a difference.

difference(device.fingerprint(), of_the_checkpoint)  ->  "mkl_cbwr is 0x2, and was 0x1000c there"
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping


def difference(here: Mapping[str, str], there: Mapping[str, str]) -> str | None:
    """The first item that differs, as text; None if all are equal."""
    for item in sorted({*here, *there}):
        if here.get(item) != there.get(item):
            return f"{item} is {_shown(here.get(item))}, and was {_shown(there.get(item))} there"
    return None


def hash_of(fingerprint: Mapping[str, str], program: str) -> str:
    """A hash of 16 hex digits over everything that decides the bits of a run, except its data and configuration."""
    return hashlib.sha256(json.dumps([dict(fingerprint), program], sort_keys=True).encode()).hexdigest()[:16]


def _shown(value: str | None) -> str:
    return "not known" if value is None else value or "not set"
