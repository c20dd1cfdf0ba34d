"""Clocks are read, set, read back and put back; a file says how they stood, and whoever finds it can do that, too.

Of cpufreq a folder stands in for the kernel's, of NVML a module, of DCMI a library compiled here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from elaswave_fx.devices.clocks import make_actuator
from elaswave_fx.devices.clocks.actuator import Answer, Targets
from elaswave_fx.devices.clocks.ascend import AscendActuator
from elaswave_fx.devices.clocks.cpufreq import CpufreqActuator
from elaswave_fx.devices.clocks.emulated import EmulatedActuator
from elaswave_fx.devices.clocks.nvml import NvmlActuator
from elaswave_fx.devices.clocks.rank_clock import RankClock, restore_left_behind
from tests.devices.sysfs import limits, make_sysfs

# --- cpufreq


def cpufreq(root: Path, *processors: int) -> CpufreqActuator:
    return CpufreqActuator(processors, str(root))


def test_limits_of_processors_are_set_and_put_back(tmp_path: Path) -> None:
    make_sysfs(tmp_path, 3)
    actuator = cpufreq(tmp_path, 0, 2)
    before = actuator.read()
    assert before == {"limits_khz": {"0": [800_000, 3_000_000], "2": [800_000, 3_000_000]}}
    for mhz in (1500.0, 2500.0, 900.0, 3000.0):  # down, up, down, up
        assert actuator.set(mhz).outcome == "applied"
        assert limits(tmp_path, 0) == limits(tmp_path, 2) == (1000 * mhz, 1000 * mhz)
    assert limits(tmp_path, 1) == (800_000, 3_000_000)
    assert not isinstance(before, Answer)
    assert [actuator.restore(before).outcome for _ in range(2)] == ["applied", "applied"]
    assert limits(tmp_path, 0) == limits(tmp_path, 2) == (800_000, 3_000_000)


def test_the_lower_limit_is_never_above_the_upper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses such a write."""
    make_sysfs(tmp_path, 1)
    write, seen = Path.write_text, []

    def watched(path: Path, text: str, *args: Any) -> int:
        written = write(path, text, *args)
        low, high = limits(tmp_path, 0)
        seen.append(low <= high)
        return written

    monkeypatch.setattr(Path, "write_text", watched)
    actuator = cpufreq(tmp_path, 0)
    for mhz in (900.0, 2900.0, 1000.0):
        actuator.set(mhz)
    actuator.restore({"limits_khz": {"0": [800_000, 3_000_000]}})
    assert len(seen) == 8 and all(seen)


def test_a_machine_without_cpufreq_is_unsupported(tmp_path: Path) -> None:
    found = cpufreq(tmp_path, 0).read()
    assert found == Answer("unsupported", None, f"processor 0 has no clock under {tmp_path}")
    assert "without processors" in str(cpufreq(tmp_path).read())
    assert cpufreq(tmp_path, 0).set(1000.0).outcome == "unsupported"


def test_a_clock_that_is_shared_is_unsupported(tmp_path: Path) -> None:
    make_sysfs(tmp_path, 4, sharing=2)
    found = cpufreq(tmp_path, 2).read()
    assert found == Answer("unsupported", None, "processor 2 shares its clock with 3, which is not this rank's")
    assert not isinstance(cpufreq(tmp_path, 2, 3).read(), Answer)


def test_a_clock_that_goes_elsewhere_is_unsupported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_sysfs(tmp_path, 1)
    write = Path.write_text
    monkeypatch.setattr(Path, "write_text", lambda path, text: write(path, f"{round(int(text), -6)}\n"))
    found = cpufreq(tmp_path, 0).set(1400.0)
    assert found.outcome == "unsupported"
    assert found.why == "processor 0 stands between 1000000 and 1000000 kHz instead of 1400000 and 1400000"


def test_who_may_not_write_is_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_sysfs(tmp_path, 1)

    def denied(path: Path, text: str) -> int:  # Tests may run as root, whom no mode of a file stops.
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "write_text", denied)
    found = cpufreq(tmp_path, 0).set(1400.0)
    assert (found.outcome, found.mhz) == ("denied", None)
    assert "root may write it" in found.why


