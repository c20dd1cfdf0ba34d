"""What a run that lost ranks has to show at its end, against the same run that nobody disturbed.

    assert_survived(run, undisturbed, lost={3})

In: two finished runs of the same steps; the layouts may differ. A failure names the step, the figures, and the run's
folder, in which console.log tells the story.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from elaswave_fx.audit.compare import compare
from elaswave_fx.audit.finding import Verdict
from elaswave_fx.audit.lines import check_files
from elaswave_fx.audit.record import read_record
from elaswave_fx.config.keys import Config
from elaswave_fx.control.coordinator.plan_cache import Planner, skipped_by_plan
from elaswave_fx.control.store.ledger import covers_once, standing
from elaswave_fx.verify import Wanted, verify
from tests.recovery.harness import Finished
from tests.reference import relative_difference
from tests.runs import reference

LOSS_RTOL, PARAMETER_RTOL = 1e-5, 1e-4

RECOVERY_KEYS = {
    "cause", "rank", "step", "detect_ms", "plan_ms", "edit_ms", "transfer_ms", "mttr_ms", "steps_redone", "bytes_moved",
}  # fmt: skip


def assert_survived(
    run: Finished,
    undisturbed: Finished,
    lost: Collection[int],
    *,
    left: Collection[int] = (),
    rolled_back: bool = False,
    stopped: bool = False,
    loss_rtol: float = LOSS_RTOL,
    parameter_rtol: float = PARAMETER_RTOL,
) -> None:
    """All that contracts.md and protocol.md promise of a run that lost the ranks `lost`, and no other.

    `rolled_back`: no replica was left of something, and the run went back to an older state. `stopped`: the ranks lost
    never woke up, and were ended with the run. `left`: those that left as they were told.
    """
    assert_went_on(run, len(undisturbed.metrics), set(lost), set(left), rolled_back=rolled_back, stopped=stopped)
    assert run.summary["samples_skipped"] == 0, run.folder
    assert_same_arithmetic(run, undisturbed, loss_rtol, parameter_rtol)


def assert_went_on(
    run: Finished,
    steps: int,
    lost: set[int],
    left: Collection[int] = (),
    *,
    rolled_back: bool = False,
    stopped: bool = False,
) -> None:
    """Everything but the arithmetic, and how many samples steps had."""
    told = f"in {run.folder}:\n{run.console[-3000:]}"
    assert run.code == 0, f"exit code {run.code} {told}"
    assert run.summary["outcome"] == "completed", told
    assert not run.orphans, f"processes {run.orphans} outlived the launcher {told}"
    assert_every_step_once(run, steps)
    assert_same_members(run, lost, set(left), stopped)
    assert_recoveries(run, lost, rolled_back)


def assert_every_step_once(run: Finished, steps: int, first_step: int = 0) -> None:
    """One line per step in metrics and ledger; each ledger line covers the plane of its plan once, and metrics and
    summary count what it does."""
    assert [line["step"] for line in run.metrics] == list(range(steps)), run.folder
    (planned,) = [event for event in run.of_kind("planned") if event["epoch"] == 0]
    batch = planned["samples"]
    skipped = skipped_by_plan(Planner(replicas=1), (path.read_text() for path in run.folder.glob("plan-*.json")))
    wrong = covers_once(run.ledger, planned["units"], batch, first_step, steps, skipped)
    assert wrong is None, f"{wrong}, in {run.folder}"
    by_step = {line["step"]: batch - skipped.get(line["plan"], 0) for line in standing(run.ledger)}
    assert [line["samples"] for line in run.metrics] == [by_step[step] for step in range(steps)], run.folder
    summary = run.summary
    assert summary["steps"] == steps
    assert summary["samples_seen"] == sum(by_step.values()), run.folder
    assert summary["samples_seen"] + summary["samples_skipped"] == steps * batch, run.folder
    assert summary["samples_duplicated"] == 0, run.folder


def assert_same_members(run: Finished, lost: set[int], left: set[int], stopped: bool = False) -> None:
    """Processes were started once; those of the ranks lost are gone, and so are those that left as they were told; the
    others computed to the last step."""
    (started,) = run.of_kind("started")
    ranks = {int(rank) for rank in started["pids"]}
    ended = [event["rank"] for event in run.of_kind("left") if not event.get("asked")]
    assert sorted(ended) == ([] if stopped else sorted(lost)), f"{ended} were lost, not {sorted(lost)}, in {run.folder}"
    told = [event["rank"] for event in run.of_kind("left") if event.get("asked")]
    assert sorted(told) == sorted(left), f"{told} left, expected {sorted(left)}, in {run.folder}"
    last = max(standing(run.ledger), key=lambda line: line["step"])
    survivors = {int(rank) for rank in last["tiles"]}
    # An epoch with which the run ended, for somebody had just come, has no step.
    agreed = [set(event["members"]) for event in run.of_kind("agreed") if event["epoch"] <= last["epoch"]]
    members = agreed[-1] if agreed else ranks
    assert survivors == members, f"the last step is of {survivors}, the last epoch of {members}, in {run.folder}"
    # One that is killed after its last step may still be a member of the last epoch.
    assert ranks - lost - left <= survivors, (
        f"{ranks - lost - left - survivors} took no part at the end, in {run.folder}"
    )


def assert_recoveries(run: Finished, lost: set[int], rolled_back: bool) -> None:
    """Every loss is in the summary, with its times; a recovery redoes at most the step in flight."""
    recoveries: list[dict[str, Any]] = run.summary["recoveries"]
    named = {rank for recovery in recoveries for rank in recovery["ranks"]}
    assert named == lost, f"recoveries name {sorted(named)}, lost were {sorted(lost)}, in {run.folder}"
    for recovery in recoveries:
        assert recovery.keys() >= RECOVERY_KEYS, recovery
        for key in ("detect_ms", "plan_ms", "edit_ms", "transfer_ms"):
            value = recovery[key]
            assert value is not None and math.isfinite(value) and value >= 0, f"{key}: {recovery}, in {run.folder}"
        assert recovery["mttr_ms"] is not None and math.isfinite(recovery["mttr_ms"]), recovery
        if not rolled_back:
            redone = recovery["steps_redone"]  # not known if the coordinator died with the swap
            assert redone is None or 0 <= redone <= max(1, len(recovery["ranks"])), recovery
    for event in run.of_kind("agreed"):
        redone = event["steps_redone"]
        assert rolled_back or redone is None or redone <= 1, f"{event}, in {run.folder}"
        assert rolled_back or "rolled_back_to" not in event, f"{event}, in {run.folder}"


def assert_same_arithmetic(run: Finished, undisturbed: Finished, loss_rtol: float, parameter_rtol: float) -> None:
    """The same bits in everything if both are exact; else the same samples, and the rest up to rounding."""
    ours, theirs = read_record(run.folder), read_record(undisturbed.folder)
    if ours.exact and theirs.exact:
        assert_same_bits(run, undisturbed)
        return
    assert [line.step for line in ours.lines] == [line.step for line in theirs.lines]
    for mine, other in zip(ours.lines, theirs.lines, strict=True):
        assert (mine.content_hash, mine.count) == (other.content_hash, other.count), (
            f"step {mine.step}, in {run.folder}"
        )
    for mine, other in zip(run.metrics, undisturbed.metrics, strict=True):
        assert math.isclose(mine["loss"], other["loss"], rel_tol=loss_rtol), (
            f"loss of step {mine['step']}: {mine['loss']} against {other['loss']} undisturbed, in {run.folder}"
        )
        assert mine["lr"] == other["lr"], f"learning rate of step {mine['step']}, in {run.folder}"
    apart = relative_difference(run.tensors, undisturbed.tensors)
    assert apart < parameter_rtol, f"parameters differ by {apart:.2e} of their norm, in {run.folder}"


def assert_plain_arithmetic(run: Finished, config: Config, loss_rtol: float, parameter_rtol: float) -> None:
    """Losses and parameters are those of plain PyTorch with as many samples in each step as the run had, up to
    rounding; and what the run's record says is so."""
    plain = reference(config, [line["samples"] for line in run.metrics])
    for step, (mine, other) in enumerate(zip(run.losses, plain.losses, strict=True)):
        assert math.isclose(mine, other, rel_tol=loss_rtol), f"loss of step {step}: {mine}, {other}, in {run.folder}"
    tensors = {name: run.tensors[name] for name in plain.parameters}
    apart = relative_difference(tensors, plain.parameters)
    assert apart < parameter_rtol, f"parameters differ by {apart:.2e} of their norm, in {run.folder}"
    found = verify(Wanted(run.folder), lambda what, done, of: None)
    doubtful = [str(finding) for finding in found if finding.verdict is not Verdict.HOLDS]
    assert not doubtful, f"{doubtful}, in {run.folder}"


def assert_same_bits(run: Finished, undisturbed: Finished) -> None:
    """Of samples, random keys, counts, losses, norms and states in every step, held-out losses, the model's file."""
    ours, theirs = read_record(run.folder), read_record(undisturbed.folder)
    found = [*check_files(ours), *compare(ours, theirs, None)]
    wrong = [str(finding) for finding in found if finding.verdict is Verdict.WRONG]
    assert not wrong, f"{wrong}, in {run.folder}, against {undisturbed.folder}"
    for name in ("eval.jsonl", "model.safetensors"):
        mine, other = run.folder / name, undisturbed.folder / name
        assert mine.exists() == other.exists(), f"{name}, in {run.folder}"
        assert not mine.exists() or mine.read_bytes() == other.read_bytes(), f"{name} differs, in {run.folder}"
