"""What a process that joins has of the job: its files, as they were fetched, and folders that it must reach."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elaswave_fx.build.builder import build
from elaswave_fx.checkpoint.folder import mark
from elaswave_fx.config.keys import Config
from elaswave_fx.control.coordinator.file_server import SharedFile
from elaswave_fx.control.protocol.member_info import Conditions
from elaswave_fx.control.protocol.messages import Welcome
from elaswave_fx.control.wire import ControlAddress
from elaswave_fx.errors import ConfigError
from elaswave_fx.launch.job import BuildResult, WorkerInputs
from elaswave_fx.launch.job_facts import JobFacts
from elaswave_fx.launch.joined import JoinedContext, build_here, files_for_joiners
from elaswave_fx.launch.location import here
from elaswave_fx.passes.assign_stages import make_workload
from elaswave_fx.plan.make.planner import plan_lanes, uniform
from elaswave_fx.plan.work.options import PlanOptions
from elaswave_fx.plan.work.topology import Rank, local_topology
from elaswave_fx.program.artifact import Artifact
from elaswave_fx.worker.checkpoints import check_reach
from elaswave_fx.worker.join import plan_outside
from tests.runs import small_config


def test_who_joins_makes_no_model() -> None:
    """Neither the builder nor what captures and makes models is even imported."""
    seen = "[name for name in sys.modules if name.startswith(('elaswave_fx.build', 'elaswave_fx.models'))]"
    code = f"import sys; import elaswave_fx.worker.join; print({seen})"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_what_is_shared_is_all_that_a_rank_loads(tmp_path: Path) -> None:
    built = build(small_config("gpt_stdlib"), tmp_path / "job")
    assert built.state is not None
    shared = files_for_joiners(Artifact.copy_for_joiners(built.folder, built.state.parent), built.state)
    assert all(SharedFile.of(Path(file.path)) == file for file in shared.values())
    for name, file in shared.items():
        path = tmp_path / "here" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(Path(file.path).read_bytes())
    told = build_here(facts_of(tmp_path), tmp_path / "here")
    program = Path(told.data.artifact)
    assert Artifact.damage(program) is None and Artifact.load(program) == Artifact.load(built.folder)
    assert Path(told.data.state).read_bytes() == built.state.read_bytes()
    assert told.data.update == {} and told.units == 7


def test_what_is_shared_stays_as_it_is_whatever_other_runs_of_the_program_measure(tmp_path: Path) -> None:
    cache = f"cache.dir={tmp_path / 'cache'}"
    built = build(small_config("gpt_stdlib", cache), tmp_path / "job", calibrate=True)
    assert built.state is not None
    shared = files_for_joiners(Artifact.copy_for_joiners(built.folder, built.state.parent), built.state)
    Artifact.save_costs(built.folder, dict.fromkeys(built.artifact.measured, (9.0, 9.0, 9.0)))
    (built.folder / "rehearsal.json").write_text("{}")
    assert all(SharedFile.of(Path(file.path)) == file for file in shared.values())
    assert {name for name in shared if name.endswith("costs.json")} == {"program/costs.json"}
    assert "program/rehearsal.json" not in shared


def facts_of(run_dir: Path, data: Mapping[str, Any] | None = None) -> JobFacts:
    """Of a job whose store lies beside its run directory."""
    store = run_dir.parent / "elaswave-x7"
    inputs = WorkerInputs(artifact="", state="", update={}, fingerprint={}, **(data or {}))
    return JobFacts(
        build=BuildResult(plan="", units=7, samples=8, data=inputs), host="127.0.0.1", place=here(),
        run_dir=str(run_dir), store=str(store), folder="",
    )  # fmt: skip


def begun(run_dir: Path) -> Path:
    run_dir.mkdir()
    (run_dir / "control").symlink_to(run_dir.parent / "elaswave-x7")
    return run_dir


def test_a_run_directory_is_known_by_the_store_that_it_leads_to(tmp_path: Path) -> None:
    assert facts_of(begun(tmp_path / "run")).reach_run_dir
    assert not facts_of(tmp_path / "nothing").reach_run_dir
    (tmp_path / "other").mkdir()
    assert not facts_of(tmp_path / "other").reach_run_dir
    (tmp_path / "other" / "control").symlink_to(tmp_path / "elaswave-x8")
    assert not facts_of(tmp_path / "other").reach_run_dir, "another job's"
    (tmp_path / "ended" / "control").mkdir(parents=True)
    assert not facts_of(tmp_path / "ended").reach_run_dir


def check(config: Config, run_dir: Path, data: Mapping[str, Any]) -> None:
    facts = facts_of(run_dir, data)
    built = build_here(facts, Path("here"))
    address = ControlAddress("127.0.0.1", 1, "t")
    welcome = Welcome(Rank(2), facts.text(), ())
    check_reach(config, JoinedContext(welcome, facts, built, address, "127.0.0.1", here(), Conditions({}, "")))


def test_checkpoints_in_the_run_directory_need_it(tmp_path: Path) -> None:
    config = small_config("gpt_stdlib", "checkpoint.every=5")
    check(config, begun(tmp_path / "run"), {"mark": None})
    gone = tmp_path / "gone"
    with pytest.raises(
        ConfigError, match=f"^{gone}/checkpoints: the job's checkpoints go there, and this process cann"
    ):
        check(config, gone, {"mark": None})
    check(small_config("gpt_stdlib"), gone, {})


def test_a_folder_of_checkpoints_is_known_by_the_mark_of_the_job(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    place.mkdir()
    config = small_config("gpt_stdlib", f"checkpoint.dir={place}")
    data = {"mark": mark(place)}
    check(config, tmp_path / "gone", data)
    mark(place)
    with pytest.raises(ConfigError, match=f"^{place}: the job's checkpoints go there"):
        check(config, tmp_path / "gone", data)
    (place / ".job").unlink()
    with pytest.raises(ConfigError, match=f"^{place}: the job's checkpoints go there"):
        check(config, tmp_path / "gone", data)


def test_the_checkpoint_that_the_job_began_with_is_needed(tmp_path: Path) -> None:
    began = tmp_path / "earlier" / "checkpoints" / "step-5"
    with pytest.raises(ConfigError, match=f"^{began}: the job has begun with this checkpoint"):
        check(small_config("gpt_stdlib"), tmp_path / "gone", {"resume_from": str(began)})
    began.mkdir(parents=True)
    (began / "checkpoint.json").touch()
    check(small_config("gpt_stdlib"), tmp_path / "gone", {"resume_from": str(began)})


def test_from_outside_a_plan_is_that_of_the_others(tmp_path: Path) -> None:
    artifact = build(small_config("gpt_stdlib"), tmp_path).artifact
    plan = plan_lanes(make_workload(artifact, PlanOptions(8, micro_batch=1), 2), local_topology(2, 1), uniform(2, 1))
    seen = plan_outside(plan, Rank(1))
    assert seen.ranks == plan.ranks and not seen.tile(Rank(1)).units
    assert not any(1 in (*box.holders, *box.readers) for box in seen.boxes)
    assert any(1 in box.holders for box in plan.boxes)
