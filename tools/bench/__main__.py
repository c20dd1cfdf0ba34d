"""`python -m tools.bench NAME [--json FILE] [--repeats N] [--ranks 8,16]`: run one benchmark, print its table."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.bench.catalogue import BENCHES


def main(words: Sequence[str] | None = None) -> int:
    """Exit code of the command with these words, by default those that it was called with."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = make_parser()
    arguments = parser.parse_args(words)
    given = {name: value for name, value in vars(arguments).items() if name not in ("name", "json") and value}
    for option in given:
        if option not in BENCHES[arguments.name].takes:
            parser.error(f"--{option.replace('_', '-')}: {arguments.name} does not take it")
    for option, file in (("--json", arguments.json), ("--plot", arguments.plot)):
        if file is not None and not file.parent.is_dir():
            parser.error(f"{option} {file}: no such folder {file.parent}")

    from elaswave_fx.errors import ConfigError
    from tools.bench.results import Options, table, write_json
    from tools.bench.scenario_tables import TABLES

    bench = TABLES.get(arguments.name) or importlib.import_module(f"tools.bench.{arguments.name}")
    options = Options(**given)
    try:
        outcome = bench.run(lambda what: print(f"  measuring {what} …", file=sys.stderr, flush=True), options)
    except ConfigError as error:
        parser.error(str(error))
    print(f"{arguments.name}: {BENCHES[arguments.name].question}")
    print(table(outcome.entries))
    for note in outcome.notes:
        print(note)
    if arguments.json is not None:
        write_json(arguments.json, arguments.name, outcome.entries, words if words is not None else sys.argv[1:])
    return 0


def make_parser() -> argparse.ArgumentParser:
    listing = "\n".join(f"  {name:<18} {each.question}" for name, each in BENCHES.items())
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description="Compare elaswave_fx with a named peer, side by side in one run.",
        epilog=f"benchmarks:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=sorted(BENCHES), metavar="NAME", help="which benchmark")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write entries, commit and machine to FILE too; docs/results/NAME.json: for `make docs`",
    )
    parser.add_argument(
        "--repeats",
        type=_positive,
        metavar="N",
        help="paired runs; if not said 20, of startup 5, planner 9, executor by size, of recovery 24 points of a step",
    )
    parser.add_argument("--ranks", type=_numbers, metavar="N,…", help="numbers of ranks, where a benchmark has several")
    parser.add_argument(
        "--settings", type=_numbers, metavar="N,…", help="of TorchFT, by their places in the sweep; 0 are its defaults"
    )
    parser.add_argument("--resident-gb", type=float, metavar="G", help="memory of each rank besides the model's")
    parser.add_argument("--seeds", type=_positive, metavar="N", help="of convergence, so many from 0 on; if not said 5")
    parser.add_argument("--steps", type=_positive, metavar="N", help="of each run of convergence; if not said 120")
    parser.add_argument("--precision", type=_words, metavar="NAME,…", help="of convergence; if not said fp32,bf16")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw what convergence has found; by suffix")
    parser.add_argument(
        "--only", metavar="TEXT", help="cases of policies, goals or migration, by their names: '4x4, m=8'"
    )
    parser.add_argument("--tiny", action="store_true", help="a small model, to see that it runs; no figures to quote")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
