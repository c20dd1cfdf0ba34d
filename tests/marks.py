"""Marks that tests share."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: object) -> Any:
    """Values of a parametrized test with which it takes long: `make test` leaves them out."""
    return pytest.param(*values, marks=pytest.mark.slow)
