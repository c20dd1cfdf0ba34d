"""Refusal of a first forward pass that makes, replaces or removes layers or parameters.

if not hasattr(self, "head"): self.head = nn.Linear(…)     ->  CaptureError: forward makes head
self.act = nn.Identity()                                   ->  CaptureError: forward replaces act
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from elaswave_fx.errors import CaptureError


@contextmanager
def layers_kept(model: nn.Module) -> Iterator[None]:
    """Raise CaptureError on exit if the model has other layers or parameters than before."""
    before = _layers(model)
    yield
    now = _layers(model)
    for name in dict.fromkeys((*before, *now)):
        if before.get(name) is not now.get(name):
            does = "makes" if name not in before else "removes" if name not in now else "replaces"
            raise CaptureError(
                f"model: forward {does} {name} of {type(model).__name__}: its state is written before, and its program "
                "is captured once; a way out is to do that in the constructor"
            )


def _layers(model: nn.Module) -> dict[str, object]:
    named = (*model.named_modules(remove_duplicate=False), *model.named_parameters(remove_duplicate=False))
    return {name: each for name, each in named if name}
