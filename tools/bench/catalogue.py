"""What each benchmark asks: both sides, what is timed, what each side gets for free, its options and its duration.

    BENCHES["recovery"].peer  ->  "TorchFT 0.2.0, manual loop, eight settings"

The command line shows the questions; `docs/reference/benches.md` is made of all of it and of `docs/results/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One benchmark. `favours`: what one side gets for free; `takes`: its options besides --json; `minutes`: of a full
    run on a quiet machine with two cores."""

    question: str
    ours: str
    peer: str
    counted: str
    minutes: str
    takes: frozenset[str]
    favours: str = ""


def _takes(*options: str) -> frozenset[str]:
    return frozenset(options)


BENCHES: Mapping[str, Bench] = {
    "executor": Bench(
        question="transformer blocks, forward and backward: native unit programs against eager autograd and inductor",
        ours="native unit programs",
        peer="eager autograd; inductor (torch.compile, one shape)",
        counted="forward and backward of four blocks; compilation is not counted",
        minutes="3",
        takes=_takes("repeats", "tiny"),
    ),
    "communicator_edit": Bench(
        question="lose one rank: from the abort to checked exchanges in the new epoch, against gloo",
        ours="detects, agrees through a durable store, plans, installs the plan",
        peer="gloo, rebuilt whole or in part (new_group)",
        counted="from the first sign of a loss to the last survivor's bit-checked exchange",
        favours="gloo neither detects, agrees nor plans, and its store is never killed; ours has no step under way",
        minutes="4 + 6",
        takes=_takes("repeats", "ranks"),
    ),
    "messages": Bench(
        question="a message there and back: shared memory and TCP against gloo",
        ours="a link over shared memory, over TCP",
        peer="gloo, in the same processes",
        counted="messages there and back; 64 KB of a step behind 64 MB",
        minutes="4",
        takes=_takes("repeats", "tiny"),
    ),
    "pipeline": Bench(
        question="training steps of one pipeline, against torch.distributed.pipelining",
        ours="2 and 4 stages",
        peer="torch.distributed.pipelining, Schedule1F1B, gloo",
        counted="a training step",
        favours="Ours has shared memory and no fault tolerance; theirs has its batches ready and merges no outputs",
        minutes="8",
        takes=_takes("repeats", "tiny"),
    ),
    "copies": Bench(
        question="step time and bytes with a redo log in another rank's memory, with the whole state there, with none",
        ours="replicas by records, fp32 and bf16",
        peer="none; by the whole state",
        counted="a training step; bytes sent",
        minutes="7",
        takes=_takes("repeats", "tiny"),
    ),
    "steady": Bench(
        question="step time with all fault tolerance on, against off; and TorchFT against plain DDP",
        ours="what `train` runs",
        peer="the same without fault tolerance; TorchFT; plain DDP",
        counted="a training step",
        favours="DDP and TorchFT write no metrics and hash no samples",
        minutes="7",
        takes=_takes("repeats", "tiny"),
    ),
    "exact": Bench(
        question="what bits that do not depend on the layout cost: processor time, a lost rank, bytes",
        ours="exact=true, granules of 1, 2, 4, 8 samples",
        peer="the default mode, micro-batches of the same size",
        counted="processor time of a step; bytes; `verify` against the run",
        minutes="6",
        takes=_takes("repeats", "tiny"),
    ),
    "startup": Bench(
        question="the demo, from the command to its first step, cold and warm; a rank's memory against its parts",
        ours="the demo's recipe without a fault",
        peer="the target, or the sum of the parts",
        counted="from the command to the first line of metrics.jsonl, cold with an empty cache; peak memory of a rank",
        favours="Parts: an idle rank, and what the plan expects beyond it",
        minutes="2",
        takes=_takes("repeats", "tiny"),
    ),
    "recovery": Bench(
        question="SIGKILL at points of a step to the first commit after it, less a normal step, against TorchFT",
        ours="`train`, a rank killed from outside",
        peer="TorchFT 0.2.0, manual loop, the best of eight settings",
        counted="from SIGKILL to the first step committed without the victim, less a median step",
        favours="Notified: the launcher reports the exit, which TorchFT lacks (not notified: lab.exit_words=false); "
        "TorchFT's lighthouse is never killed, and its commit counts even without living ranks",
        minutes="38 in parts (--settings)",
        takes=_takes("repeats", "tiny", "settings", "resident_gb"),
    ),
    "policies": Bench(
        question="a step after one, two and three losses by every policy, on emulated ranks of one runtime",
        ours="16 emulated ranks that lose one, two, three",
        peer="other policies; ours without parts; proportional",
        counted="median step between two losses",
        favours="Policies are ours, not their authors' code; all have 1.5 times the memory that 1F1B "
        "needs, and `restart` pays nothing for a restart",
        minutes="8 for each of nine --only",
        takes=_takes("repeats", "tiny", "only"),
    ),
    "frequency": Bench(
        question="energy of a sample and length of a step: a clock for every rank against fixed ones, emulated",
        ours="8 emulated ranks, six clocks (1050 to 1800 MHz, 162 to 453 W)",
        peer="one clock, 1500 MHz at 300 W",
        counted="median step; joules by the clocks' watts (60 W while waiting), not measured",
        favours="Ours has the peer's power, or the least cap that promises its step",
        minutes="4",
        takes=_takes("repeats", "tiny"),
    ),
    "goals": Bench(
        question="50 steps from a loss on, against proportional: goals in the background, in a stop, none; emulated",
        ours="16 emulated ranks that lose two, lab.goals=background",
        peer="blocking; never; proportional",
        counted="mean of the 50 steps from a loss on",
        minutes="",
        takes=_takes("repeats", "tiny", "only"),
    ),
    "slow": Bench(
        question="one of eight emulated ranks at half of its speed: steps until it has less work, and their time then",
        ours="one of 8 emulated ranks at half speed; `train` beside busy processes",
        peer="proportional; no other plan",
        counted="steps until a plan gives the rank less work; median step after that",
        minutes="",
        takes=_takes("tiny"),
    ),
    "join": Bench(
        question="one more rank in a job of emulated ranks: all stops together against a step, and how long it takes",
        ours="4 and 16 emulated ranks, one more joins",
        peer="a step of the same run before",
        counted="extra time of the first steps of the joiner's epochs; time from its command",
        minutes="1",
        takes=_takes("ranks", "tiny"),
    ),
    "switch": Bench(
        question="a running job is given six layouts, one after the other: the pause, against checkpoint and restart",
        ours="4 ranks, and 16 emulated ones, reshaped to five layouts and back",
        peer="checkpoint, and a new job that resumes, warm",
        counted="extra time of the step with the stop",
        minutes="4",
        takes=_takes("tiny"),
    ),
    "migration": Bench(
        question="a planned change of lanes over slow links between hosts: what it stalls, in the background or not",
        ours="4 emulated ranks behind 250 Mbit/s (`tc tbf`; takes root), lab.goals=background",
        peer="blocking",
        counted="stall from the request to the last stop; longest step",
        minutes="20 in parts (--only)",
        takes=_takes("repeats", "tiny", "only"),
    ),
    "planner": Bench(
        question="processor time of plans with every rank's part, at first and after one loss, against the target",
        ours="plans of 50 equal units with four boxes each",
        peer="the target",
        counted="processor time; bounded: ranks have 1.6 times the memory that the fullest one needs",
        favours="The independent checker is not timed",
        minutes="1",
        takes=_takes("repeats", "tiny"),
    ),
    "shards": Bench(
        question="bytes and messages of random changes: a rank's boxes as runs of neighbours, against round-robin",
        ours="a rank's boxes as runs of neighbours, in random changes",
        peer="boxes dealt round-robin",
        counted="planned bytes of a change and messages of a step",
        minutes="1",
        takes=_takes("repeats", "tiny"),
    ),
    "convergence": Bench(
        question="how far losses of ranks lead training astray, against random draws by rank and a smaller batch",
        ours="two ranks killed, exact=true and the default",
        peer="lab.reshard_rng=false; a smaller batch, as TorchFT makes it",
        counted="deviation of losses from a run without failures, in nats",
        favours="A smaller batch keeps the other ranks' samples and draws, and loses no step",
        minutes="9",
        takes=_takes("tiny", "seeds", "steps", "precision", "plot"),
    ),
}
