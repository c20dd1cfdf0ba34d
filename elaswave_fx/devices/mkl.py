"""The choice of MKL's code branch for matrix products, if torch computes with MKL.

MKL selects code by memory alignment and number of threads, and bits may depend on them. Exact runs fix one branch, in
strict mode: small products take a tenth longer, large ones do not.

    fix_branch(); branch()  ->  "0x1000c"     MKL_CBWR_AVX512 | MKL_CBWR_STRICT
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from elaswave_fx.errors import ConfigError

VARIABLE = "MKL_CBWR"
"""MKL's own variable; a value that the user has set is kept."""

_AUTO, _AVX512_STRICT = 2, 12 | 1 << 16
_NAMES = {_AUTO: "AUTO", _AVX512_STRICT: "AVX512,STRICT"}
_ALL = -1
"""Argument of `mkl_cbwr_get`: the branch and whether it is strict."""


def fix_branch() -> None:
    """Fix the branch for this process and later forks. Raises ConfigError if a product has already used another."""
    library = _library()
    if library is None or os.environ.get(VARIABLE):
        return
    wanted = _AVX512_STRICT if _has_strict_branch() else _AUTO
    if library.mkl_serv_cbwr_set(wanted) and library.mkl_serv_cbwr_get(_ALL) != wanted:
        raise ConfigError(
            f"exact=true: this process has multiplied matrices before, by code whose bits depend on where they lie; "
            f"set {VARIABLE}={_NAMES[wanted]} before it starts"
        )


def branch() -> str:
    """The user's setting, else MKL's, the settings of `fix_branch` by their numbers; empty without MKL."""
    library = _library()
    set_by_user = os.environ.get(VARIABLE, "")
    if set_by_user or library is None:
        return next((f"{number:#x}" for number, name in _NAMES.items() if name == set_by_user), set_by_user)
    return f"{library.mkl_serv_cbwr_get(_ALL):#x}"


def _library() -> ctypes.CDLL | None:
    """The library of torch that contains MKL."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    library = ctypes.CDLL(str(path)) if path.exists() else None
    return library if hasattr(library, "mkl_serv_cbwr_set") else None


def _has_strict_branch() -> bool:
    """Whether MKL has the strict branch: on Intel processors only, whatever instructions others have."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            text = file.read(8192)
    except OSError:
        return False
    return "GenuineIntel" in text and " avx512f " in text
