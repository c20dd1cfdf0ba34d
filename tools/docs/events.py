"""events.md: every kind of line in `events.jsonl`, from the types and their docstrings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elaswave_fx.observe.job_events import JobEvent
from elaswave_fx.observe.rank_events import OF_ANY_RANK, FaultStrikes
from elaswave_fx.observe.run_event import tag_of
from tools.docs.markdown import clause, code, field_docs, first_paragraph, page_of, prose, table

OF_JOB: Mapping[str, Any] = {tag_of(kind): kind for kind in JobEvent.__subclasses__()}
OF_RANKS: Mapping[str, Any] = {tag_of(kind): kind for kind in (*OF_ANY_RANK, FaultStrikes)}


def page() -> str:
    """Return the page."""
    rows = [_row(kind, [each for each in (OF_JOB.get(kind), OF_RANKS.get(kind)) if each]) for kind in _order()]
    return page_of(
        "Events",
        "Lines of `events.jsonl` in a run directory, in the order in which the launcher received them. Each has `t_ms` "
        "(since the launcher's start, by the clock of the coordinator's machine), `kind` and `epoch`; from `joined` "
        "on also `rank`. Defaults are left out. [Recovery](../explain/recovery.md) shows a loss and a join.",
        table(("kind", "what happened", "fields"), rows),
    )


def _order() -> list[str]:
    return [*OF_JOB, *(kind for kind in OF_RANKS if kind not in OF_JOB)]


def _row(kind: str, types: list[Any]) -> tuple[str, str, str]:
    what = " ".join(first_paragraph(each.__doc__) for each in types)
    fields: dict[str, str] = {}
    for each in types:
        docs = field_docs(each)
        for name in each.__annotations__:
            fields[name] = fields.get(name) or docs.get(name, "")
    words = [code(name) + (f" ({clause(doc)})" if doc else "") for name, doc in fields.items()]
    return code(kind), prose(what), ", ".join(words)
