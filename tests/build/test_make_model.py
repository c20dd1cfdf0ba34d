"""The model of a configuration: what its parameters and buffers may be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from elaswave_fx.build.make_model import make_model
from elaswave_fx.config.compose import load_config
from elaswave_fx.data import open_source
from elaswave_fx.errors import CaptureError

GIVEN: dict[str, Tensor] = {}
"""What `Model` has as its part."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        part = GIVEN["part"]
        if isinstance(part, nn.Parameter):
            self.part = part
        else:
            self.register_buffer("part", part)


def made(part: Tensor, monkeypatch: pytest.MonkeyPatch, name: str = "Model") -> nn.Module:
    monkeypatch.setitem(GIVEN, "part", part)
    config = load_config(["data=digits", f"model._target_={__name__}.{name}"])
    return make_model(config, open_source(config).dataset)


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (nn.Parameter(torch.ones(3, dtype=torch.cfloat)), "the parameter part is complex.*torch.view_as_complex"),
        (frozen(torch.ones(3, dtype=torch.cfloat)), "the parameter part is complex.*or a buffer if it is not trained"),
        (frozen(torch.tensor([2**24 + 1])), r"the parameter part \(torch.int64\) has values that fp32"),
        (torch.ones(3, dtype=torch.cdouble), "part is in torch.complex128"),
        (torch.eye(3).to_sparse(), "part is a sparse_coo tensor"),
        (torch.eye(3).to_sparse_csr(), "part is a sparse_csr tensor"),
        (frozen(torch.eye(3).to_sparse()), "part is a sparse_coo tensor"),
        (torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8), "part is a quantized tensor"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "part is a nested tensor"),
        (torch.ones(3).to_mkldnn(), "part is a mkldnn tensor"),
        (torch.ones(3, device="meta"), "part is on the meta device"),
        (nn.Parameter(torch.ones(3, device="meta")), "part is on the meta device"),
    ],
)
def test_state_that_cannot_be_kept_is_refused(part: Tensor, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CaptureError, match=f"^model: {expected}"):
        made(part, monkeypatch)


@pytest.mark.parametrize(
    "part",
    [
        torch.ones(3, dtype=torch.cfloat),
        torch.tensor([2**24 + 1]),
        frozen(torch.arange(3)),
        frozen(torch.ones(3, dtype=torch.bool)),
        nn.Parameter(torch.ones(3, dtype=torch.double)),
    ],
)
def test_dense_state_that_fp32_or_a_buffer_holds_is_taken(part: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    assert dict(made(part, monkeypatch).state_dict())["part"].dtype == part.dtype


class Adapter(Model):
    """Gives what is to be trained alone, for an optimizer of it."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield self.head.weight


def test_a_model_that_gives_part_of_its_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    why = r"parameters\(\) of Adapter gives 1 of its 2 parameters; a way out is .*requires_grad_\(False\)"
    with pytest.raises(CaptureError, match=why):
        made(torch.ones(1), monkeypatch, "Adapter")
