"""The clock of processors by Linux cpufreq: both limits of a policy are set to the target clock.

Source: Linux, Documentation/admin-guide/pm/cpufreq.rst ("Policy Interface in sysfs"). Processors of one policy share a
clock, so a rank's processors must form whole policies. Not run on hardware.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from elaswave_fx.devices.clocks.actuator import Answer, Numbers, Setting

_LOW, _HIGH, _CURRENT, _SHARED = "scaling_min_freq", "scaling_max_freq", "scaling_cur_freq", "affected_cpus"
_KHZ = 1000.0


class CpufreqActuator:
    """See `Actuator`. `processors`: those that this rank alone computes on; `root`: their folder in sysfs."""

    name: ClassVar[str] = "cpufreq"

    def __init__(self, processors: Sequence[int], root: str) -> None:
        self._processors, self._root = tuple(processors), root

    @property
    def numbers(self) -> Numbers:
        return {"processors": list(self._processors)}

    def read(self) -> Setting | Answer:
        missing = [number for number in self._processors if not self._file(number, _HIGH).exists()]
        if missing or not self._processors:
            which = f"processor {missing[0]} has" if missing else "a rank without processors of its own has"
            return Answer("unsupported", None, f"{which} no clock under {self._root}")
        try:
            for number in self._processors:
                sharing = {int(word) for word in self._file(number, _SHARED).read_text().split()}
                foreign = sorted(sharing - set(self._processors))
                if foreign:
                    why = f"processor {number} shares its clock with {foreign[0]}, which is not this rank's"
                    return Answer("unsupported", None, why)
            limits = {str(n): [self._khz(n, _LOW), self._khz(n, _HIGH)] for n in self._processors}
        except (OSError, ValueError) as error:
            return _answer_of(error)
        return {"limits_khz": limits}

    def set(self, mhz: float) -> Answer:
        wanted = round(_KHZ * mhz)
        return self._write({str(number): [wanted, wanted] for number in self._processors})

    def restore(self, setting: Setting) -> Answer:
        return self._write(setting["limits_khz"])

    def _write(self, limits_khz: Mapping[str, Sequence[int]]) -> Answer:
        try:
            for name, (low, high) in limits_khz.items():
                number = int(name)
                # The kernel refuses a lower limit above the upper one at any moment.
                upwards = low > self._khz(number, _HIGH)
                for limit, khz in ((_HIGH, high), (_LOW, low)) if upwards else ((_LOW, low), (_HIGH, high)):
                    self._file(number, limit).write_text(f"{khz}\n")
            return self._read_back({int(name): (low, high) for name, (low, high) in limits_khz.items()})
        except (OSError, ValueError) as error:
            return _answer_of(error)

    def _read_back(self, wanted: Mapping[int, tuple[int, int]]) -> Answer:
        """Check the limits, which drivers clamp to what the hardware supports."""
        mhz = self._khz(next(iter(wanted)), _CURRENT) / _KHZ
        for number, (low, high) in wanted.items():
            found = self._khz(number, _LOW), self._khz(number, _HIGH)
            if found != (low, high):
                why = f"processor {number} stands between {found[0]} and {found[1]} kHz instead of {low} and {high}"
                return Answer("unsupported", mhz, why)
        return Answer("applied", mhz)

    def _file(self, number: int, name: str) -> Path:
        return Path(self._root) / f"cpu{number}" / "cpufreq" / name

    def _khz(self, number: int, name: str) -> int:
        return int(self._file(number, name).read_text())


def _answer_of(error: OSError | ValueError) -> Answer:
    if isinstance(error, PermissionError):
        return Answer("denied", None, f"{error.filename}: {error.strerror}; root may write it")
    return Answer("unsupported", None, str(error))
