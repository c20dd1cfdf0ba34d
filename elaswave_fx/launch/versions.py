"""Versions that must be equal on all machines of a job.

versions()  ->  {"code of elaswave_fx": "3f0c…", "control": "7", "elaswave_fx": "0.1.0", "torch": "2.13.0"}

All commits between two releases have one version, so the code's digest counts too.
"""

from __future__ import annotations

from importlib import metadata

import elaswave_fx
from elaswave_fx.control.protocol.member_info import CONTROL_VERSION, OWN_CODE
from elaswave_fx.launch.code_digests import own_code


def versions() -> dict[str, str]:
    """Return this machine's versions, without importing torch."""
    return {
        OWN_CODE: own_code(),
        "control": CONTROL_VERSION,
        "elaswave_fx": elaswave_fx.__version__,
        "torch": metadata.version("torch").partition("+")[0],  # The rest names the build: cpu, a kind of CUDA.
    }
