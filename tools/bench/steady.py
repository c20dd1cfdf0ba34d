"""steady: step time with all fault tolerance on, over off; and what TorchFT adds to plain DDP, beside it.

On is what `train` runs: a copy of every box in another rank's memory (fp32 records), agents with heartbeats, every
commit's proof handed to the coordinator, the ledger on disk. Off: no copies, and agents that say goodbye before the
first step, so that no heartbeats, proofs or ledger lines are made; the coordinator idles. Launcher, engine, the vote
that rides on the step's last all-reduce and the hashes of its samples are the same in both. TorchFT runs with its
defaults. Each rank has one thread on all sides; the peers have the fused AdamW, and no launcher that writes metrics.
Jobs take turns, one of each kind per run; a run's sample is the median of its steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tools.bench.gpt_job import COMPUTE_BOUND, tiny
from tools.bench.own_job import Variant, run_steps
from tools.bench.results import Entry, Options, Outcome, Steps, cpu_line, in_turns, medians_ms, paired
from tools.bench.torch_job import ddp_steps, need_torchft, torchft_steps

REPEATS = 20
STEPS, WARM_UP = 6, 2
WANTED = 1 / 1.02

VARIANTS = {
    "on": Variant(),
    "off": Variant(("copies.count=0",), guarded=False),
    "copies alone": Variant(guarded=False),
}


def run(progress: Callable[[str], None], options: Options) -> Outcome:
    """The peer is `off` in each entry, plain DDP in the last one."""
    torch.set_num_threads(1)
    need_torchft()
    gpt = tiny(COMPUTE_BOUND) if options.tiny else COMPUTE_BOUND
    sides: dict[str, Callable[[], Steps]] = {
        **{name: partial(run_steps, gpt, variant, STEPS, WARM_UP) for name, variant in VARIANTS.items()},
        "TorchFT": partial(torchft_steps, gpt, STEPS, WARM_UP),
        "DDP": partial(ddp_steps, gpt, STEPS, WARM_UP),
    }
    jobs = in_turns(sides, options.repeats or REPEATS, progress)
    samples = {name: medians_ms(found) for name, found in jobs.items()}
    return Outcome(_entries(samples), ("", gpt.text(), cpu_line(jobs)))


def _entries(samples: dict[str, list[float]]) -> list[Entry]:
    off, ddp = samples["off"], samples["DDP"]
    return [
        paired("ours: all on, against off", samples["on"], off, "ms", WANTED),
        paired("ours: copies alone, against off", samples["copies alone"], off, "ms"),
        paired("TorchFT, against DDP", samples["TorchFT"], ddp, "ms"),
        paired("ours: all on, against DDP", samples["on"], ddp, "ms"),
    ]
