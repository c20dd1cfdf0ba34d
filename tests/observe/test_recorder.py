"""What the recorder writes down once, although ranks may tell it twice."""

from __future__ import annotations

from pathlib import Path

from elaswave_fx.observe.recorder import Recorder


def test_an_evaluation_made_again_after_a_loss_is_one_line(tmp_path: Path) -> None:
    recorder = Recorder.create(tmp_path)
    recorder.planned("{}", units=2, samples=4, world=2)
    recorder.evaluation(4, 2.5, 32)
    recorder.evaluation(4, 2.5, 32)
    recorder.evaluation(8, 2.0, 32)
    assert [(line["step"], line["loss"]) for line in recorder.directory.lines("eval.jsonl")] == [(4, 2.5), (8, 2.0)]
    recorder.finish("completed", None)
