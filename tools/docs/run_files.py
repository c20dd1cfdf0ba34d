"""run_files.md: the lines of metrics and ledger, and the summary, from their types."""

from __future__ import annotations

from collections.abc import Sequence

from elaswave_fx.audit.record import Line
from elaswave_fx.control.coordinator.rank_reports import SummaryShare
from elaswave_fx.observe.metrics import StepLine, Summary
from tools.docs.markdown import clause, code, field_docs, first_paragraph, page_of, prose, table, wrapped

_NOT_WRITTEN = ("number", "extra")
_LEDGER = """
`content_hash`, the sum of `keys` and `count` do not depend on the layout; with `exact=true` no sum or digest does.
`previous` is the SHA-256 of the text of the line before, 64 zeros in the first one. At the end the launcher checks that
the tiles cover each step's batch once; otherwise the run fails. A line `{"rolled_back_to": 25, …}` voids the lines from
that step on.
"""
_SUMMARY = """
`ledger_head`: the hash of the ledger's last line; null if a worker wrote the summary. More:
[memory](../start/operating.md#memory-and-cores), [predictions](../explain/emulation.md#how-faithful-it-is). A fault
that was not injected counts from the rank's last sign of life: `detect_ms` and `mttr_ms` are then too long, by at most
a heartbeat (0.2 s) or two steps.
"""


def page() -> str:
    """Return the page."""
    return page_of(
        "Files of a run",
        "What stands in the files of a run directory. [Operating](../start/operating.md#the-run-directory) lists them "
        "all; [events](events.md) has the kinds of `events.jsonl`.",
        _section("metrics.jsonl", (StepLine,)),
        _section("ledger.jsonl", (Line,), _LEDGER),
        _section("summary.json", (Summary, SummaryShare), _SUMMARY),
    )


def _section(name: str, types: Sequence[type], note: str = "") -> str:
    docs: dict[str, str] = {}
    for each in types:
        said = field_docs(each)
        docs.update((field, docs.get(field) or said.get(field, "")) for field in each.__annotations__)
    rows = [(code(field), clause(doc)) for field, doc in docs.items() if field not in _NOT_WRITTEN]
    lead = prose(first_paragraph(types[0].__doc__).split(" `number`")[0])
    return f"## {name}\n\n{wrapped(lead)}\n\n{table(('key', 'meaning'), rows)}" + (
        f"\n\n{wrapped(note)}" if note else ""
    )
