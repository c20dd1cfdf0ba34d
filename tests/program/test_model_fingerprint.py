"""fingerprint: equal for equal models in any process, different for what a forward pass can see."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elaswave_fx.models.gpt import GPT
from elaswave_fx.program.model_fingerprint import fingerprint
from tests.passes.models import Classifier, Tied

ROOT = Path(__file__).resolve().parent.parent.parent


def gpt(**options: Any) -> GPT:
    return GPT(**{"vocab_size": 16, "seq_len": 6, "layers": 1, "width": 16, "heads": 2, **options})


def test_values_of_parameters_do_not_count() -> None:
    torch.manual_seed(0)
    first = gpt()
    torch.manual_seed(1)
    assert fingerprint(first) == fingerprint(gpt())


@dataclass
class Options:
    scale: float
    names: frozenset[str] = frozenset({"alpha", "beta", "gamma", "delta", "epsilon"})


class Holder(Classifier):
    def __init__(self, held: Any) -> None:
        super().__init__(layers=1)
        self.held = held


def one(x: Any) -> Any:
    return x + 1


LAMBDAS = (lambda x: x + 1, lambda x: x + 2)


def two(x: Any) -> Any:
    return x + 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, 2),
        ("a", "b"),
        (torch.ones(3), torch.zeros(3)),
        (torch.ones(2, 3), torch.ones(3, 2)),
        (nn.functional, nn.init),
        (torch.eye(3).to_sparse(), torch.zeros(3, 3).to_sparse()),
        (torch.eye(3).to_sparse_csr(), torch.ones(3, 3).to_sparse_csr()),
        (torch.ones(3, device="meta"), torch.ones(4, device="meta")),
        (torch.float32, torch.bfloat16),
        (Options(1.0), Options(2.0)),
        ({"a": [1, 2]}, {"a": [1, 3]}),
        ({1, 2}, {1, 3}),
        (one, two),
        (LAMBDAS[0], LAMBDAS[1]),
        (functools.partial(one, 1), functools.partial(one, 2)),
        (nn.ReLU(), nn.GELU()),
    ],
)
def test_what_a_model_holds_counts(first: Any, second: Any) -> None:
    assert fingerprint(Holder(first)) == fingerprint(Holder(first))
    assert fingerprint(Holder(first)) != fingerprint(Holder(second))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.layers[0].requires_grad_(False),
        lambda model: setattr(model.layers[0].dropout, "p", 0.5),
        lambda model: model.layers.append(nn.Identity()),
        lambda model: model.register_buffer("extra", torch.zeros(1)),
        lambda model: model.to(torch.bfloat16),
    ],
    ids=["frozen", "dropout", "layer", "buffer", "dtype"],
)
def test_structure_counts(change: Callable[[Classifier], Any]) -> None:
    model = Classifier()
    before = fingerprint(model)
    change(model)
    assert fingerprint(model) != before


def test_ties_count() -> None:
    apart = Tied()
    apart.head.weight = nn.Parameter(apart.embed.weight.detach().clone())
    assert fingerprint(apart) != fingerprint(Tied())


def test_the_source_of_every_class_counts(tmp_path: Path) -> None:
    """A user's file that changes while its classes keep their names."""

    def load(body: str) -> nn.Module:
        path = tmp_path / "users_layer.py"
        path.write_text(
            f"from torch import nn\nclass Part(nn.Module):\n    def forward(self, x):\n        return {body}\n"
        )
        spec = importlib.util.spec_from_file_location("users_layer", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["users_layer"] = module
        spec.loader.exec_module(module)
        try:
            model = Holder(None)
            model.part = module.Part()
            return fingerprint(model)  # type: ignore[return-value]
        finally:
            del sys.modules["users_layer"]

    assert load("x + 1") == load("x + 1") != load("x + 2")


def test_it_is_the_same_in_every_process() -> None:
    """Sets and hashes of strings differ between processes; the fingerprint does not."""
    module = "tests.program.test_model_fingerprint"
    code = f"from {module} import *; print(fingerprint(everything()))"
    here = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONHASHSEED": "1", "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert here == fingerprint(importlib.import_module(module).everything())


def everything() -> Holder:
    model = Holder({"options": Options(1.0), "set": {"a", "b", "c", "d"}, "object": object(), "function": one})
    model.head = torch.compile(model.head)
    return model
