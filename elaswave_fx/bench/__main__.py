"""`python -m elaswave_fx.bench NAME [--json FILE]`: run one benchmark and print its table."""

import argparse
import importlib
import os
import sys
from pathlib import Path

BENCHES = {"executor": "transformer blocks, forward and backward: native unit programs against eager autograd"}


def main() -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    listing = "\n".join(f"  {name:<12} {what}" for name, what in BENCHES.items())
    parser = argparse.ArgumentParser(
        prog="python -m elaswave_fx.bench",
        description="Compare elaswave_fx with a named peer, side by side in one run.",
        epilog=f"benchmarks:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=sorted(BENCHES), metavar="NAME", help="which benchmark")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the entries to FILE as well")
    arguments = parser.parse_args()
    if arguments.json is not None and not arguments.json.parent.is_dir():
        parser.error(f"--json {arguments.json}: no such folder {arguments.json.parent}")

    from elaswave_fx.bench.results import table, write_json

    bench = importlib.import_module(f"elaswave_fx.bench.{arguments.name}")
    entries = bench.run(lambda what: print(f"  measuring {what} …", file=sys.stderr, flush=True))
    print(f"{arguments.name}: {BENCHES[arguments.name]}")
    print(table(entries))
    if arguments.json is not None:
        write_json(arguments.json, entries)
    return 0


if __name__ == "__main__":
    sys.exit(main())