# --- NVML


class FakeNvml(ModuleType):
    """What of pynvml is used: two devices, one of which does not know locks."""

    NVML_CLOCK_SM, NVML_ERROR_NO_PERMISSION, NVML_ERROR_NOT_SUPPORTED = 1, 4, 3

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__({3: "Not Supported", 4: "Insufficient Permissions"}[value])
            self.value = value

    def __init__(self, is_root: bool = True) -> None:
        super().__init__("fake_nvml")
        self.is_root, self.open, self.locked = is_root, 0, {0: 0, 1: 0}

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceSetGpuLockedClocks(self, device: int, low: int, high: int) -> None:
        self._refuse(device)
        assert low == high
        self.locked[device] = low

    def nvmlDeviceResetGpuLockedClocks(self, device: int) -> None:
        self._refuse(device)
        self.locked[device] = 0

    def nvmlDeviceGetClockInfo(self, device: int, kind: int) -> int:
        assert kind == self.NVML_CLOCK_SM
        return self.locked[device] or 1980

    def _refuse(self, device: int) -> None:
        if device == 1:
            raise self.NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        if not self.is_root:
            raise self.NVMLError(self.NVML_ERROR_NO_PERMISSION)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "fake_nvml", fake)
    yield fake
    assert fake.open == 0


def test_clocks_are_locked_and_unlocked(nvml: FakeNvml) -> None:
    actuator = NvmlActuator(0, "fake_nvml")
    before = actuator.read()
    assert not isinstance(before, Answer)
    assert actuator.set(1410.0) == Answer("applied", 1410.0)
    assert nvml.locked == {0: 1410, 1: 0}
    assert actuator.restore(before) == Answer("applied", 1980.0)
    assert nvml.locked == {0: 0, 1: 0}


def test_who_is_not_root_is_denied(nvml: FakeNvml) -> None:
    nvml.is_root = False
    found = NvmlActuator(0, "fake_nvml").set(1410.0)
    assert found == Answer("denied", None, "device 0: Insufficient Permissions")


def test_a_device_without_locks_is_unsupported(nvml: FakeNvml) -> None:
    assert NvmlActuator(1, "fake_nvml").set(1410.0) == Answer("unsupported", None, "device 1: Not Supported")


def test_without_the_package_it_is_unsupported() -> None:
    found = NvmlActuator(0, "no_such_nvml").read()
    assert isinstance(found, Answer)
    assert found.outcome == "unsupported" and "nvidia-ml-py" in found.why


# --- Ascend

DCMI = """
int dcmi_init(void) { return 0; }
int dcmi_get_device_frequency(int card, int chip, int kind, unsigned int *mhz) {
  *mhz = 1800 + 10 * card + chip;
  return kind == 7 ? 0 : -1;
}
"""


@pytest.fixture(scope="module")
def dcmi(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("dcmi")
    (folder / "dcmi.c").write_text(DCMI)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libdcmi.so", folder / "dcmi.c"], check=True)
    return str(folder / "libdcmi.so")


def test_without_a_hook_the_clock_is_read_only(dcmi: str) -> None:
    actuator = AscendActuator(2, 1, library=dcmi)
    found = actuator.read()
    assert found == actuator.set(1000.0) == actuator.restore({})
    assert isinstance(found, Answer)
    assert (found.outcome, found.mhz) == ("unsupported", 1821.0)
    assert "no public call" in found.why
    assert AscendActuator(0, library="libnowhere.so").set(1000.0).mhz is None


def test_a_hook_of_the_vendor_sets_it(dcmi: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, float | None]] = []
    vendor = ModuleType("vendor_of_clocks")
    vendor.set_clock = lambda card, chip, mhz: calls.append((card, chip, mhz))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vendor_of_clocks", vendor)
    actuator = AscendActuator(2, 0, "vendor_of_clocks.set_clock", dcmi)
    assert actuator.read() == {}
    assert actuator.set(1000.0) == Answer("applied", 1820.0)
    assert actuator.restore({}) == Answer("applied", 1820.0)
    assert calls == [(2, 0, 1000.0), (2, 0, None)]
    assert "vendor_of_clocks.other" in AscendActuator(2, 0, "vendor_of_clocks.other", dcmi).set(1.0).why


