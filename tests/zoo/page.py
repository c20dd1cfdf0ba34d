"""`python -m tests.zoo.page --out docs/reference/models.md`: write the table of kinds.py and their refusals.

test_kinds.py tries every row, and that the page says of it what is so.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from elaswave_fx.errors import ConfigError
from tests.zoo.kinds import KINDS, SAMPLES, Kind
from tests.zoo.trial import Trial, config_of

HEAD = f"""# What runs, and what is refused

Kinds of modules; [architectures](architectures.md) has those of Hugging Face.
`make models` made this page from `tests/zoo/kinds.py`. Each module trains three steps of {SAMPLES} samples, on one rank
in micro-batches and in two stages, with the losses of one PyTorch process to 1e-5.

- *trains, keyed draws*: random numbers depend on seed, step and sample alone, so all layouts draw the same; a plain
  loop draws others.
- *needs its samples together*: refused at `parallel.granule=1`; trains with the granule that the refusal names.
"""
REFUSED = "Before a worker starts, by a line with the place, this reason and a way out."


def outcome(kind: Kind) -> str:
    """The last column of a row."""
    if kind.refused:
        return "refused"
    if kind.granule > 1:
        return "needs its samples together"
    return "trains, keyed draws" if kind.draws else "trains"


def rows() -> list[str]:
    """The table of what trains, a line per outcome and place."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, kind in KINDS.items():
        if not kind.refused:
            found.setdefault((outcome(kind), kind.place), []).append(name)
    return [f"| {said} | {place} | {'; '.join(names)} |" for (said, place), names in found.items()]


def refusal(name: str) -> str:
    """The reason that a user gets, without numbers that change with every edit."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            Trial(config_of(name, f"cache.dir={folder}/cache"), Path(folder))
        except ConfigError as error:
            return shown(str(error))
    raise AssertionError(f"{name} is not refused")


def stable(message: str) -> str:
    """A refusal without the numbers of lines, and without norms, which processors round in ways of their own."""
    return re.sub(r"\b(line|norm|graph) \d[\d.]*(e[+-]\d+)?", r"\1 …", message)


def shown(message: str) -> str:
    """The reason of a refusal, without the source line and the way out, which the user gets too."""
    reason = stable(message).removeprefix("model: ").split("; a way out is")[0]
    reason = re.sub(r" in [\w.]+, line … (of \S+ )?\(.*?\): ", ": ", reason)
    where = r"\S+ cannot be exported|the gradient of .*? has norm …, derived from its captured graph …"
    return re.sub(rf"^({where}): ", "", reason)


def page(refusals: Mapping[str, str]) -> str:
    """The page as Markdown."""
    listed = (f"- **{name}**: `{line}`" for name, line in refusals.items())
    lines = [HEAD, "| outcome | over | modules |", "|---|---|---|", *rows(), "", "## Refused", "", REFUSED, "", *listed]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.page", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the page to write")
    out = parser.parse_args().out
    out.write_text(page({name: refusal(name) for name, kind in KINDS.items() if kind.refused}), encoding="utf-8")


if __name__ == "__main__":
    main()
