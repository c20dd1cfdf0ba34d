"""Ranks that are killed one after another: `policies` and `goals`.

Proportional is the undisturbed step of the same run, times ranks before over ranks left.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from elaswave_fx.plan.plan import Plan
from tools.bench.gpt_job import EmulatedLanes
from tools.bench.recording import Recording, seconds
from tools.bench.scenarios import Comparison, Figures, Runs, Scenario, Side, Table, to_the_end
from tools.bench.staggered import staggered_step_s


def kills(ranks: Sequence[int], first: int, every: int) -> str:
    """The override by which ranks are killed in a backward pass, `every` steps apart from step `first` on."""
    faults = (f"{{step: {first + n * every}, rank: {rank}, phase: backward}}" for n, rank in enumerate(ranks))
    return f"faults=[{', '.join(faults)}]"


# --- policies: a step after one, two and three losses by every policy

POLICIES: Mapping[str, tuple[str, ...]] = {
    "ours": (),
    "recycle": ("lab.policy=recycle",),
    "drop_replica": ("lab.policy=drop_replica",),
    "smaller_batch": ("lab.policy=smaller_batch",),
    "restart": ("lab.policy=restart",),
    "ours without dataflow": ("lab.axes=[graph,frequency]",),
    "ours without graph": ("lab.axes=[dataflow,frequency]",),
    "ours without split": ("parallel.schedule=1f1b",),
}
"""`recycle` has units that stay, with the halves of backward wherever they pay."""

EVERY, SKIPPED = 5, 2
"""Steps from one loss to the next, and how many of them do not count: they are replayed, or wait for replicas."""

STEP_S = 2.2
"""About an undisturbed step: so long that what 16 ranks do on two cores besides waiting is a few hundredths of it."""

ROOM = 1.5
"""Memory of each rank, over what it needs while nobody is lost: a lane one stage shallower needs about 4/3 of it."""

NOISE, AS_PREDICTED, DROP_REPLICA, PROPORTIONAL = 0.99, 0.97, 1.15, (0.96, 0.95, None)
"""Targets: against all others; against the plan; against a policy; against proportional by losses."""


def policy(dp: int, pp: int, m: int, lost: Sequence[int], layers: int = 24, step_s: float = STEP_S) -> Scenario:
    """All policies begin with the same plan and memory, and lose the same ranks at the same steps."""
    lanes, steps = EmulatedLanes(dp, pp, m, layers, step_s), f"steps={EVERY * (len(lost) + 1)}"
    faults, rival = kills(lost, EVERY, EVERY), partial(to_the_end, may_fail=True)
    scripts = dict.fromkeys(POLICIES, rival) | {"ours": to_the_end}
    sides = {name: Side((*own, steps, faults), scripts[name]) for name, own in POLICIES.items()}
    return Scenario(
        lanes.name, lanes.gpt, sides, between_losses, tuple(_against_policies(len(lost))), partial(_policy_notes, lost),
        words=lanes.words, reference=Side((f"steps={EVERY}", "parallel.schedule=1f1b")), prepare=_with_room,
    )  # fmt: skip


def phases(run: Recording) -> list[tuple[float, float, Plan]]:
    """Phases: before the first loss, after it, …; fewer where the policy had no answer. The median of the steps, the
    step of the last plan, both in milliseconds, and that plan."""
    by_size: dict[int, list[tuple[float, int]]] = {}
    for line in run.metrics:
        by_size.setdefault(line["world_size"], []).append((line["step_ms"], line["epoch"]))
    plans = [run.plans[steps[-1][1]] for steps in by_size.values()]
    medians_ms = [statistics.median(ms for ms, _ in steps[SKIPPED:] or steps) for steps in by_size.values()]
    return [(ms, 1e3 * plan.predicted.step_s, plan) for ms, plan in zip(medians_ms, plans, strict=True)]


def between_losses(run: Recording) -> Figures:
    """`1 lost`: the step after one loss, and as long as the samples of the `whole batch` take at its rate: more where a
    policy leaves samples out, as `smaller_batch` and TorchFT do."""
    found, ranks = dict[str, float](), len(run.plans[0].ranks)
    for lost, (step_ms, predicted_ms, plan) in enumerate(phases(run)):
        work, name = plan.workload, f"{lost} lost"
        found |= {name: step_ms, f"{name}: as predicted": predicted_ms}
        found[f"{name}: proportional"] = found["0 lost"] * ranks / (ranks - lost)
        found[f"{name}: whole batch"] = step_ms * work.options.global_batch / work.samples
    return found


def _against_policies(losses: int) -> Iterator[Comparison]:
    yield Comparison("{case}, undisturbed: against 1f1b", "0 lost", "0 lost", target=NOISE, rival="reference")
    for count in range(losses + 1):
        lost = f"{count} lost"
        name = f"{{case}}, {lost}"
        yield Comparison(f"{name}: as predicted", lost, f"{lost}: as predicted", target=AS_PREDICTED)
        if count:
            yield Comparison(f"{name}: proportional", lost, f"{lost}: proportional", target=PROPORTIONAL[count - 1])
            for rival in list(POLICIES)[1:]:
                target = DROP_REPLICA if rival == "drop_replica" else NOISE
                yield Comparison(f"{name}: {rival}", lost, f"{lost}: whole batch", target=target, rival=rival)


def _room_mb(undisturbed: Recording) -> float:
    """Memory in MiB: `ROOM` of what the fullest rank of an undisturbed 1F1B plan needs, `ROOM`, in MiB."""
    most = max(cost.memory_bytes for cost in undisturbed.plans[0].predicted.ranks.values())
    return round(ROOM * most / 2**20, 4)


def _with_room(scenario: Scenario, undisturbed: Recording) -> Scenario:
    return replace(scenario, words=(*scenario.words, f"emulated.memory_mb={_room_mb(undisturbed)}"))


def _policy_notes(lost: Sequence[int], scenario: Scenario, runs: Runs) -> Iterator[str]:
    """What each did in its first turn. What ReCycle's staggered optimizer would bring to `recycle` is simulated."""
    room = f"{_room_mb(runs['reference'][0]):g} MiB a rank"
    yield from ("", f"{scenario.name}: {scenario.gpt.text()}; {room}; ranks {', '.join(map(str, lost))} are lost")
    for name in scenario.sides:
        found = phases(runs[name][0])
        for count, (step_ms, predicted_ms, plan) in enumerate(found):
            if count or name == "ours":
                work = plan.workload
                of_batch = f" for {work.samples} of {work.options.global_batch} samples" if work.skipped else ""
                took = f"{step_ms:.0f} ms{of_batch}, {step_ms / predicted_ms:.3f} of predicted"
                yield f"  {count} lost, {name}: {took}; {plan.reason}"
        if len(found) <= len(lost):
            yield f"  {len(found)} lost, {name}: no answer, the run ended"
    for count, (_, _, plan) in enumerate(phases(runs["recycle"][0])):
        gain = plan.predicted.step_s / staggered_step_s(plan)
        yield f"  {count} lost, recycle with its staggered optimizer (simulated): {gain:.3f} of recycle's throughput"


