"""tests.md: commands that test, and marks."""

from __future__ import annotations

import inspect
import re
import tomllib

from tests import marks
from tools.docs.markdown import ROOT, code, first_paragraph, page_of, prose, table

_COMMANDS = ("test", "test-all", "native-test", "chaos", "fuzz", "proofs", "disk", "models", "lint")


def page() -> str:
    """Return the page."""
    helps = dict(re.findall(r"^([a-z-]+):.*## (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [(code(f"make {name}"), helps[name]) for name in _COMMANDS]
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    rows = [(code(name), what) for name, what in (mark.split(": ", 1) for mark in declared)]
    helpers = [
        (code(f"tests.marks.{name}"), prose(first_paragraph(each.__doc__)))
        for name, each in vars(marks).items() if inspect.isfunction(each)
    ]  # fmt: skip
    return page_of(
        "Tests",
        "Commands of the Makefile that test. `PYTEST_ARGS='-k name'` chooses tests, `ARGS` options of a campaign. "
        "Tests that need root, network namespaces, MKL or torchft are skipped where these lack; `-rs` lists them.",
        table(("command", "what it does"), commands),
        "## Marks",
        table(("mark", "meaning"), [*rows, *helpers]),
    )
