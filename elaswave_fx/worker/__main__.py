"""`python -m elaswave_fx.worker JOB [--host HOST]`: join a running job as one more rank. `--help` says more."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: one thread per rank
os.environ.setdefault("MKL_NUM_THREADS", "1")

from elaswave_fx.config.validation import refuse_non_utf8
from elaswave_fx.control.agent.ask_to_join import ask_to_join
from elaswave_fx.control.coordinator.job_file import address_of
from elaswave_fx.control.token import TOKEN, TOKEN_FILE
from elaswave_fx.entry import run_command
from elaswave_fx.errors import ElasWaveError, Excluded, HasLeft
from elaswave_fx.files import open_log
from elaswave_fx.launch.job_facts import JobFacts
from elaswave_fx.launch.versions import versions
from elaswave_fx.scheduling import collection_paused

ASK_S = 10.0
"""Timeout for an answer; a dead coordinator is replaced within seconds."""

_HELP = f"""Join a running job as one more rank.

JOB is the run directory of a job of yours on this machine, or tcp://HOST:PORT, where its coordinator listens
(launch.control_port), with the job's token in {TOKEN}, or in the file {TOKEN_FILE} (it stands in
RUN/control/job.json). The process opens its data, gets program and initial tensors from the coordinator, reaches the
other ranks, and then becomes a member between two steps. Ctrl-C before that costs the job nothing, and after it what
the loss of a rank costs. SIGTERM tells it to leave: its work and its replicas go to other ranks, then it ends, within
the job's launch.grace_s. So do SIGUSR1, SIGUSR2 and SIGXCPU, by which schedulers warn.

Exit code 0 when all steps of the job are committed, or it has left as it was told; 2 with one clear line when this
process cannot join, else 1."""


def main(words: list[str]) -> int:
    """The command line above; returns the exit code."""
    asked = _parser().parse_args(words)
    for option, value in (("--host", asked.host), ("--failure-domain", asked.failure_domain)):
        refuse_non_utf8(value or "", option)
    return _join(asked.job, asked.host, asked.failure_domain)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m elaswave_fx.worker", description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", metavar="JOB", help="the run directory, or tcp://HOST:PORT")
    parser.add_argument("--host", help="this machine as the other ranks reach it (default: the job's launch.host)")
    parser.add_argument(
        "--failure-domain", metavar="NAME",
        help="what this process fails with: a rack, a power supply (default: this machine); replicas go elsewhere",
    )  # fmt: skip
    return parser


def _join(job: str, host: str | None, failure_domain: str | None) -> int:
    address = address_of(job)
    here = versions()
    welcome = ask_to_join(address, here, ASK_S)
    print(f"rank {welcome.number} gets ready", flush=True)
    facts = JobFacts.read(welcome.facts)
    folder = Path(facts.folder)
    if folder.is_dir():
        os.chdir(folder)  # paths in the configuration may be relative
    sys.path.insert(0, os.getcwd())  # `_target_`s may be there
    with collection_paused():
        import torch

        from elaswave_fx.worker.join import run_joined

        gc.freeze()

    torch.set_num_threads(1)
    log = Path(facts.run_dir) / "logs" / f"rank-{welcome.number}.log"
    has_log = facts.reach_run_dir

    def say(line: str) -> None:
        print(line, flush=True)
        if has_log:
            with contextlib.suppress(OSError), os.fdopen(open_log(log), "a") as file:
                file.write(f"{time.monotonic():.3f} {line}\n")

    def leave_as_lost() -> None:
        """Let signals end the process immediately, even within a step; its peers detect that."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)

    try:
        ended = run_joined(welcome, facts, address, host, here, say, leave_as_lost, failure_domain)
    except HasLeft as left:
        say(str(left))
        return 0
    except Excluded as error:
        say(f"rank {welcome.number}: {error}; it joins anew, as another rank")
        _start_anew()
    except ElasWaveError as error:
        say(f"rank {welcome.number} ends: {type(error).__name__}: {error}")
        raise
    if ended is None:
        say(f"rank {welcome.number} was asked to leave, and has left")
        return 0
    done, steps = ended
    say(f"rank {welcome.number} has finished: {done} of {steps} steps are committed")
    return 0 if done >= steps else 1


def _start_anew() -> NoReturn:
    """Run the same command in the same process, which drops all state of the evicted rank."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "elaswave_fx.worker", *sys.argv[1:]])


def _run(words: list[str]) -> NoReturn:
    """Run the command and exit without closing links to other ranks, which would take that for an orderly end."""
    code = 1
    try:
        code = run_command(lambda: main(words))
    except SystemExit as usage:
        code = usage.code if isinstance(usage.code, int) else 1
    finally:
        os._exit(code)


if __name__ == "__main__":
    _run(sys.argv[1:])
