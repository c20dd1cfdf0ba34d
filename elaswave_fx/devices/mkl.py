"""Which of MKL's code multiplies matrices, where torch computes with MKL.

By itself MKL takes code by how memory is aligned and by the number of its threads, and bits may depend on them. For
exact runs one branch is fixed, strictly: that costs a tenth of the time of small products, and nothing of large ones.

    fix_branch(); branch()  ->  "0x1000c"     MKL_CBWR_AVX512 | MKL_CBWR_STRICT
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from elaswave_fx.errors import ConfigError

VARIABLE = "MKL_CBWR"
"""MKL's own; a user who sets it has the last word."""

_AUTO, _AVX512_STRICT = 2, 12 | 1 << 16
_ALL = -1
"""Of `mkl_cbwr_get`: the branch and whether it is strict."""


def fix_branch() -> None:
    """Have this process, and those forked from it, multiply with one branch from the first product on. ConfigError if
    there has been one already by another."""
    library = _library()
    if library is None or os.environ.get(VARIABLE):
        return
    wanted = _AVX512_STRICT if _has_strict_branch() else _AUTO
    if library.mkl_serv_cbwr_set(wanted) and library.mkl_serv_cbwr_get(_ALL) != wanted:
        raise ConfigError(
            f"exact=true: this process has multiplied matrices before, by code whose bits depend on where they lie; "
            f"set {VARIABLE}={'AVX512,STRICT' if wanted == _AVX512_STRICT else 'AUTO'} before it starts"
        )


def branch() -> str:
    """What the user has set, else what MKL has; empty without MKL."""
    library = _library()
    set_by_user = os.environ.get(VARIABLE, "")
    return set_by_user if set_by_user or library is None else f"{library.mkl_serv_cbwr_get(_ALL):#x}"


def _library() -> ctypes.CDLL | None:
    """The one that has MKL in it, which torch has loaded."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    library = ctypes.CDLL(str(path)) if path.exists() else None
    return library if hasattr(library, "mkl_serv_cbwr_set") else None


def _has_strict_branch() -> bool:
    """MKL has it on processors of its own maker only, whatever instructions those of others know."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            text = file.read(8192)
    except OSError:
        return False
    return "GenuineIntel" in text and " avx512f " in text
