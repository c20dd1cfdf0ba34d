"""What tests and campaigns need of their environment. It is imported before torch, which reads it."""

from __future__ import annotations

import os
from pathlib import Path

import elaswave_fx  # noqa: F401  tells torch to load no extensions

# A process whose libraries have computed with several threads cannot fork ranks; `make test` says the same.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Exact runs are forked from processes that have multiplied matrices, in which MKL's branch cannot be chosen any more.
# MKL has the strict one on processors of its own maker only.
CPU = Path("/proc/cpuinfo").read_text()
os.environ.setdefault("MKL_CBWR", "AVX512,STRICT" if "GenuineIntel" in CPU and " avx512f " in CPU else "AUTO")
