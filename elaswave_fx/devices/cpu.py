"""The CPU as a device. Memory is the process's, as Linux counts it; its limit is the control group's."""

import ctypes
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.utils.deterministic

from elaswave_fx import _native
from elaswave_fx.devices.mkl import branch, fix_branch
from elaswave_fx.files import file_digest

_CLEAR_REFS = Path("/proc/self/clear_refs")
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_RESET_PEAK = "5"  # proc(5) describes it under clear_refs.

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""

_LIBRARIES = re.compile(r"(Intel\(R\) oneAPI Math Kernel Library Version \S+|Intel\(R\) MKL-DNN v\S+)")
"""The computing libraries, as `torch.__config__.show()` prints them."""

_DENORMAL = 1e-40

_AT_FIRST = 1 << 30
"""Freed bytes that the process keeps until `keep` gives the size of a step."""

_MOST = (1 << 31) - 1
"""The largest value that `mallopt` accepts."""

_BESIDES = 64 << 20
"""Memory of a step besides its activations, and fragmentation in the allocator."""


class CpuDevice:
    """A CPU; see `Device`."""

    name = "cpu"

    def __init__(self) -> None:
        self._kept = _AT_FIRST

    def set_up(self, threads: int, deterministic: bool = False) -> None:
        torch.set_num_threads(threads)
        if deterministic:
            fix_branch()
            # `torch.use_deterministic_algorithms` does the same, but imports torch's compiler: one second for every
            # rank.
            torch.set_deterministic_debug_mode("error")
            torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue] - nothing reads what nobody wrote
        _set_kept(self._kept)
        try:
            # A forked worker inherits its parent's peak.
            _CLEAR_REFS.write_text(_RESET_PEAK)
        except OSError:
            return  # Some containers have no such file: the peak is then an upper bound.

    def keep(self, step_bytes: int) -> None:
        kept, self._kept = self._kept, step_bytes + _BESIDES
        _set_kept(self._kept)
        if self._kept < kept:
            _c_function("malloc_trim", 0)

    def memory_total_bytes(self) -> int:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min([physical, *_cgroup_limits()])

    def fingerprint(self) -> Mapping[str, str]:
        features = torch.cpu.get_capabilities()
        return {
            "device": self.name,
            "processor": _cpu_model(),
            "instructions": " ".join(sorted(name for name, there in features.items() if there is True)),
            "torch": torch.__version__,
            "libraries": "; ".join(_LIBRARIES.findall(torch.__config__.show())),
            "c_library": " ".join(platform.libc_ver()),
            "native": file_digest(Path(_native.__file__)),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "mkl_cbwr": branch(),
            "onednn_isa": os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
            "denormals": "kept" if (torch.full((1,), _DENORMAL) * 1.0).item() else "flushed",
            "matmul_precision": _matmul_precision(),
            "onednn_precision": torch.backends.mkldnn.fp32_precision if torch.backends.mkldnn.is_available() else "",
            "threads": str(torch.get_num_threads()),
            "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        }


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # a model has set it by torch.backends, see `onednn_precision`
        return str(torch.backends.mkldnn.matmul.fp32_precision)  # type: ignore[attr-defined]


def _set_kept(kept: int) -> None:
    """Set how much freed memory the process keeps, since the system zeroes every new page. A block with its own mapping
    would be returned immediately."""
    _c_function("mallopt", _M_TRIM_THRESHOLD, min(kept, _MOST))
    _c_function("mallopt", _M_MMAP_THRESHOLD, _MOST)


def _c_function(name: str, *words: int) -> None:
    """Call a function of glibc; do nothing with other C libraries."""
    found = getattr(ctypes.CDLL(None), name, None)
    if found is not None:
        found(*words)


def _cgroup_limits() -> list[int]:
    found = []
    for path in _CGROUP_LIMITS:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            found.append(int(text))
    return found


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
