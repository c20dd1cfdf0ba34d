"""Models: our own, adapters for Hugging Face architectures, and `build_model`, which makes one from a configuration."""

from elaswave_fx.models.build import build_model
from elaswave_fx.models.losses import check_output

__all__ = ["build_model", "check_output"]
