"""Devices by name, and what the CPU says about itself."""

import os
import subprocess
import sys

import pytest
import torch

from elaswave_fx.devices import make_device
from elaswave_fx.devices.fingerprint import difference
from elaswave_fx.errors import ConfigError


def test_cpu_memory_is_within_the_machine():
    device = make_device("cpu")
    device.set_up(threads=torch.get_num_threads())
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < device.memory_total_bytes() <= pages


def test_memory_beyond_what_a_step_takes_goes_back_to_the_system():
    code = """
from pathlib import Path
device.set_up(threads=1)
def resident_mib():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4 // 1024
def step(mib):
    held = [torch.ones(mib << 18) for _ in range(4)]
device.keep(400 << 20)
begin = resident_mib()
step(100)
kept = resident_mib() - begin
device.keep(40 << 20)
print(kept >= 390, resident_mib() - begin <= 140)
step(10)
print(resident_mib() - begin <= 140)
"""
    assert in_a_new_process(code).split() == ["True"] * 3


def test_fingerprint_says_what_decides_bits(monkeypatch):
    device = make_device("cpu")
    before = dict(device.fingerprint())
    assert before["torch"] == torch.__version__
    assert before["threads"] == str(torch.get_num_threads())
    assert before == dict(make_device("cpu").fingerprint())
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert {key for key, value in device.fingerprint().items() if value != before[key]} == {"mkl_cbwr"}


def in_a_new_process(code: str) -> str:
    """What it prints, where nobody has set MKL_CBWR."""
    words = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    code = f"import torch\nfrom elaswave_fx.devices import make_device\ndevice = make_device('cpu')\n{code}"
    return subprocess.run([sys.executable, "-c", code], env=words, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif("mkl" not in torch.__config__.show().lower(), reason="torch is built without MKL")
def test_products_of_exact_runs_come_from_one_branch_and_others_from_the_fastest() -> None:
    told = "device.set_up(1, {}); print(device.fingerprint()['mkl_cbwr'])"
    default, exact = (in_a_new_process(told.format(word)).strip() for word in ("False", "True"))
    assert default == "0x1", "MKL takes what it likes"
    assert exact in ("0x1000c", "0x2")


@pytest.mark.parametrize(("name", "number"), [("AVX512,STRICT", "0x1000c"), ("AUTO", "0x2"), ("AVX2", "AVX2")])
def test_a_branch_of_ours_is_told_alike_whoever_has_set_it(
    name: str, number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKL_CBWR", name)
    assert make_device("cpu").fingerprint()["mkl_cbwr"] == number


@pytest.mark.skipif("mkl" not in torch.__config__.show().lower(), reason="torch is built without MKL")
def test_a_branch_cannot_be_fixed_once_there_was_a_product() -> None:
    code = "torch.mm(torch.ones(9, 9), torch.ones(9, 9))\ntry: device.set_up(1, True)\nexcept Exception as e: print(e)"
    told = in_a_new_process(code)
    assert told.startswith(
        "exact=true: this process has multiplied matrices before, by code whose bits depend on where"
    )


def test_a_fingerprint_that_differs_is_told_by_its_item() -> None:
    here = make_device("cpu").fingerprint()
    assert difference(here, dict(here)) is None
    assert difference(here, {**here, "torch": "2.12.0"}) == f"torch is {torch.__version__}, and was 2.12.0 there"
    assert difference({}, {"mkl_cbwr": ""}) == "mkl_cbwr is not known, and was not set there"
    assert all(here[item] for item in ("processor", "instructions", "libraries", "c_library", "native"))


@pytest.mark.parametrize("name", ["cuda", "npu"])
def test_later_devices(name):
    with pytest.raises(ConfigError, match=f"device={name} is not available yet"):
        make_device(name)


def test_unknown_device():
    with pytest.raises(ConfigError, match="device=cpuu: is unknown; nearest valid: cpu"):
        make_device("cpuu")
