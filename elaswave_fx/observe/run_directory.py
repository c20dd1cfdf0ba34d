"""The files of a run, as other programs read them while it goes on: whole lines only, whole files only.

directory = RunDirectory.create(Path("runs/today"))
directory.step(line)          # a line of metrics.jsonl, on disk when the call returns to the reader's view
directory.summary(summary)    # summary.json: written beside, then renamed
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from elaswave_fx.errors import ConfigError
from elaswave_fx.observe.metrics import StepLine, Summary

_OF_EARLIER_RUNS = (
    "metrics.jsonl",
    "events.jsonl",
    "eval.jsonl",
    "summary.json",
    "ledger.jsonl",
    "control/*",
    "plan-*.json",
    "logs/*.log",
    "model.safetensors",
)


_OF_THE_END = ("summary.json", "model.safetensors", "plan-*.json", "control/*")


class RunDirectory:
    """The launcher alone writes it, but for the logs, which belong to the processes, and what the coordinator writes:
    the ledger, `control/`, and the plans of later epochs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, TextIO] = {}

    @staticmethod
    def create(path: Path, goes_on_at: int | None = None) -> RunDirectory:
        """Make the directory, and remove what an earlier run left in it.

        If the earlier run is gone on with at step `goes_on_at`, only what lies behind it is removed: the lines of steps
        from there on, which are done again, the summary and the model. Raises `ConfigError`.
        """
        try:
            (path / "logs").mkdir(parents=True, exist_ok=True)
            directory = RunDirectory(path)
            for pattern in _OF_EARLIER_RUNS if goes_on_at is None else _OF_THE_END:
                for old in path.glob(pattern):
                    old.unlink()
            if goes_on_at is not None:
                directory._keep("metrics.jsonl", lambda line: line["step"] < goes_on_at)
                directory._keep("eval.jsonl", lambda line: line["step"] <= goes_on_at)
                directory._keep("events.jsonl", lambda line: True)
            for name in ("metrics.jsonl", "events.jsonl"):
                directory._open(name)
        except OSError as error:
            raise ConfigError(f"hydra.run.dir={path}: cannot be written ({error.strerror})") from error
        return directory

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the whole lines of a file, none if there is no such file. A kill may have left half of one at its
        end."""
        path = self.path / name
        whole = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in whole]

    def _keep(self, name: str, wanted: Callable[[dict[str, Any]], bool]) -> None:
        lines = [json.dumps(line) + "\n" for line in self.lines(name) if wanted(line)]
        if lines or (self.path / name).exists():
            self._replace(name, "".join(lines))

    def log(self, name: str) -> Path:
        """Return the path of logs/NAME.log; names are `rank-R` and `builder`."""
        return self.path / "logs" / f"{name}.log"

    def plan(self, epoch: int, text: str) -> None:
        """Write plan-EPOCH.json."""
        self._replace(f"plan-{epoch}.json", text if text.endswith("\n") else text + "\n")

    def step(self, line: StepLine) -> None:
        """Add the line of a committed step."""
        self._append("metrics.jsonl", dataclasses.asdict(line))

    def event(self, t_ms: float, kind: str, epoch: int, **fields: Any) -> None:
        """Add the line of something that happened `t_ms` after the start of the launcher."""
        self._append("events.jsonl", {"t_ms": round(t_ms, 3), "kind": kind, "epoch": epoch, **fields})

    def evaluation(self, step: int, loss: float, count: int) -> None:
        """Add the line of the mean loss over `count` held-out targets after `step` committed steps."""
        self._append("eval.jsonl", {"step": step, "loss": loss, "count": count})

    def summary(self, summary: Summary) -> None:
        """Write summary.json, the last file of a run."""
        self._replace("summary.json", json.dumps(finite(summary.as_json()), indent=2) + "\n")

    def rewind(self, step: int) -> None:
        """Drop the lines of steps from `step` on."""
        self.close()
        self._keep("metrics.jsonl", lambda line: line["step"] < step)
        self._keep("eval.jsonl", lambda line: line["step"] <= step)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open(self, name: str) -> TextIO:
        if name not in self._files:
            self._files[name] = (self.path / name).open("a", encoding="utf-8")
        return self._files[name]

    def _append(self, name: str, fields: Mapping[str, Any]) -> None:
        file = self._open(name)
        file.write(json.dumps(finite(fields)) + "\n")
        file.flush()

    def _replace(self, name: str, text: str) -> None:
        beside = self.path / f".{name}.new"
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.path / name)


def finite(value: Any) -> Any:
    """Return the value with None for infinities and NaN, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
