"""What the recorder writes down once, although ranks may tell it twice."""

from __future__ import annotations

import json
from pathlib import Path

from elaswave_fx.observe.job_events import Agreed
from elaswave_fx.observe.metrics import StepReport
from elaswave_fx.observe.recorder import Recorder


def test_an_evaluation_made_again_after_a_loss_is_one_line(tmp_path: Path) -> None:
    recorder = Recorder.create(tmp_path)
    recorder.planned("{}", units=2, samples=4, world=2)
    recorder.evaluation(4, 2.5, 32)
    recorder.evaluation(4, 2.5, 32)
    recorder.evaluation(8, 2.0, 32)
    assert [(line["step"], line["loss"]) for line in recorder.directory.lines("eval.jsonl")] == [(4, 2.5), (8, 2.0)]
    recorder.finish("completed", None)


def test_samples_that_earlier_steps_left_out_count_when_a_run_is_gone_on_with(tmp_path: Path) -> None:
    """Steps of another directory, here the first one, were seen whole."""
    run = tmp_path / "run"
    for first, computed in ((1, (4, 3)), (3, (3, 2, 4))):
        recorder = Recorder.create(run, first, same_run=first > 1)
        recorder.planned("{}", units=2, samples=4, world=2)
        for step, samples in enumerate(computed, first):
            report = {"loss": 1.0, "tokens": 8, "step_ms": 2.0, "lr": 0.1, "grad_norm": 0.5}
            recorder.step(StepReport(step=step, consumed=((0, 2, 0, samples),), **report))  # type: ignore[arg-type]
        recorder.finish("completed", None)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["samples_seen"], summary["samples_skipped"]) == (6, 4 + 7 + 9, 1 + 3)
    rejoined = Recorder.rejoin(run, 1, began_s=0.0)
    rejoined.finish("completed", None)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["samples_seen"], summary["samples_skipped"]) == (6, 20, 4)


def test_a_run_has_learned_when_one_of_its_steps_has(tmp_path: Path) -> None:
    recorder = Recorder.create(tmp_path, 3)
    recorder.planned("{}", units=2, samples=4, world=2)
    assert recorder.learned_nothing is None, "nothing was done"

    def step(number: int, unchanged: str | None) -> None:
        report = {"loss": 1.0, "tokens": 8, "step_ms": 2.0, "lr": 0.1, "grad_norm": 0.5}
        recorder.step(StepReport(step=number, consumed=((0, 2, 0, 4),), unchanged=unchanged, **report))  # type: ignore[arg-type]

    step(3, "the gradient is not finite")
    step(4, "no target counts")
    assert recorder.learned_nothing == "none of the 2 steps has changed a parameter: in the last one no target counts"
    step(5, None)
    step(6, "the gradient is not finite")
    assert recorder.learned_nothing is None
    recorder.event(Agreed(members=[0], lost=[], step=3, steps_redone=None, how=None, why="", rolled_back_to=3), 1)
    step(3, "the gradient is not finite")
    assert recorder.learned_nothing is not None, "what it had learned is undone"
    recorder.finish("failed", None)
