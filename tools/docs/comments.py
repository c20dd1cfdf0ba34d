"""Keys of a file of `conf/` with the text of their defaults and their comments.

eval:                # held-out samples
  every: 0           # steps between evaluations;
                     # 0: never
    ->  Key("eval", "", "held-out samples"), Key("eval.every", "0", "steps between evaluations; 0: never")
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

_KEY = re.compile(r"^( *)([\w@]+): *(.*?) *(?:(?<!\S)# ?(.*))?$")


@dataclass(frozen=True)
class Key:
    """A key by its path, its default as it is written (empty for a group of keys), and its comment."""

    path: str
    default: str
    comment: str = ""


def read_keys(path: Path) -> tuple[str, list[Key]]:
    """Return the comment at the head of the file, and its keys in their order."""
    lines = path.read_text().splitlines()
    head = [line[1:].strip() for line in _leading(lines)]
    keys: list[Key] = []
    parents: list[tuple[int, str]] = []
    for line in lines[len(head) :]:
        stripped = line.strip()
        if stripped.startswith("#") and keys:
            keys[-1] = replace(keys[-1], comment=f"{keys[-1].comment} {stripped[1:].strip()}".strip())
            continue
        found = _KEY.match(line)
        if found is None:
            continue
        indent, name, default, comment = len(found[1]), found[2], found[3], found[4] or ""
        parents = [each for each in parents if each[0] < indent]
        keys.append(Key(".".join([*(parent for _, parent in parents), name]), default, comment))
        if not default:
            parents.append((indent, name))
    return " ".join(head), keys


def _leading(lines: Iterable[str]) -> list[str]:
    found = []
    for line in lines:
        if not line.startswith("#"):
            break
        found.append(line)
    return found
