"""How commands end in environments that nobody thought of: in one line, and in UTF-8."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from elaswave_fx import entry
from elaswave_fx.entry import End, end_of
from elaswave_fx.errors import CaptureError, PlanError

ROOT = Path(__file__).resolve().parent.parent

SCRIPT = """
import sys
from elaswave_fx.entry import run_command

def main():
    print("ü", sys.getfilesystemencoding(), *sys.argv[1:])
    for number in range(20_000):
        print(number)
    if "fails" in sys.argv:
        raise KeyError("größe")
    return 0

sys.exit(run_command(main))
"""


def run(folder: Path, *words: str, shell: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))}
    command = [sys.executable, "script.py", *words]
    return subprocess.run(
        ["bash", "-c", f'set -o pipefail; "$@" {shell}', "bash", *command], cwd=folder, capture_output=True,
        env={**clean, "PYTHONPATH": str(ROOT), **environ}, timeout=120, encoding="utf-8",
    )  # fmt: skip


@pytest.mark.parametrize(
    "environ",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0"},
        {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
        {},
    ],
    ids=lambda environ: " ".join(f"{name}={value}" for name, value in environ.items()),
)
def test_names_are_in_utf8_whatever_the_locale_says(environ: dict[str, str], tmp_path: Path) -> None:
    done = run(tmp_path, "überall", **environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "19999"
    if "PYTHONIOENCODING" not in environ:
        assert done.stdout.startswith("ü utf-8 überall\n")


@pytest.mark.parametrize("shell", ["| head -n 1", ">&-", "> /dev/full", "<&- >&- 2>&-"])
def test_nobody_has_to_read_what_a_command_says(shell: str, tmp_path: Path) -> None:
    done = run(tmp_path, shell=shell)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("environ", [{}, {"LC_ALL": "C", "PYTHONUTF8": "0"}, {"TMPDIR": "/nowhere"}])
def test_a_traceback_goes_to_a_file(environ: dict[str, str], tmp_path: Path) -> None:
    done = run(tmp_path, "fails", **environ)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: 'größe' (KeyError, {tmp_path / 'script.py'}, line 10); the traceback is in ")
    path = Path(line.rpartition(" ")[2])
    assert 'raise KeyError("größe")' in path.read_text(encoding="utf-8")
    path.unlink()


def interrupt() -> int:
    raise KeyboardInterrupt


def refuse() -> int:
    raise CaptureError("aten::nonzero\n  in block.3")


def plan() -> int:
    raise PlanError("no plan")


@pytest.mark.parametrize(
    ("command", "end"),
    [
        (lambda: 3, End(3)),
        (interrupt, End(130, "interrupted")),
        (refuse, End(2, "aten::nonzero in block.3")),
        (plan, End(1, "no plan")),
    ],
    ids=["ends", "interrupted", "refuses", "fails"],
)
def test_errors_of_ours_are_their_line(command: object, end: End) -> None:
    assert end_of(command) == end  # type: ignore[arg-type]


def test_a_traceback_that_no_folder_takes_costs_the_line_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*words: object) -> tuple[int, str]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkstemp", full)
    end = entry.end_of(lambda: 1 // 0, tmp_path)
    assert end.code == 1 and end.line.endswith("); no folder takes a file with the traceback")
    assert end.line.startswith("integer division or modulo by zero (ZeroDivisionError, ")