POLICY_TABLE = Table(
    rows=[
        policy(dp, pp, times * pp, lost)  # each stage keeps a rank, and some lane stays whole: all can answer
        for dp, pp, lost in ((4, 4, (5, 10, 7)), (2, 8, (10, 13, 15)))
        for times in (1, 2, 4, 8)
    ],
    tiny=[policy(2, 2, 2, (3,), layers=6, step_s=0.2)],
)

# --- goals: the mean step from a loss on, with goals in the background, in a stop, and with none

MODES = ("background", "blocking", "never")
"""Values of `lab.goals`."""


def goal(lanes: EmulatedLanes, lost: Sequence[int], memory_mb: float, before: int = 10, every: int = 50) -> Scenario:
    """Ranks are lost `every` steps apart, after `before`. All time from the last commit before a loss on counts, with
    recovery, sync and stops. `memory_mb`: 1.5 times what the fullest rank needs by the undisturbed 1F1B plan. Backward
    passes stay whole: plans are made in half a second then, while the ranks take the same cores.

    Each rank is a host. A link needs 0.3 to 0.4 s for the parameters of a stage: about what the exchange takes of a
    step, for whoever computes a unit exchanges its gradients over the same links. So a stall is never much longer than
    an exchange. What more there is to win are the steps after it: a rank without a replica of what it computes with is
    sent its parameters in every step."""
    steps = before + len(lost) * every
    words = (
        *lanes.words, f"emulated.memory_mb={memory_mb}", "emulated.link={latency_ms: 0.1, bytes_per_s: 2000000.0}",
        "parallel.schedule=1f1b", kills(lost, before, every),
    )  # fmt: skip
    gpt = replace(lanes.gpt, width=64, seq_len=8, ranks_per_host=1, tied=False)
    sides = {mode: Side((f"lab.goals={mode}",), lambda live: live.take(steps)) for mode in MODES}
    figures, notes = partial(from_losses_on, before, every), partial(_goal_notes, lost, before, every)
    return Scenario(lanes.name, gpt, sides, figures, tuple(_against_modes(len(lost))), notes, words)


