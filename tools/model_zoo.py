"""`python -m tools.model_zoo TYPES.yaml --out PAGE.md`: which Hugging Face architectures run, and how they divide.

Every type of the list is trained for some steps on one rank and on 2 x 2, from its configuration alone, with the same
data and seed; the losses have to agree. With 12 blocks it is then cut into units, which are spread over 2, 4 and 8
stages by their measured costs. The page is the outcome of one run; a type that fails is in it with its reason.

    - {type: gpt2, family: decoder, config: {n_embd: 64, n_layer: 2, n_head: 4}, deep: {n_layer: 12}}
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

STEPS = 20
LAYOUTS = ((1, 1), (2, 2))
LOSS_RTOL = 1e-5
STAGES = (2, 4, 8)
EFFICIENCY_WANTED, AT_STAGES = 0.9, 4
TIMEOUT_S = 600.0
TEXT = ("data=synthetic", "data.vocab_size=256", "seq_len=64")
IMAGES = ("data=digits",)


@dataclass(frozen=True)
class Entry:
    """One line of the list. `deep`: keys that make it deep enough to be worth dividing; `task`: what it is trained for,
    if that is not what the type does by default."""

    type: str
    family: str
    config: Mapping[str, Any]
    deep: Mapping[str, Any]
    task: str | None = None

    def overrides(self, deep: bool = False) -> list[str]:
        """Return the overrides that the command line would take."""
        options = {**self.config, **(self.deep if deep else {})}
        data = IMAGES if self.family == "vision" else TEXT
        words = [f"+model.config.{key}={json.dumps(value)}" for key, value in options.items()]
        task = [f"model.task={self.task}"] if self.task else []
        return ["model=hf", f"model.name={self.type}", *task, *data, "global_batch=8", "eval.every=0", *words]


@dataclass(frozen=True)
class Cuts:
    """How a type divides: `units`, `border_kb` per sample across the widest of the best borders at 4 stages, and as
    `efficiency` by number of stages the mean stage's time over the slowest one's."""

    units: int
    border_kb: float
    efficiency: Mapping[int, float]


@dataclass(frozen=True)
class Found:
    """What became of a type. `refusal` is None when it runs and agrees."""

    entry: Entry
    losses: Mapping[tuple[int, int], tuple[float, ...]]
    cuts: Cuts | None
    refusal: str | None


def survey(entries: Sequence[Entry]) -> Iterator[Found]:
    """One type after the other, each in processes of its own."""
    for entry in entries:
        losses: dict[tuple[int, int], tuple[float, ...]] = {}
        cuts = refusal = None
        for layout in LAYOUTS:
            losses[layout], refusal = _train(entry, layout)
            if refusal:
                break
        if refusal is None:
            refusal = _difference(losses)
        if refusal is None:
            cuts, refusal = _cut(entry)
        yield Found(entry, losses, cuts, refusal)


def _train(entry: Entry, layout: tuple[int, int]) -> tuple[tuple[float, ...], str | None]:
    dp, pp = layout
    with tempfile.TemporaryDirectory(prefix="elaswave-survey-") as folder:
        run = Path(folder) / "run"
        words = [f"steps={STEPS}", f"parallel.dp={dp}", f"parallel.pp={pp}", f"hydra.run.dir={run}"]
        refusal = _call(["-m", "elaswave_fx.train", *entry.overrides(), *words])
        if refusal is not None:
            return (), f"{dp}x{pp}: {refusal}"
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return tuple(json.loads(line)["loss"] for line in lines), None


def _difference(losses: Mapping[tuple[int, int], tuple[float, ...]]) -> str | None:
    first, *others = losses.values()
    for other in others:
        for step, (a, b) in enumerate(zip(first, other, strict=True)):
            if not math.isclose(a, b, rel_tol=LOSS_RTOL):
                return f"step {step}: loss {a!r} on one rank, {b!r} on 2x2"
    return None


def _cut(entry: Entry) -> tuple[Cuts | None, str | None]:
    with tempfile.TemporaryDirectory(prefix="elaswave-survey-") as folder:
        out = Path(folder) / "cuts.json"
        refusal = _call(["-m", "tools.model_zoo", "--cuts", str(out), *entry.overrides(deep=True)])
        if refusal is not None:
            return None, f"12 blocks: {refusal}"
        fields = json.loads(out.read_text())
    return Cuts(fields["units"], fields["border_kb"], {int(k): v for k, v in fields["efficiency"].items()}), None


def _call(words: Sequence[str]) -> str | None:
    """Run this interpreter; None if it ended well, else its last line."""
    try:
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"took more than {TIMEOUT_S:.0f} s"
    if done.returncode == 0:
        return None
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return said[-1].removeprefix("error: ") if said else f"exit code {done.returncode}"


def divide(overrides: Sequence[str]) -> dict[str, Any]:
    """Capture, cut and measure one configuration; the fields of `Cuts`."""
    import torch

    from elaswave_fx.build.builder import build
    from elaswave_fx.build.initial_plan import options_of
    from elaswave_fx.config.compose import load_config
    from elaswave_fx.passes.assign_stages import make_workload
    from elaswave_fx.plan.lanes.partition import crossing_bytes, minimax, slowest_stage

    torch.set_num_threads(1)
    config = load_config(list(overrides))
    with tempfile.TemporaryDirectory(prefix="elaswave-survey-") as folder:
        workload = make_workload(build(config, Path(folder), calibrate=True).artifact, options_of(config), 2)
    costs = [unit.forward_s + unit.backward_s for unit in workload.units]
    crossing = crossing_bytes(workload)
    efficiency, border = {}, 0.0
    for stages in STAGES:
        speeds = [1.0] * stages
        borders = minimax(costs, speeds, crossing=crossing)
        if borders is None:
            continue
        efficiency[stages] = sum(costs) / (stages * slowest_stage(costs, speeds, borders))
        if stages == AT_STAGES:
            border = max(crossing[at] for at in borders[1:-1]) / 1e3
    return {"units": len(costs), "border_kb": border, "efficiency": efficiency}


# --- The page


def page(found: Sequence[Found], command: str) -> str:
    """Markdown."""
    agree = [each for each in found if each.refusal is None]
    even = [each for each in agree if each.cuts and each.cuts.efficiency.get(AT_STAGES, 0.0) >= EFFICIENCY_WANTED]
    head = (
        "model type",
        "family",
        "loss, first and last quarter",
        "units",
        "kB per border",
        *(f"{n} stages" for n in STAGES),
    )
    rows = [_row(each) for each in agree]
    refused = [f"- `{each.entry.type}` ({each.entry.family}): {each.refusal}" for each in found if each.refusal]
    lines = [
        "# Hugging Face architectures",
        "",
        f"`{command}` made this page from `docs/model_types.yaml`. Each type is trained from its configuration alone",
        f"on one rank and on 2 x 2, {STEPS} steps with the same data and seed; losses agree to {LOSS_RTOL:g}. No",
        "source file names a model type. With 12 blocks a type is cut into units; the last columns are the mean",
        "stage's time over the slowest one's in the best partition by measured unit times, the border column what a",
        f"sample carries over the widest of its {AT_STAGES - 1} borders at {AT_STAGES} stages, both ways.",
        "",
        f"{len(agree)} of {len(found)} run and agree; "
        f"{len(even)} of them reach {EFFICIENCY_WANTED} at {AT_STAGES} stages.",
        f"{STEPS} steps on random tokens, or on a few digits, say nothing of how well a type learns.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *rows,
    ]
    if refused:
        lines += ["", "## Refused", "", *refused]
    return "\n".join(lines) + "\n"


def _row(each: Found) -> str:
    losses, cuts = each.losses[LAYOUTS[0]], each.cuts
    assert cuts is not None
    quarter = max(1, len(losses) // 4)
    shares = [f"{cuts.efficiency[n]:.2f}" if n in cuts.efficiency else "-" for n in STAGES]
    cells = (
        f"`{each.entry.type}`",
        each.entry.family,
        f"{fmean(losses[:quarter]):.3f} -> {fmean(losses[-quarter:]):.3f}",
        str(cuts.units),
        f"{cuts.border_kb:.1f}",
        *shares,
    )
    return "| " + " | ".join(cells) + " |"


def read_list(path: Path) -> list[Entry]:
    """The list of types."""
    from omegaconf import OmegaConf

    lines: Any = OmegaConf.to_container(OmegaConf.load(path))
    return [Entry(**line) for line in lines]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 when the page was written."""
    parser = argparse.ArgumentParser(prog="python -m tools.model_zoo", description=__doc__)
    parser.add_argument("--out", type=Path, help="the page to write; without it, it is printed")
    parser.add_argument("--only", help="types whose names contain this")
    parser.add_argument(
        "--cuts", type=Path, help=argparse.SUPPRESS
    )  # The survey asks itself for one type, in a process of its own.
    parser.add_argument("words", nargs="*", help="the list of types")
    options = parser.parse_args(arguments)
    if options.cuts is not None:
        options.cuts.write_text(json.dumps(divide(options.words)))
        return 0
    if len(options.words) != 1:
        parser.error("give one list of types, such as docs/model_types.yaml")
    entries = [each for each in read_list(Path(options.words[0])) if (options.only or "") in each.type]
    found = []
    for each in survey(entries):
        found.append(each)
        print(f"{each.entry.type}: {each.refusal or 'runs and agrees'}", file=sys.stderr, flush=True)
    text = page(found, "make models")
    if options.out is None:
        print(text, end="")
    else:
        options.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
