"""Messages for errors of torch.export: the reason in one line, and a remedy."""

from __future__ import annotations

import re
import traceback
from types import FrameType

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.utils.rnn import PackedSequence

from elaswave_fx.program.below_autograd import BACKWARD
from elaswave_fx.program.dense import SPARSE_PRODUCT
from elaswave_fx.program.eager_answers import DETACHES_IN_PLACE

_DATA_DEPENDENT = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)
_WITHOUT_BRANCHES = (
    "to write that part with tensor operators and without data-dependent control flow, or to switch it off by an option"
)
OTHERWISE = "to write that part with other tensor operators, or to switch it off by an option"
_GUARD = re.compile(r"data-dependent expression (?P<asked>.+?) \(unhinted.*Size-like symbols: (?P<sizes>[^)]*)\)")
_PACKING = ("pack_padded_sequence", "pack_sequence", "pad_packed_sequence", "unpack_sequence")
_OF_SPARSE = re.compile(r"Sparse ?\w* ?[Tt]ensor|'Sparse\w*' backend")
_LEAKED = re.compile("fake tensor in the exported program constant's list")


def reason_and_way_out(error: Exception) -> tuple[str, str]:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    first = first.replace("self.model.", "self.")  # `Exportable.model`
    if isinstance(error, SyntaxError):
        return "an operator has an argument with the name of a Python keyword, as random_(from, to) has", (
            "torch.randint, or another operator in its place"
        )
    if any(_is_of_packed(frame) for frame, _ in traceback.walk_tb(error.__traceback__)):
        return "packed sequences have sizes that only the data tells", (
            "to give the padded sequences to the layer, and to mask what is padding in its output"
        )
    if BACKWARD in first:
        return first, "torch.autograd.grad, or torch.func.grad"
    if DETACHES_IN_PLACE in first:
        return first, "h = h.detach()"
    if (guard := _GUARD.search(first)) is not None:
        asked = guard["asked"]
        if guard["sizes"] != "none":
            return f"a mask as an index, nonzero() or the like gives as many values as the data has ({asked})", (
                "to multiply by the mask, torch.where, or -100 as the label of what does not count"
            )
        first = f"Python looks at a value that only the data tells, by an if, int(), float() or item() ({asked})"
        return first, _WITHOUT_BRANCHES
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        first = f"{error.func} looks at values that only the data tells"
    if isinstance(error, _DATA_DEPENDENT) or "data-dependent" in first:
        return first, _WITHOUT_BRANCHES
    if isinstance(error, RuntimeError) and _OF_SPARSE.search(first):
        return f"forward computes with a sparse tensor ({first})", f"the dense one, or, times h, {SPARSE_PRODUCT}"
    if isinstance(error, UnsupportedOperatorException):
        return f"torch cannot tell the shape of what {error.func} returns", (
            "another operator, or torch.library.register_fake for one of your own"
        )
    if "more than 1 value per channel" in first:
        return first, "parallel.granule=the samples that are normalized together"
    if isinstance(error, ValueError) and "values to unpack" in first:
        return first, "parallel.granule=the samples that it takes together, where it splits a batch in so many parts"
    if _LEAKED.search(first):
        return "it computes with a tensor that is made where an export does not see it", OTHERWISE
    return first, OTHERWISE


def _is_of_packed(frame: FrameType) -> bool:
    """Whether a frame of torch's packs sequences, or runs a recurrent layer on packed ones."""
    return frame.f_code.co_name in _PACKING or isinstance(frame.f_locals.get("orig_input"), PackedSequence)
