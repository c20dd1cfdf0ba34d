"""Several processes with the same command are told from one, by what their launchers say in the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from elaswave_fx.config.compose import Job, load_config
from elaswave_fx.errors import ConfigError
from elaswave_fx.launch.process_launchers import started_copies
from elaswave_fx.train import train

SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
SEVERAL = {
    "torchrun": ({"LOCAL_RANK": "0", "RANK": "2", "WORLD_SIZE": "4"}, 4),
    "a pod of a PyTorchJob": ({"RANK": "1", "WORLD_SIZE": "2"}, 2),
    "srun": ({**SRUN, "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}, 2),
    "srun of an old Slurm": ({"SLURM_STEPID": "3", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, 8),
    "srun of fewer tasks than the job has": (
        {**SRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "3"},
        3,
    ),
    "mpirun of Open MPI": ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}, 2),
    "mpirun of MVAPICH2": ({"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "1"}, 2),
    "mpiexec of MPICH": ({"PMI_SIZE": "16", "PMI_RANK": "15"}, 16),
    "mpirun below srun": (
        {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "2", "PMI_RANK": "0"},
        2,
    ),
    "jsrun": ({"JSM_NAMESPACE_SIZE": "6", "JSM_NAMESPACE_RANK": "0"}, 6),
    "flux": ({"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "0"}, 2),
    "horovodrun": ({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"}, 2),
    "prun, of which no process but the first knows that it is not alone": ({"PMIX_RANK": "1"}, None),
    "aprun": ({"ALPS_APP_PE": "3"}, None),
}
ALONE = {
    "nobody": {},
    "one task of srun": {**SRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"},
    "one task of srun in a larger job": {
        **SRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1",
    },
    "a batch script with room for four tasks": {
        "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    },
    "a batch script whose step has a number": {"SLURM_STEP_ID": "4294967291", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
    "the shell of salloc": {
        "SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0",
    },
    "a task of a job array": {
        **SRUN, "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "9", "SLURM_PROCID": "0", "SLURM_NTASKS": "1",
    },
    "one process of mpirun": {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
    "a size without a number": {"WORLD_SIZE": "8"},
    "words": {"WORLD_SIZE": "all", "RANK": "0", "PMI_SIZE": "", "PMI_RANK": "0"},
}  # fmt: skip


@pytest.mark.parametrize(("environ", "count"), SEVERAL.values(), ids=SEVERAL)
def test_several_are_told_from_one(environ: dict[str, str], count: int | None) -> None:
    copies = started_copies(environ)
    assert copies is not None and copies.count == count


@pytest.mark.parametrize("environ", ALONE.values(), ids=ALONE)
def test_one_is_alone(environ: dict[str, str]) -> None:
    assert started_copies(environ) is None


@pytest.mark.parametrize("environ", [SEVERAL["srun"][0], SEVERAL["mpiexec of MPICH"][0], {"PMIX_RANK": "1"}])
def test_each_copy_is_refused_before_it_starts(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="train starts its ranks itself, and .* has started it .* times"):
        train(Job(load_config(["steps=1"]), tmp_path / "run", {}, ()))
    assert not (tmp_path / "run").exists()