def test_a_hook_may_refuse(dcmi: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(card: int, chip: int, mhz: float | None) -> None:
        raise PermissionError("ask the operator")

    vendor = ModuleType("vendor_of_clocks")
    vendor.set_clock = refuse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vendor_of_clocks", vendor)
    found = AscendActuator(0, 0, "vendor_of_clocks.set_clock", dcmi).set(1000.0)
    assert (found.outcome, found.mhz) == ("denied", 1800.0)


# --- A rank's clock and its file


def clock_of(run_dir: Path, root: Path, rank: int = 0) -> RankClock:
    return RankClock(cpufreq(root, rank), run_dir, rank)


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """The run directory and the kernel's folder."""
    run_dir, root = tmp_path / "run", tmp_path / "cpu"
    run_dir.mkdir()
    make_sysfs(root, 2)
    return run_dir, root


def test_the_file_is_there_before_the_clock_is_touched(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, root = places
    found: list[dict[str, Any]] = []

    def look(self: CpufreqActuator, mhz: float) -> Answer:
        assert limits(root, 0) == (800_000, 3_000_000)
        found.append(json.loads((run_dir / "clocks" / "rank-0.json").read_text()))
        return Answer("applied", mhz)

    monkeypatch.setattr(CpufreqActuator, "set", look)
    clock_of(run_dir, root).follow(1000.0)
    assert found == [
        {
            "actuator": "cpufreq",
            "numbers": {"processors": [0]},
            "before": {"limits_khz": {"0": [800_000, 3_000_000]}},
        }
    ]


def test_a_clock_follows_and_is_put_back(places: tuple[Path, Path]) -> None:
    run_dir, root = places
    clock = clock_of(run_dir, root)
    assert clock.restore() is None
    assert clock.follow(None) is None
    assert clock.follow(1000.0) == Answer("applied", 2000.0)  # what the folder says of the present clock
    assert clock.follow(1000.0) is None
    assert clock.follow(1200.0) is not None
    assert limits(root, 0) == (1_200_000, 1_200_000)
    assert clock.follow(None) is not None
    assert limits(root, 0) == (800_000, 3_000_000)
    assert not list(run_dir.rglob("*.json"))
    clock.follow(1000.0)  # and again
    assert limits(root, 0) == (1_000_000, 1_000_000)
    clock.restore()
    assert limits(root, 0) == (800_000, 3_000_000)


def test_a_clock_that_cannot_be_set_leaves_no_file(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, root = places
    monkeypatch.setattr(CpufreqActuator, "_write", lambda self, limits_khz: Answer("denied", None, "no"))
    clock = clock_of(run_dir, root)
    answer = clock.follow(1000.0)
    assert answer is not None and answer.outcome == "denied"
    assert not list(run_dir.rglob("*.json"))
    assert clock.restore() is None


def test_what_a_killed_rank_left_is_put_back(places: tuple[Path, Path]) -> None:
    run_dir, root = places
    for rank in (0, 1):
        clock_of(run_dir, root, rank).follow(1000.0)
    assert restore_left_behind(run_dir, Targets(str(root)), 1) == ["rank-1: its clock stands as before"]
    assert limits(root, 0) == (1_000_000, 1_000_000)
    assert limits(root, 1) == (800_000, 3_000_000)
    assert restore_left_behind(run_dir, Targets(str(root))) == ["rank-0: its clock stands as before"]
    assert limits(root, 0) == (800_000, 3_000_000)
    assert not (run_dir / "clocks").exists()
    assert restore_left_behind(run_dir, Targets(str(root))) == restore_left_behind(run_dir, Targets(str(root)), 0) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"actuator": "cpufreq", "numbers": {}, "before": {}}',
        '{"actuator": "cpufreq", "numbers": {"processors": [0]}, "before": {}}',
        '{"actuator": "cpufreq", "numbers": {"processors": [-1]}, "before": {"limits_khz": {"0": [1, 2]}}}',
        '{"actuator": "cpufreq", "numbers": {"processors": [0]}, "before": {"limits_khz": {"../0": [1, 2]}}}',
        '{"actuator": "unknown", "numbers": {}, "before": {}}',
        '{"actuator": 3}',
    ],
)
def test_a_damaged_file_is_said_and_kept(places: tuple[Path, Path], text: str) -> None:
    path = places[0] / "clocks" / "rank-0.json"
    path.parent.mkdir()
    path.write_text(text)
    (said,) = restore_left_behind(places[0], Targets(str(places[1])))
    assert said.startswith(f"{path}: does not say how a clock stood before")
    assert path.exists()


