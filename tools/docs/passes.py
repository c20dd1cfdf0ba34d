"""passes.md: the passes of the standard pipeline in their order, with their reasons and options."""

from __future__ import annotations

import inspect
import sys
import textwrap
from typing import Any

from elaswave_fx.passes.assign_frequency import AssignFrequency
from elaswave_fx.passes.assign_stages import AssignStages
from elaswave_fx.passes.pipeline import BUILT_IN, STANDARD, may_be_left_out
from tools.docs.markdown import code, first_paragraph, page_of, table


def page() -> str:
    """Return the page."""
    rows = [
        (str(number), code(name), "" if may_be_left_out(name) else "yes", _reason(kind))
        for number, (name, kind) in enumerate(BUILT_IN.items(), start=1)
    ]
    planning = [(code(kind.name), _reason(kind)) for kind in (AssignStages, AssignFrequency)]
    examples = [f"### {name}\n\n{_example(kind)}" for name, kind in BUILT_IN.items() if _example(kind)]
    return page_of(
        "Passes",
        "The compiler's passes in their standard order. *Needed* ones must be in every pipeline, in this order. How to "
        "change the pipeline and write a pass: [passes](../start/passes.md). `capture` comes before the first one and "
        "`lower` after the last.",
        table(("", "pass", "needed", "reason"), rows),
        "As text, with their options ([keys](keys.md#passes)):\n\n" + textwrap.indent(_pipeline(), "    "),
        "## Passes of a plan\n\nThey run on the compiled artifact, for every plan anew.\n\n"
        + table(("pass", "reason"), planning),
        "## Before and after",
        *examples,
    )


def _pipeline() -> str:
    return textwrap.fill(str(STANDARD).replace(",", ", "), 111, break_long_words=False, break_on_hyphens=False)


def _reason(kind: Any) -> str:
    return first_paragraph(kind.__doc__)


def _example(kind: Any) -> str:
    """What the module's docstring shows, from the word `before` on."""
    blocks = inspect.cleandoc(sys.modules[kind.__module__].__doc__ or "").split("\n\n")
    found = [block for block in blocks if block.startswith("    ") and "after" in block]
    return "\n\n".join(found)
