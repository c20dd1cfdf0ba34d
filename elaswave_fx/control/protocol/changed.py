"""Values with some fields changed, as `dataclasses.replace` makes them, for those that are changed with every event.

In: a value of a frozen dataclass. Out: another one. A machine's state has dozens of fields, all of which `replace`
hands to the constructor again, one by one; that was a third of what a schedule of the simulator takes. Here the fields
of a class without slots are copied at once.

    replace(state, epoch=Epoch(4))  ->  the same state, in epoch 4
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

_Value = TypeVar("_Value")


def replace(value: _Value, /, **changes: Any) -> _Value:
    """Return the value with other fields. Raises `TypeError` for one that it does not have."""
    fields = getattr(value, "__dict__", None)
    if fields is None:
        return dataclasses.replace(value, **changes)  # type: ignore[type-var]
    if not fields.keys() >= changes.keys():
        raise TypeError(f"{type(value).__name__} has no field {', '.join(changes.keys() - fields.keys())}")
    changed = object.__new__(type(value))
    changed.__dict__.update(fields, **changes)
    return changed
