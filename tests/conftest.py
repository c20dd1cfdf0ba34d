"""What all tests share: golden files, rewritten by `pytest --update-golden`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import elaswave_fx  # noqa: F401  tells torch to load no extensions, before a test imports torch

# A process whose libraries have computed with several threads cannot fork ranks; `make test` says the same.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Exact runs are forked from processes that have multiplied matrices, in which MKL's branch cannot be chosen any more.
os.environ.setdefault("MKL_CBWR", "AVX512,STRICT" if " avx512f " in Path("/proc/cpuinfo").read_text() else "AUTO")

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what the tests produce")


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
