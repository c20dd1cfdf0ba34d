"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.native.ranks import Ranks
from tests.native.tiny import Model


@pytest.fixture(scope="module")
def model() -> Model:
    """The tiny model with samples along the first axis everywhere."""
    return Model.of(0)


@pytest.fixture
def started() -> Iterator[Callable[..., Ranks]]:
    """Starts `Ranks` and ends their processes after the test."""
    made: list[Ranks] = []

    def start(*args: Any, **more: Any) -> Ranks:
        made.append(Ranks(*args, **more))
        return made[-1]

    yield start
    for ranks in made:
        ranks.end()
