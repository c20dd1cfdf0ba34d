"""The keys under which a model's own state dict has its parameters and buffers, for checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elaswave_fx.build.state_dict import state_dict_names
from elaswave_fx.errors import ConfigError


class Tied(nn.Module):
    """Two names for one layer, a buffer that is not kept, an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = self.first
        self.register_buffer("kept", torch.ones(1))
        self.register_buffer("unkept", torch.ones(1), persistent=False)

    def get_extra_state(self) -> Any:
        return {"version": 3}


class Inner(nn.Module):
    """A state dict of one's own, which takes no arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)

    def state_dict(self) -> Any:  # type: ignore[override]
        return self.net.state_dict()


class Broken(nn.Linear):
    def state_dict(self, path: str) -> Any:  # type: ignore[override]
        raise OSError(path)


def test_a_tensor_has_all_the_names_that_the_state_dict_gives_it() -> None:
    names = {f"{layer}.{part}": f"first.{part}" for layer in ("first", "second") for part in ("weight", "bias")}
    assert state_dict_names(Tied()) == {**names, "kept": "kept"}


def test_a_state_dict_of_the_users_names_them_as_it_likes() -> None:
    assert state_dict_names(Inner()) == {"weight": "net.weight", "bias": "net.bias"}


def test_one_that_fails_is_refused_in_a_line() -> None:
    with pytest.raises(ConfigError, match=r"model: state_dict\(\) of Broken fails \(TypeError: .*checkpoints have its"):
        state_dict_names(Broken(2, 2))
