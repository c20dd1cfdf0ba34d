"""What the recovery tests share: the undisturbed runs, made once per test process."""

from __future__ import annotations

import pytest
import torch

from tests.recovery.references import References


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    torch.set_num_threads(1)
    return References(tmp_path_factory.mktemp("references"))
