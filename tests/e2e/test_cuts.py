"""Where stages are cut changes no bit: measured costs may move a cut from one build to the next."""

from pathlib import Path

import pytest

from elaswave_fx.build.initial_plan import options_of
from elaswave_fx.config.keys import Config
from elaswave_fx.passes.assign_stages import make_workload
from elaswave_fx.plan.make.derive import make_plan
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.tiling import split_micro_batches
from elaswave_fx.plan.work.topology import local_topology
from elaswave_fx.program.artifact import Artifact
from tests.e2e.test_training import run_with_plan
from tests.plan.samples import lane
from tests.runs import small_config


def cut_at(unit: int) -> object:
    def planner(config: Config, artifact: Artifact) -> Plan:
        workload = make_workload(artifact, options_of(config), 2)
        half, whole = config.global_batch // 2, config.global_batch
        ends = (0, unit, len(artifact.units))
        lanes = [
            lane([((first,), ends[:2]), ((first + 1,), ends[1:])], split_micro_batches(samples, 2, 1))
            for first, samples in ((0, Span(0, half)), (2, Span(half, whole)))
        ]
        return make_plan(local_topology(4), workload, lanes, f"cut at {unit}")

    return planner


@pytest.mark.parametrize("recipe", ["gpt_stdlib", "two_tower"])
def test_the_cut_changes_no_bit(recipe: str, tmp_path: Path) -> None:
    config = small_config(recipe, "parallel.dp=2", "parallel.pp=2")
    first, second = (run_with_plan(config, tmp_path / str(unit), cut_at(unit)) for unit in (2, 4))
    assert (first.code, second.code) == (0, 0)
    assert first.losses == second.losses
    assert first.summary["params_digest"] == second.summary["params_digest"]
