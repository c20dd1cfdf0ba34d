"""What the server of tests/commands.py imports after tests/environment.py; no collection of garbage scans it."""

import gc

import safetensors.torch  # noqa: F401

import elaswave_fx.build.builder
import elaswave_fx.worker.loop  # noqa: F401

gc.freeze()
