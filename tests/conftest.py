"""What all tests share: golden files, rewritten by `pytest --update-golden`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest

import tests.environment  # noqa: F401  before a test imports torch

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what the tests produce")


def pytest_collection_finish() -> None:
    """Imported modules stay: collections during tests skip them, which saves a tenth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: the text equals tests/golden/NAME, or becomes it under --update-golden."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} does not exist; pytest --update-golden writes it"
        assert text == path.read_text(), f"{path} differs; pytest --update-golden accepts the new text"

    return compare
