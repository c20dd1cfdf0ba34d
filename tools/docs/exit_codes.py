"""exit_codes.md: exit codes, stopping signals, and the errors that end a command, from where they are defined."""

from __future__ import annotations

from elaswave_fx import entry, errors
from elaswave_fx.launch import stop
from tools.docs.markdown import code, constant_docs, first_paragraph, page_of, prose, table, wrapped

_RECOVERED = (errors.CommError, errors.ReplicaDiffers)
"""Recovered from: they end nothing but a step, unless a run cannot start."""


def page() -> str:
    """Return the page."""
    docs = constant_docs(entry)
    codes = [(str(getattr(entry, name)), prose(docs[name])) for name in ("DONE", "REFUSED", "FAILED")]
    signals = ", ".join(f"{stop.SIGNALLED + number} ({number.name})" for number in stop.STOPPING)
    codes.append((f"{stop.SIGNALLED} + N", f"signal N stopped the run early, and its state is saved: {signals}"))
    classes = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    kinds = [kind for kind in classes if issubclass(kind, errors.ElasWaveError) and kind is not errors.ElasWaveError]
    recovered = [kind for kind in kinds if issubclass(kind, _RECOVERED)]
    ending = [kind for kind in kinds if kind not in recovered]
    rows = [(code(kind.__name__), _code_of(kind), prose(first_paragraph(kind.__doc__))) for kind in ending]
    return page_of(
        "Exit codes and errors",
        "Exit codes of every command. A failing command prints one line, `error: …`, on standard error.",
        table(("exit code", "meaning"), codes),
        "A second Ctrl-C, SIGTERM or SIGHUP ends the workers at once, without a model. "
        + ", ".join(number.name for number in stop.WARNINGS)
        + " are warnings of schedulers: they may repeat.",
        "## Errors\n\n"
        + wrapped(
            f"{', '.join(code(kind.__name__) for kind in recovered)} end a step, not the run; they are shown while a "
            "run starts, or after 64 times without a commit. The others end the command. Any other exception is a bug: "
            "its line names the file with the traceback."
        ),
        table(("error", "exit code", "meaning"), rows),
    )


def _code_of(kind: type) -> str:
    if issubclass(kind, errors.HasLeft):
        return str(entry.DONE)
    made = Exception.__new__(kind)

    def fails() -> int:
        raise made

    return str(entry.end_of(fails).code)
