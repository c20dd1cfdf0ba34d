"""`elaswave COMMAND …`: the commands of this package under one name, as `python -m elaswave_fx.COMMAND …` runs them."""

from __future__ import annotations

import os
import runpy
import sys

COMMANDS = {
    "train": ("elaswave_fx.train", "train a model; --help shows the keys of recipes"),
    "join": ("elaswave_fx.worker", "add this process to a job that runs, as one more rank"),
    "reshape": ("elaswave_fx.reshape", "ask a job that runs for another layout"),
    "inspect": ("elaswave_fx.inspect", "show what a recipe would run where, without running it"),
    "verify": ("elaswave_fx.verify", "hold a finished run against its ledger"),
    "timeline": ("elaswave_fx.timeline", "draw a recovery, or who computed what"),
}


def main() -> int:
    """Run a command; return 2 for an unknown one."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print("usage: elaswave COMMAND [ARGUMENTS]\n")
        print("\n".join(f"  {each:10} {words}" for each, (_, words) in COMMANDS.items()))
        print("\nelaswave COMMAND --help says more; python -m MODULE does the same: " + ", ".join(sorted(
            module for module, _ in COMMANDS.values())))  # fmt: skip
        return 0
    if name not in COMMANDS:
        print(f"error: elaswave {name}: no such command; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    module, _ = COMMANDS[name]
    if os.getcwd() not in sys.path and not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())  # as python -m does: user classes lie in the current folder
    sys.argv = [f"elaswave {name}", *sys.argv[2:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0  # the modules exit by themselves


if __name__ == "__main__":
    sys.exit(main())
