"""Undisturbed runs to compare with: one per configuration, made when first asked for.

References(folder).of(config)   ->  the finished run of `config` without its faults; of an exact one, on a single rank
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from elaswave_fx.config.keys import Config
from tests.recovery.harness import Finished, finish


class References:
    """Owns `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: dict[str, Finished] = {}

    def of(self, config: Config) -> Finished:
        """The run of the same sizes and steps, and of the same layout unless that is to cost no bit."""
        plain = dataclasses.replace(config, faults=())
        if config.exact:
            alone = dataclasses.replace(plain.parallel, dp=1, pp=1)
            plain = dataclasses.replace(plain, parallel=alone, lab=dataclasses.replace(plain.lab, policy="elaswave"))
        key = repr(plain)
        if key not in self._runs:
            run = finish(plain, self._folder / f"undisturbed-{len(self._runs)}")
            assert run.code == 0, f"the undisturbed run fails, in {run.folder}:\n{run.console[-3000:]}"
            assert not run.of_kind("agreed"), f"an undisturbed run changed its epoch, in {run.folder}"
            self._runs[key] = run
        return self._runs[key]
