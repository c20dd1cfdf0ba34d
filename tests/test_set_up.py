"""What is built and run works on machines that have more, or less, than ours: torch with CUDA, extensions of torch that
cannot be loaded, a folder whose names are those of our sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.marks import slow

ROOT = Path(__file__).resolve().parent.parent
SMALL = ("recipe=two_tower", "data=synthetic", "global_batch=16", "steps=1", "parallel.dp=1", "parallel.pp=1")


def run(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command in `folder`, with the programs of this environment, and with our own torch setting not inherited."""
    inherited = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    environment = {**inherited, "PATH": path, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def train(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    here = ("hydra.run.dir=run", f"cache.dir={folder / 'cache'}")
    return run(folder, sys.executable, "-m", "elaswave_fx.train", *SMALL, *here, *words, **variables)


def torch_with_cuda(folder: Path) -> Path:
    """This environment's torch in `folder`, but its CMake files say, as those of a CUDA build do, that it has CUDA."""
    spec = find_spec("torch")
    assert spec is not None and spec.submodule_search_locations is not None
    real, made = Path(spec.submodule_search_locations[0]), folder / "torch"
    made.mkdir(parents=True)
    for entry in real.iterdir():
        if entry.name != "share":
            (made / entry.name).symlink_to(entry)
    shutil.copytree(real / "share", made / "share")
    config = made / "share" / "cmake" / "Caffe2" / "Caffe2Config.cmake"
    text = config.read_text().replace("if(0)", "if(1)").replace("CAFFE2_USE_CUDA 0", "CAFFE2_USE_CUDA 1")
    config.write_text(text.replace("if( AND NOT CAFFE2_USE_CUDA)", "if(1 AND NOT CAFFE2_USE_CUDA)"))
    assert "set(CAFFE2_USE_CUDA 1)" in config.read_text(), "torch's CMake files changed: this test would show nothing"
    return made


def test_the_native_module_needs_no_cuda_toolkit_where_torch_has_cuda(tmp_path: Path) -> None:
    torch = torch_with_cuda(tmp_path / "site")
    configure = ("cmake", "-S", str(ROOT / "native"), "-B", "build", "-G", "Ninja", "-DELASWAVE_TORCH=ON")
    done = run(tmp_path, *configure, f"-DPython_EXECUTABLE={sys.executable}", PYTHONPATH=str(torch.parent))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"-isystem {torch}/include" in (tmp_path / "build" / "compile_commands.json").read_text()


def test_an_extension_of_torch_that_cannot_be_loaded_stops_nothing(tmp_path: Path) -> None:
    site = tmp_path / "site"
    metadata = site / "torch_npu-2.13.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Name: torch_npu\nVersion: 2.13.0\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:load\n")
    (site / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')\n")
    plain = run(tmp_path, sys.executable, "-c", "import torch", PYTHONPATH=str(site))
    assert plain.returncode == 1 and "libhccl.so" in plain.stderr, plain.stderr
    done = train(tmp_path, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("is_package", [slow(True), False], ids=["package", "folder"])
def test_a_users_own_passes_are_found_beside_ours(is_package: bool, tmp_path: Path) -> None:
    (tmp_path / "passes").mkdir()
    shutil.copy(ROOT / "tests" / "passes" / "own_passes.py", tmp_path / "passes" / "mine.py")
    if is_package:
        (tmp_path / "passes" / "__init__.py").touch()
    done = train(tmp_path, "passes.extra=[{_target_: passes.mine.Seen}]")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass of yours: passes.mine.Seen{times=1}" in done.stdout
