"""`python -m elaswave_fx.reshape JOB LAYOUT`: request another layout for a running job. `--help` says more."""

from __future__ import annotations

import argparse
import sys

from elaswave_fx.control.agent.ask_to_reshape import ask_to_reshape
from elaswave_fx.control.coordinator.job_file import address_of
from elaswave_fx.entry import run_command
from elaswave_fx.errors import ConfigError
from elaswave_fx.plan.next.replan_request import ReshapeRequest

_HELP = """Give a running job other lanes.

JOB is the run directory of a job of yours on this machine, or tcp://HOST:PORT, where its coordinator listens
(launch.control_port), with the job's token in ELASWAVE_TOKEN (it stands in RUN/control/job.json). WISH is
parallel.dp=N parallel.pp=N, as in a recipe, or the word best.

Training goes on: ranks get copies of what they will compute with behind the steps, and a planned stop takes the new
lanes. The command ends when the plan that leads there is in force; events.jsonl tells of the rest. Lanes that were
asked for stay until a rank comes, goes or slows down.

Exit code 0 when that is so, 2 with one clear line when it cannot be, 130 after Ctrl-C: what was asked for may be
carried out then."""

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
