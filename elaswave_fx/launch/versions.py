"""What has to be the same wherever a job has ranks.

versions()  ->  {"control": "4", "elaswave_fx": "0.1.0", "torch": "2.13.0"}
"""

from __future__ import annotations

from importlib import metadata

import elaswave_fx
from elaswave_fx.control.protocol.card import CONTROL_VERSION


def versions() -> dict[str, str]:
    """Of this machine, without importing any of them."""
    return {
        "control": CONTROL_VERSION,
        "elaswave_fx": elaswave_fx.__version__,
        "torch": metadata.version("torch").partition("+")[0],  # the rest names the build: cpu, a kind of CUDA
    }
