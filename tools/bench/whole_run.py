"""A run of `train` from its first step to its last, in a child: what it learned, or whatever else its folder says.

whole_run(load_config(["recipe=gpt_stdlib", "eval.every=200"]))  ->  WholeRun(losses=(5.5, …), held_out=2.1)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import elaswave_fx.build.builder
import elaswave_fx.worker.loop  # noqa: F401 - both once, and not in every child
from elaswave_fx.config.compose import Job
from elaswave_fx.config.types import Config
from elaswave_fx.launch.channel import Channel
from elaswave_fx.launch.job import WorkerContext
from elaswave_fx.train import train
from tools.bench.processes import BenchFailed, Processes

RUN_TIMEOUT_S = 900.0
"""A run of many emulated ranks takes minutes."""

Work = Callable[[Config, WorkerContext], Mapping[str, Any] | None]
"""Does a rank's work and returns its share of the summary, as `run_worker`."""


@dataclass(frozen=True)
class WholeRun:
    """The mean loss of each step, and that of the held-out samples when they were looked at last."""

    losses: tuple[float, ...]
    held_out: float


def whole_run(config: Config, work: Work | None = None) -> WholeRun:
    """Train to the end. `work`: what each rank does, if not what it does for users. Raises BenchFailed."""
    with run_folder(config, work) as folder:
        return WholeRun(
            tuple(line["loss"] for line in lines_of(folder / "metrics.jsonl")),
            lines_of(folder / "eval.jsonl")[-1]["loss"],
        )


@contextmanager
def run_folder(config: Config, work: Work | None = None, may_fail: bool = False) -> Iterator[Path]:
    """Train to the end, and give the run's folder, for as long as the context lasts. Raises BenchFailed; `may_fail`:
    not where the run itself says that it cannot go on."""
    with Processes() as processes:
        folder = processes.folder / "run"
        folder.mkdir()

        def body(_: Channel) -> None:
            if train(Job(config, folder, {}, ()), work) != 0 and not may_fail:
                raise BenchFailed("bench: the run failed")

        processes.fork("train", body)
        processes.join("train", RUN_TIMEOUT_S)
        yield folder


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
