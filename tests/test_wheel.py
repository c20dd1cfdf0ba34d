"""A wheel built from the tree installs and runs outside of it, YAML and native module included."""

import contextlib
import fcntl
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@contextlib.contextmanager
def native_build_lock() -> Iterator[None]:
    """The lock that `make native` takes: one builder at a time in build/native."""
    lock = ROOT / ".venv" / "native.lock"
    if not lock.parent.exists():
        yield
        return
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the tree as it is, built with the build folder and the packages of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    with native_build_lock():
        subprocess.run([*command, "--wheel-dir", str(folder), str(ROOT)], check=True, env={**os.environ, "PATH": path})
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_the_package_its_passes_and_its_yaml(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"elaswave_fx"}
    passes = {f"elaswave_fx/{path.relative_to(ROOT)}" for path in (ROOT / "passes").glob("*.py")}
    assert {name for name in names if name.startswith("elaswave_fx/passes/")} == passes
    shipped = {name for name in names if name.endswith(".yaml")}
    wanted = {f"elaswave_fx/conf/{path.relative_to(ROOT / 'conf')}" for path in (ROOT / "conf").rglob("*.yaml")}
    wanted |= {f"elaswave_fx/conf/recipe/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")}
    assert shipped == wanted
    assert sum(name.startswith("elaswave_fx/_native.") and name.endswith(".so") for name in names) == 1


def test_wheel_runs_outside_the_tree(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*pip, str(wheel)], check=True)
    # -S leaves out the editable install of the tree, which would win over PYTHONPATH.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), sysconfig.get_path("platlib")])}
    train = [sys.executable, "-S", "-m", "elaswave_fx.train", "recipe=gpt_stdlib", "steps=7", "--cfg", "job"]
    shown = subprocess.run(train, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "steps: 7" in shown.stdout.splitlines()
    modules = "elaswave_fx._native", "elaswave_fx.train", "elaswave_fx.passes.lower"
    where = f"import torch, {', '.join(modules)}; print({', '.join(f'{name}.__file__' for name in modules)})"
    files = subprocess.run([sys.executable, "-S", "-c", where], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert files.returncode == 0, files.stderr
    assert all(line.startswith(str(target)) for line in files.stdout.split()), files.stdout
