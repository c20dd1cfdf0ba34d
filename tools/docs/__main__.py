"""`python -m tools.docs [--check]`: write the generated pages of `docs/reference/`, or say which are stale.

In: the code, `conf/`, `tests/`, `docs/results/`. Out: one Markdown file per module in `PAGES`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence

from tools.docs import benches, events, exit_codes, keys, passes, run_files, tests
from tools.docs.markdown import ROOT

PAGES: Mapping[str, Callable[[], str]] = {
    "keys": keys.page,
    "events": events.page,
    "run_files": run_files.page,
    "exit_codes": exit_codes.page,
    "passes": passes.page,
    "tests": tests.page,
    "benches": benches.page,
}
"""By the name of the file in `docs/reference/`."""


def stale() -> dict[str, str]:
    """Return the texts of pages that differ from their files, by file name."""
    folder, found = ROOT / "docs" / "reference", {}
    for name, page in PAGES.items():
        path, text = folder / f"{name}.md", page()
        if not path.exists() or path.read_text() != text:
            found[path.name] = text
    return found


def main(words: Sequence[str] | None = None) -> int:
    """The command line above; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.docs", description="Write the generated reference pages.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is stale")
    arguments = parser.parse_args(words)
    for name, text in stale().items():
        if arguments.check:
            print(f"docs/reference/{name} is stale: run `make docs`", file=sys.stderr)
        else:
            (ROOT / "docs" / "reference" / name).write_text(text)
            print(f"docs/reference/{name} written")
    return int(arguments.check and bool(stale()))


if __name__ == "__main__":
    sys.exit(main())
