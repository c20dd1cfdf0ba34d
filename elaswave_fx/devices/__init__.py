"""Devices by name: `make_device("cpu")`."""

from collections.abc import Callable, Mapping

from elaswave_fx.config.validation import nearest
from elaswave_fx.devices.cpu import CpuDevice
from elaswave_fx.devices.device import Device
from elaswave_fx.devices.emulated import EmulatedDevice
from elaswave_fx.errors import ConfigError

__all__ = ["Device", "make_device"]

_DEVICES: Mapping[str, Callable[[], Device]] = {"cpu": CpuDevice, "emulated": EmulatedDevice}
_LATER = ("cuda", "npu")


def make_device(name: str) -> Device:
    """Create the device `name`. Raises `ConfigError` if it is unknown or not available yet."""
    if name in _DEVICES:
        return _DEVICES[name]()
    if name in _LATER:
        raise ConfigError(f"device={name} is not available yet")
    best = nearest(name, (*_DEVICES, *_LATER))
    raise ConfigError(f"device={name}: is unknown; nearest valid: {best or ', '.join(_DEVICES)}")
