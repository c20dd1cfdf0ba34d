"""`python -m elaswave_fx.reshape JOB LAYOUT`: request another layout for a running job. `--help` says more."""

from __future__ import annotations

import argparse
import sys

from elaswave_fx.control.agent.ask_to_reshape import ask_to_reshape
from elaswave_fx.control.coordinator.job_file import address_of
from elaswave_fx.entry import run_command
from elaswave_fx.errors import ConfigError
from elaswave_fx.plan.next.replan_request import ReshapeRequest

_HELP = """Change the layout of a running job.

JOB is the run directory of a job of yours on this machine, or tcp://HOST:PORT, where its coordinator listens
(launch.control_port), with the job's token in ELASWAVE_TOKEN, or in the file ELASWAVE_TOKEN_FILE (it stands in
RUN/control/job.json). LAYOUT is parallel.dp=N parallel.pp=N, as in a recipe, or the word best.

Training continues: the ranks receive replicas of the units that they will compute while steps go on, and a planned
reconfiguration switches to the layout. The command ends when the plan that leads there is in force; events.jsonl
shows the rest. A requested layout stays until a rank joins, leaves, fails or slows down.

Exit code: 0 when the plan is in force; 2, with one line, when the layout is impossible; 130 after Ctrl-C, when the
request may still be carried out."""

_KEYS = {"parallel.dp": "dp", "parallel.pp": "pp"}


def main(words: list[str]) -> int:
    """The command line above; returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m elaswave_fx.reshape", description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", metavar="JOB", help="the run directory, or tcp://HOST:PORT")
    parser.add_argument("reshape", metavar="LAYOUT", nargs="+", help="parallel.dp=N parallel.pp=N, or best")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="seconds to wait for an answer (default: 60)"
    )
    asked = parser.parse_args(words)
    print(ask_to_reshape(address_of(asked.job), reshape_of(asked.reshape), asked.timeout))
    return 0


def reshape_of(words: list[str]) -> ReshapeRequest:
    """Parse the layout of a command line. Raises `ConfigError` if it is invalid."""
    if words == ["best"]:
        return ReshapeRequest()
    found: dict[str, int] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key not in _KEYS:
            raise ConfigError(f"{word}: is not known here; nearest valid: parallel.dp=2 parallel.pp=2, or best")
        if not value.isdecimal() or int(value) < 1:
            raise ConfigError(f"{word}: must be a number of at least 1; nearest valid: {key}=1")
        found[_KEYS[key]] = int(value)
    missing = [key for key, name in _KEYS.items() if name not in found]
    if missing:
        raise ConfigError(f"{missing[0]}: is not given; nearest valid: {missing[0]}=1")
    return ReshapeRequest(**found)


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