def test_the_file_calls_and_opens_nothing(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can write a file into a run directory says numbers, and no more."""
    called: list[str] = []
    planted = ModuleType("planted_by_somebody")
    planted.call = lambda *words: called.append("call")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "planted_by_somebody", planted)
    folder = places[0] / "clocks"
    folder.mkdir()
    hook, library = "planted_by_somebody.call", {"index": 0, "library": "planted_by_somebody"}
    records = [
        {"actuator": "ascend", "options": {"card": 0, "hook": hook}, "before": {}},
        {"actuator": "ascend", "numbers": {"card": 0, "hook": hook}, "before": {}},
        {"actuator": "ascend", "numbers": {"card": 0}, "before": {}, "hook": hook},
        {"actuator": "nvml", "numbers": library, "before": {"locked": False}},
        {"actuator": "cpufreq", "numbers": {"processors": [0], "root": "/etc"}, "before": {}},
    ]
    for rank, record in enumerate(records):
        (folder / f"rank-{rank}.json").write_text(json.dumps(record))
    said = restore_left_behind(places[0], Targets(str(places[1])))
    assert len(said) == len(records) and all("does not say how a clock stood before" in line for line in said), said
    assert not called


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_plain_file_is_not_read(places: tuple[Path, Path], kind: str) -> None:
    run_dir, root = places
    clock_of(run_dir, root).follow(1000.0)
    path = run_dir / "clocks" / "rank-0.json"
    path.rename(elsewhere := run_dir / "elsewhere.json")
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(elsewhere) if kind == "link" else path.mkdir()
    (said,) = restore_left_behind(run_dir, Targets(str(root)))
    assert "does not say how a clock stood before" in said
    assert limits(root, 0) == (1_000_000, 1_000_000)
    assert elsewhere.exists()


def test_a_hook_is_that_of_the_configuration(
    dcmi: str, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int, float | None]] = []
    vendor = ModuleType("vendor_of_clocks")
    vendor.set_clock = lambda *words: calls.append(words)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vendor_of_clocks", vendor)
    RankClock(AscendActuator(3, 0, "vendor_of_clocks.set_clock", dcmi), places[0], 0).follow(1000.0)
    (said,) = restore_left_behind(places[0], Targets())
    assert "cannot be put back: unsupported" in said and "power.hook" in said
    (said,) = restore_left_behind(places[0], Targets(hook="vendor_of_clocks.set_clock"))
    assert said == "rank-0: its clock stands as before"
    assert calls == [(3, 0, 1000.0), (3, 0, None)]


def test_a_clock_that_cannot_be_put_back_keeps_its_file(places: tuple[Path, Path]) -> None:
    run_dir, root = places
    clock_of(run_dir, root).follow(1000.0)
    os.rename(root, root.with_name("gone"))
    (said,) = restore_left_behind(run_dir, Targets(str(root)))
    assert said.startswith("rank-0: its clock cannot be put back: unsupported")
    os.rename(root.with_name("gone"), root)
    assert restore_left_behind(run_dir, Targets(str(root))) == ["rank-0: its clock stands as before"]


def test_the_emulated_clock_is_the_plans() -> None:
    actuator = make_actuator("emulated", {}, Targets())
    assert isinstance(actuator, EmulatedActuator)
    before = actuator.read()
    assert not isinstance(before, Answer)
    assert actuator.set(1000.0) == Answer("applied", 1000.0)
    assert actuator.restore(before) == Answer("applied", None)
