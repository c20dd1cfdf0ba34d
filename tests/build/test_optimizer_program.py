"""The optimizer as a program, and its time, are made once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elaswave_fx import _native
from elaswave_fx.build import optimizer_program
from elaswave_fx.build.optimizer_program import update_program, update_seconds
from elaswave_fx.config.compose import load_config
from elaswave_fx.optim.optimizer import AdamW, hyper_row


def test_the_optimizer_becomes_a_program_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"cache.dir={tmp_path}", "optimizer=adamw", "optimizer.weight_decay=0.1"]
    program = update_program(load_config(words))
    monkeypatch.setattr(optimizer_program, "trace_update", lambda optimizer: pytest.fail("traced again"))
    assert update_program(load_config(words)) == program
    with pytest.raises(pytest.fail.Exception, match="traced again"):
        update_program(load_config([*words, "optimizer.eps=1e-6"]))
    with pytest.raises(pytest.fail.Exception, match="traced again"):
        update_program(load_config([*words, "cache.enabled=false"]))

    ours = AdamW(weight_decay=0.1)
    param, grad = torch.randn(5), torch.randn(5)
    hyper = [torch.tensor(value) for value in hyper_row(ours, 0, 1e-3, "decay")]
    found = _native.Program(program).run([param, grad, *ours.init(param), *hyper])
    expected, state = ours.update(param, grad, ours.init(param), tuple(hyper[1:]))
    assert all(torch.equal(a, b) for a, b in zip(found, (expected, *state), strict=True))


def test_an_update_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"cache.dir={tmp_path}", "optimizer=sgd"]
    taken_s = update_seconds(load_config(words))
    assert 1e-11 < taken_s < 1e-6
    monkeypatch.setattr(_native, "update_seconds", lambda *how: pytest.fail("measured again"))
    assert update_seconds(load_config(words)) == taken_s
    (kept,) = tmp_path.glob("programs/update_seconds-*.json")
    kept.write_text(kept.read_text()[:-2] + "e")  # a file that was cut off
    for other in (["optimizer.weight_decay=0.2"], []):
        with pytest.raises(pytest.fail.Exception, match="measured again"):
            update_seconds(load_config([*words, *other]))