def from_losses_on(before: int, every: int, run: Recording) -> Figures:
    """`whole`: the undisturbed step; `1 lost`: the mean of the steps from a loss to the next one."""
    steps_ms, ranks = [1e3 * taken for _, taken in seconds(run.steps)], len(run.plans[0].ranks)
    whole = statistics.median(steps_ms[: before - 1])
    found = {"whole": whole}
    for lost, first in enumerate(range(before - 1, len(steps_ms), every), 1):
        mean = sum(steps_ms[first : first + every]) / every
        found |= {f"{lost} lost": mean, f"{lost} lost: proportional": whole * ranks / (ranks - lost)}
    return found


def _against_modes(losses: int) -> Iterator[Comparison]:
    own = MODES[0]
    for lost in (f"{count} lost" for count in range(1, losses + 1)):
        name = f"{{case}}, {lost}"
        for mode in MODES:
            target = 0.95 if mode == own else None
            yield Comparison(f"{name}, {mode}: proportional", lost, f"{lost}: proportional", target=target, side=mode)
        for mode in MODES[1:]:
            yield Comparison(f"{name}, {own}: {mode}", lost, lost, target=1.0, side=own, rival=mode)


def _goal_notes(lost: Sequence[int], before: int, every: int, scenario: Scenario, runs: Runs) -> Iterator[str]:
    """The plans of the first turn, and how long their steps took."""
    victims = ", ".join(map(str, lost))
    yield from ("", f"{scenario.name}: {scenario.gpt.text()}; ranks {victims} are lost, {every} steps apart")
    for mode, (run, *_) in runs.items():
        whole, (first, *plans) = from_losses_on(before, every, run)["whole"], run.plans.values()
        yield f"  {mode}: an undisturbed step {whole:.0f} ms ({1e3 * first.predicted.step_s:.0f} predicted)"
        for plan in plans:
            steps_ms = [1e3 * taken for epoch, taken in seconds(run.steps) if epoch == plan.epoch]
            yield f"    epoch {plan.epoch}, {_steps_words(plan, steps_ms)}: {plan.reason}"


def _steps_words(plan: Plan, steps_ms: Sequence[float]) -> str:
    predicted = f"{1e3 * plan.predicted.step_s:.0f} ms predicted"
    if not steps_ms:
        return f"no step, {predicted}"
    rest = f", then {statistics.median(steps_ms[1:]):.0f}" if len(steps_ms) > 1 else ""
    return f"{len(steps_ms)} steps, the first {steps_ms[0]:.0f} ms{rest} ({predicted})"


GOAL_TABLE = Table(
    rows=[
        goal(EmulatedLanes(4, 4, 16, layers=15, step_s=1.2), lost=(5, 10), memory_mb=8.16),
        goal(EmulatedLanes(2, 8, 32, layers=23, step_s=1.2), lost=(10, 13), memory_mb=9.12),
    ],
    tiny=[goal(EmulatedLanes(2, 2, 2, layers=2, step_s=0.2), lost=(3,), memory_mb=64, before=3, every=6)],
)
