"""A folder that looks like the kernel's cpufreq."""

from __future__ import annotations

from pathlib import Path

LOWEST, HIGHEST = 800_000, 3_000_000


def make_sysfs(root: Path, processors: int, sharing: int = 1) -> None:
    """Processors with a clock of 0.8 to 3 GHz, of which every `sharing` neighbours have one in common."""
    for number in range(processors):
        folder = root / f"cpu{number}" / "cpufreq"
        folder.mkdir(parents=True)
        first = number // sharing * sharing
        (folder / "scaling_min_freq").write_text(f"{LOWEST}\n")
        (folder / "scaling_max_freq").write_text(f"{HIGHEST}\n")
        (folder / "scaling_cur_freq").write_text("2000000\n")
        (folder / "affected_cpus").write_text(" ".join(str(n) for n in range(first, first + sharing)) + "\n")


def limits(root: Path, number: int) -> tuple[int, int]:
    """The lower and the upper limit of a processor, in kHz."""
    folder = root / f"cpu{number}" / "cpufreq"
    return _khz(folder / "scaling_min_freq"), _khz(folder / "scaling_max_freq")


def _khz(path: Path) -> int:
    """Files of the kernel never look empty; this one does for a moment while it is written."""
    text = path.read_text()
    while not text:
        text = path.read_text()
    return int(text)
