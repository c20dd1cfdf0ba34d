"""A real run on a disk that fails at one write, for one write of the run after another (`make disk`).

    python -m tests.disk.campaign --every 20 --offset 3      a line of JSON per run; the first one counts the writes

Each run is checked: it ends with all steps, or it says why, and the same run goes on from what it has saved. Exit code
1 if one was not well.
"""

from __future__ import annotations

import argparse
import errno
import json
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from elaswave_fx.config.keys import Config
from elaswave_fx.control.store.ledger import standing
from tests.recovery.harness import Finished, Job
from tests.runs import small_config

SOURCE = Path(__file__).with_name("failing_disk.c")
STEPS = 8
RUN_S = 60.0
ERRORS = (errno.EIO, errno.ENOSPC)


class Disk:
    """The counter that the library shares with us: calls so far, the call that fails, its errno."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 24)

    def fail_at(self, call: int, error: int) -> None:
        self._memory[:] = struct.pack("QQQ", 0, call, error)

    @property
    def calls(self) -> int:
        return struct.unpack("QQQ", self._memory[:])[0]


def config(folder: Path, *words: str) -> Config:
    cache = f"cache.dir={folder.parent / 'cache'}"
    return small_config(
        "gpt_stdlib", "parallel.dp=2", f"steps={STEPS}", "checkpoint.every=3", "resume=auto", cache, *words
    )


def run(folder: Path) -> Finished:
    with Job(config(folder), folder) as job:
        return job.wait(RUN_S)


def check(failed: Finished, disk: Disk, losses: list[float]) -> str:
    """What became of the run; AssertionError if something was lost, or nothing was said."""
    said = failed.console
    assert not failed.orphans, f"orphans {failed.orphans}"
    assert "Traceback" not in said, said[-2000:]
    if failed.code == 0:
        assert [line["loss"] for line in failed.metrics] == losses, "a line is missing"
        assert [line["step"] for line in standing(failed.ledger)] == list(range(STEPS)), "a ledger line is missing"
        assert Path(failed.summary["model"]).exists()
        return "went on"
    last = said.rstrip().splitlines()[-1]
    assert last.startswith("error: "), said[-2000:]
    disk.fail_at(0, 0)
    again = run(failed.folder)
    assert again.code == 0, f"it cannot be gone on with: {again.console[-2000:]}"
    assert [line["loss"] for line in again.metrics] == losses, "a line is missing after it was gone on with"
    return f"ended: {last}"


def with_failing_disk(folder: Path) -> dict[str, str]:
    """The environment of a process for which `folder` lies on a disk that can be made to fail."""
    library, counter = folder / "failing_disk.so", folder / "counter"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    counter.write_bytes(bytes(24))
    runs = folder / "runs"
    runs.mkdir()
    return {"LD_PRELOAD": str(library), "FAILING_DISK_UNDER": str(runs), "FAILING_DISK_COUNTER": str(counter)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="fail so many writes apart")
    parser.add_argument("--offset", type=int, default=1, help="the first write that fails, counted from 1")
    options = parser.parse_args()
    if "FAILING_DISK_UNDER" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            again = [sys.executable, "-m", "tests.disk.campaign", *sys.argv[1:]]
            return subprocess.run(again, env={**os.environ, **with_failing_disk(Path(folder))}, check=False).returncode
    return campaign(Path(os.environ["FAILING_DISK_UNDER"]), options.offset, options.every)


def campaign(folder: Path, offset: int, every: int) -> int:
    disk = Disk(Path(os.environ["FAILING_DISK_COUNTER"]))
    run(folder / "warm")  # the program is in the cache from here on
    disk.fail_at(0, 0)
    whole = run(folder / "whole")
    calls, losses, bad = disk.calls, [line["loss"] for line in whole.metrics], 0
    assert whole.code == 0 and len(losses) == STEPS, whole.console
    print(json.dumps({"writes": calls}), flush=True)
    for call in range(offset, calls + 1, every):
        number = ERRORS[call // every % 2]
        place = folder / f"run-{call}"
        place.mkdir()
        disk.fail_at(call, number)
        failed = run(place)
        struck = disk.calls >= call
        try:
            result, well = check(failed, disk, losses), True
            shutil.rmtree(place)
        except AssertionError as error:
            result, well = str(error), False
            bad += 1
        line = {"write": call, "error": os.strerror(number), "struck": struck, "well": well, "result": result}
        print(json.dumps(line), flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
