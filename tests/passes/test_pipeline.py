"""pipeline, assign_stages: the order of passes, their dumps, and the way to a plan."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, get_args

import pytest

from elaswave_fx.config.compose import load_config
from elaswave_fx.errors import ConfigError, PassError
from elaswave_fx.plan.topology import local_topology
from elaswave_fx.program.ir import Program, calls
from passes.assign_stages import AssignStages, make_workload
from passes.pipeline import back_passes, front_passes, render, run_passes
from passes.recompute import Policy
from tests.passes.compiled import artifact_of, captured
from tests.passes.models import Classifier, vectors
from tests.passes.zoo import compiled

ORDER = [
    *("normalize", "replicate_invariants", "recognize_causal", "expand_attention", "rewrite_rng", "fold_buffers"),
    *("estimate_cost", "find_cuts", "cut_units", "differentiate", "simplify", "choose_kernels"),
    "recompute",
]


def test_every_pass_is_a_frozen_value_with_a_name_and_a_reason() -> None:
    passes = (*front_passes(), *back_passes("none"))
    assert [step.name for step in passes] == ORDER
    for step in passes:
        assert dataclasses.is_dataclass(step) and (type(step).__doc__ or "").split("\n")[0].endswith(".")
        assert type(step).__module__ == f"passes.{step.name}"
        with pytest.raises(dataclasses.FrozenInstanceError):
            step.name = "other"  # type: ignore[misc]


def test_the_runner_dumps_numbered_graphs(tmp_path: Path) -> None:
    program, front = run_passes(captured(Classifier(layers=1), vectors, 1), front_passes(), tmp_path)
    program, back = run_passes(program, back_passes("none"), tmp_path, first=len(front.seconds))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{i:02d}-{name}.txt" for i, name in enumerate(ORDER)]
    assert (tmp_path / "12-recompute.txt").read_text() == render(program)
    assert [name for name, _ in (*front.seconds, *back.seconds)] == ORDER
    assert "0x" not in "".join(path.read_text() for path in tmp_path.iterdir()), "no addresses"


@dataclass(frozen=True)
class Forgetful:
    """Loses the value of a call."""

    name: ClassVar[str] = "forgetful"

    def apply(self, program: Program) -> Program:
        program = program.clone()
        next(calls(program.graph.graph)).meta.pop("val")
        return program


def test_the_runner_verifies_after_every_pass() -> None:
    with pytest.raises(PassError, match="^forgetful: node .* has no value"):
        run_passes(compiled("fused axes").program, (Forgetful(),))


def test_passes_leave_their_argument_alone() -> None:
    program = captured(Classifier(layers=1), vectors, 1)
    before = render(program)
    run_passes(program, front_passes())
    assert render(program) == before


def test_stages_are_assigned_to_an_artifact() -> None:
    artifact = artifact_of(compiled("gpt"))
    plan = AssignStages(dp=2, pp=2).apply(artifact, local_topology(4), global_batch=8, state_tensors=2)
    assert len(plan.tiles) == 4
    assert {tile.units.lo for tile in plan.tiles} == {0, next(t.units.hi for t in plan.tiles if t.units.lo == 0)}
    with pytest.raises(ConfigError, match="parallel.pp=9"):
        AssignStages(dp=1, pp=9).apply(artifact, local_topology(9), global_batch=8, state_tensors=2)


def test_what_does_not_fit_names_what_takes_the_memory() -> None:
    artifact = artifact_of(compiled("tied"))
    message = (
        r"does not fit in memory: .*; the largest parameter is layer.up.weight in unit \d+ \(256 elements\), most is "
        r"kept for backward by unit \d+ .*; recompute=full, precision=bf16 or copies.count=0 need less$"
    )
    with pytest.raises(ConfigError, match=message):
        AssignStages(dp=1, pp=1).apply(artifact, local_topology(1, memory_bytes=100), global_batch=8, state_tensors=2)


def test_the_workload_of_an_artifact() -> None:
    artifact = artifact_of(compiled("tied"))
    workload = make_workload(artifact, global_batch=8, state_tensors=2)
    assert len(workload.units) == len(artifact.units)
    assert [bucket.users for bucket in workload.buckets] == [bucket.users for bucket in artifact.buckets]
    assert all(unit.backward_s == 2 * unit.forward_s for unit in workload.units), "analytic where nothing was measured"
    kind = artifact.units[0].kind
    measured = dataclasses.replace(artifact, measured={kind: (1.0, 3.0)})
    assert make_workload(measured, 8, 2).units[0].backward_s == 3.0


@pytest.mark.parametrize("policy", get_args(Policy))
def test_every_policy_can_be_configured(policy: str) -> None:
    assert load_config([f"recompute={policy}"]).recompute == policy


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="recompute=ful: must be one of none, light, full; nearest valid: full"):
        load_config(["recompute=ful"])
