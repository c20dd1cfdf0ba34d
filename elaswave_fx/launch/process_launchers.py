"""Detection of several processes that a process launcher has started with the same command.

In: the environment, in which launchers set each process's number and their count. Out: the launcher, or None if the
process is the only one, as in a batch script that starts the command once, whatever tasks its allocation has.

    started_copies({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"})
        ->  Copies("mpirun", "OMPI_COMM_WORLD_SIZE=2", 2)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Copies:
    """`told`: the variable, with its value. `count`: number of processes, None if only this one's number is known."""

    launcher: str
    told: str
    count: int | None


@dataclass(frozen=True)
class _Launcher:
    """`sizes`: variables with the number of processes, of which the first that is set counts. `ranks`: variables with
    this process's number. One of these must be set: a size alone may belong to an allocation or a shell."""

    name: str
    sizes: tuple[str, ...]
    ranks: tuple[str, ...]


_LAUNCHERS = (
    _Launcher("torchrun or the like", ("WORLD_SIZE",), ("LOCAL_RANK", "RANK")),
    _Launcher("srun", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_PROCID",)),
    _Launcher("mpirun", ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_RANK",)),
    _Launcher("mpirun", ("MV2_COMM_WORLD_SIZE",), ("MV2_COMM_WORLD_RANK",)),
    _Launcher("mpirun", ("MVP_COMM_WORLD_SIZE",), ("MVP_COMM_WORLD_RANK",)),
    _Launcher("mpiexec", ("PMI_SIZE",), ("PMI_RANK",)),  # MPICH, Intel MPI, Cray PALS
    _Launcher("jsrun", ("JSM_NAMESPACE_SIZE",), ("JSM_NAMESPACE_RANK",)),
    _Launcher("flux", ("FLUX_JOB_SIZE",), ("FLUX_TASK_RANK",)),
    _Launcher("horovodrun", ("HOROVOD_SIZE",), ("HOROVOD_RANK",)),
    _Launcher("prun", (), ("PMIX_RANK",)),
    _Launcher("aprun", (), ("ALPS_APP_PE",)),
    _Launcher("mpiexec", (), ("PALS_RANKID",)),
)

_LAST_STEP = 0xFFFFFFEF
"""The highest step number of processes that srun starts; higher ones are a job's script, shell or prolog."""


def started_copies(environ: Mapping[str, str]) -> Copies | None:
    """Return the first launcher that started several processes; it may run below others with one each."""
    for launcher in _LAUNCHERS:
        if launcher.name == "srun" and not _is_step(environ):
            continue
        copies = _copies_by(launcher, environ)
        if copies is not None:
            return copies
    return None


def _copies_by(launcher: _Launcher, environ: Mapping[str, str]) -> Copies | None:
    rank = next((name for name in launcher.ranks if _number(environ, name) is not None), None)
    if rank is None:
        return None
    size = next((name for name in launcher.sizes if _number(environ, name) is not None), None)
    if size is None:
        number = _number(environ, rank)
        return Copies(launcher.name, f"{rank}={number}", None) if number and not launcher.sizes else None
    count = _number(environ, size)
    return Copies(launcher.name, f"{size}={count}", count) if count is not None and count > 1 else None


def _is_step(environ: Mapping[str, str]) -> bool:
    """Whether srun has started this process. Slurm also numbers a batch script and the shell of salloc, and sets the
    task count of their allocation."""
    step = _number(environ, "SLURM_STEP_ID")
    step = _number(environ, "SLURM_STEPID") if step is None else step
    return step is not None and step <= _LAST_STEP


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None
