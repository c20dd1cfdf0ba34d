"""tests.md: commands that test, marks, and what a machine needs for tests that it would skip."""

from __future__ import annotations

import inspect
import re
import tomllib

from tests import marks
from tools.docs.markdown import ROOT, code, first_paragraph, page_of, prose, table

_COMMANDS = ("test", "test-all", "native-test", "chaos", "fuzz", "proofs", "disk", "models", "lint")
_SKIP = re.compile(r"skipif\(.*?reason=f?\"([^\"]*)\"", re.DOTALL)


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
    skips: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for reason in _SKIP.findall(path.read_text()):
            skips.setdefault(re.sub(r": \{.*", "", reason), []).append(code(str(path.relative_to(ROOT / "tests"))))
    missing = [(prose(reason), ", ".join(dict.fromkeys(files))) for reason, files in sorted(skips.items())]
    return page_of(
        "Tests",
        "Commands of the Makefile that test. `PYTEST_ARGS='-k name'` chooses tests, `ARGS` options of a campaign.",
        table(("command", "what it does"), commands),
        "## Marks",
        table(("mark", "meaning"), [*rows, *helpers]),
        "## Skipped tests\n\nReasons for which tests are skipped on a machine, or fail if `CI` is set and they say so.",
        table(("reason", "tests"), missing),
    )
