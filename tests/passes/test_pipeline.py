"""pipeline, assign_stages: the order of passes, their dumps, and the way to a plan."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_fx.config.compose import load_config
from elaswave_fx.errors import ConfigError, PassError
from elaswave_fx.passes.assign_stages import AssignStages, make_workload
from elaswave_fx.passes.cut_units import CutUnits
from elaswave_fx.passes.find_cuts import FindCuts
from elaswave_fx.passes.normalize import Normalize
from elaswave_fx.passes.pipeline import BUILT_IN, STANDARD, Pipeline, render, run_passes
from elaswave_fx.passes.recompute import Policy, Recompute
from elaswave_fx.passes.user_pass import load_pass_class
from elaswave_fx.plan.work.options import PlanOptions
from elaswave_fx.plan.work.topology import local_topology
from tests.passes.compiled import artifact_of, captured
from tests.passes.models import Classifier, vectors
from tests.passes.own_passes import Everything, Forgetful, Seen, Silent
from tests.passes.zoo import compiled

ORDER = [
    *("normalize", "replicate_invariants", "recognize_causal", "expand_attention", "rewrite_rng", "fold_buffers"),
    *("find_couplings", "estimate_cost", "find_cuts", "cut_units", "differentiate", "simplify", "choose_kernels"),
    *("recompute", "split_backward"),
]
TEXT = (
    "normalize,replicate_invariants,recognize_causal,expand_attention,rewrite_rng,fold_buffers,find_couplings,"
    "estimate_cost,find_cuts{heavy_share=0.002 slack=1.25 least=4},cut_units,differentiate,simplify,choose_kernels,"
    "recompute{policy=none},split_backward"
)


def test_every_pass_is_a_frozen_value_with_a_name_and_a_reason() -> None:
    assert [step.name for step in STANDARD.passes] == list(BUILT_IN) == ORDER
    for step in STANDARD.passes:
        assert dataclasses.is_dataclass(step) and (type(step).__doc__ or "").split("\n")[0].endswith(".")
        assert type(step).__module__ == f"elaswave_fx.passes.{step.name}"
        with pytest.raises(dataclasses.FrozenInstanceError):
            step.name = "other"  # type: ignore[misc]


def test_the_standard_pipeline_as_text() -> None:
    assert str(STANDARD) == TEXT
    assert Pipeline.parse(TEXT) == STANDARD
    STANDARD.refuse_incomplete()


names = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(["null", "true", "2024", "off", "a.b"])
numbers = st.floats(allow_nan=False, allow_infinity=False)
integers = st.lists(st.integers(), max_size=3).map(tuple)
own = st.builds(
    Everything,
    count=st.integers(),
    share=numbers,
    on=st.booleans(),
    word=names,
    mode=st.sampled_from(["fast", "slow"]),
    limit=st.none() | st.integers(),
    label=st.none() | names,
    sizes=integers,
    pair=st.tuples(names, numbers),
    nested=st.lists(integers, max_size=2).map(tuple),
)
cuts = st.builds(
    FindCuts,
    heavy_share=st.floats(0, 1, exclude_min=True),
    slack=st.floats(1, allow_infinity=False),
    least=st.integers(1),
)
plain = st.sampled_from(list(STANDARD.passes))
recomputing = st.sampled_from([Recompute(policy) for policy in get_args(Policy)])


@given(st.lists(own | cuts | recomputing | plain, min_size=1, max_size=6).map(lambda passes: Pipeline(tuple(passes))))
def test_a_pipeline_is_read_from_what_it_prints_as(pipeline: Pipeline) -> None:
    assert Pipeline.parse(str(pipeline)) == pipeline


def test_a_text_may_leave_out_options_and_add_spaces() -> None:
    assert Pipeline.parse(" find_cuts { slack=2 } , cut_units").passes == (FindCuts(slack=2.0), CutUnits())
    base = Pipeline((FindCuts(least=9),))
    assert Pipeline.parse("find_cuts{slack=2},recompute", base).passes == (FindCuts(slack=2.0, least=9), Recompute())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "column 1: the end stands where the name of a pass belongs"),
        ("normalize,", "column 11: the end stands where the name of a pass belongs"),
        ("normalize rewrite_rng", "column 11: 'rewrite_rng' stands where ',' or the end belongs"),
        ("normalize,rewrite_rgn", "column 11: rewrite_rgn: no such pass; nearest valid name: rewrite_rng"),
        ("find_cuts{slak=2}", "column 1: find_cuts.slak: unknown key; nearest valid key: find_cuts.slack"),
        ("normalize,find_cuts{slack=0.5}", "column 11: find_cuts.slack=0.5: must be at least 1; nearest valid: 1"),
        ("find_cuts{least=many}", "column 1: find_cuts.least=many: must be a whole number"),
        ("find_cuts{least=2 least=3}", "column 19: find_cuts.least is given twice"),
        ("find_cuts{least}", "column 16: '}' stands where '=' belongs"),
        ("find_cuts{least=}", "column 17: '}' stands where a value belongs"),
        ("find_cuts{least=2", "column 18: the end stands where an option or '}' belongs"),
        ("find_cuts{least=[2 3]}", "column 20: '3' stands where ',' belongs"),
        ("find_cuts;", "column 10: ';' is no part of a pipeline"),
        ('find_cuts{least="\\q"}', 'column 17: "\\q" is no text as JSON writes it'),
        ("recompute{policy=ful}", "column 1: recompute.policy=ful: must be one of none, light, full; nearest valid: "),
        ("tests.passes.own_passes.Nope", "column 1: tests.passes.own_passes.Nope: cannot be loaded: AttributeError: "),
        ("tests.passes.own_passes.Everything", "column 1: tests.passes.own_passes.Everything.count: is missing"),
    ],
)
def test_a_text_that_is_no_pipeline(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Pipeline.parse(text)
    assert str(caught.value).startswith(message)


def test_a_pass_is_put_in_its_place() -> None:
    twice = Pipeline((CutUnits(), FindCuts(), CutUnits()))
    assert twice.with_pass(Seen(), after="cut_units").passes == (CutUnits(), FindCuts(), CutUnits(), Seen())
    assert twice.with_pass(Seen(), before="cut_units").passes == (Seen(), CutUnits(), FindCuts(), CutUnits())
    with pytest.raises(ConfigError, match=r"^cut_unit: no pass of that name in the pipeline; nearest .* cut_units$"):
        twice.with_pass(Seen(), after="cut_unit")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEXT.replace("cut_units,", ""), "cut_units is missing; these are needed, in this order: normalize, rewrite_"),
        (TEXT.replace("cut_units,differentiate", "differentiate,cut_units"), "differentiate is out of place; "),
        (TEXT.replace("cut_units", "cut_units,cut_units"), "cut_units is out of place; "),
    ],
)
def test_a_pipeline_without_what_it_needs(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match="^" + message):
        Pipeline.parse(text).refuse_incomplete()
    Pipeline.parse(TEXT.replace("simplify,", "simplify,simplify,").replace("choose_kernels,", "")).refuse_incomplete()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Forgetfull", "cannot be loaded: AttributeError: module 'tests.passes.own_passes' has no attribute "),
        ("calls", "is no class; a pass is a frozen dataclass with `name`, `apply(program)` and a docstring"),
        ("Thawed", "is no frozen dataclass; a pass is one, its fields are its options"),
        ("Idle", "has no method apply(program), which returns the program that it makes"),
        ("Nameless", "has no name; a pass has one, such as name: ClassVar"),
        ("Impostor", "is named normalize, as a pass of the compiler is"),
        ("Mute", "has no docstring; its first line says why the pass is there"),
        ("Unwritable", "its option table: dict[str, int]; options are int, float, bool, str, tuples of them, or "),
        ("Placed", "its option after cannot be set: passes.extra takes that key for the place of the pass"),
    ],
)
def test_a_class_that_is_no_pass(name: str, message: str) -> None:
    path = f"tests.passes.own_passes.{name}"
    with pytest.raises(ConfigError) as caught:
        load_pass_class(path, BUILT_IN)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


def test_the_runner_dumps_numbered_graphs(tmp_path: Path) -> None:
    program = captured(Classifier(layers=1), vectors, 1)
    (tmp_path / "03-old.txt").write_text("of an earlier pipeline")
    (tmp_path / "mine.txt").write_text("stays")
    after, report = run_passes(program, STANDARD.passes, tmp_path)
    files = ["00-capture.txt", *(f"{i:02d}-{name}.txt" for i, name in enumerate(ORDER, start=1)), "mine.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert (tmp_path / "00-capture.txt").read_text() == render(program)
    assert (tmp_path / "15-split_backward.txt").read_text() == render(after)
    assert [name for name, _ in report.seconds] == ORDER
    assert "0x" not in "".join(path.read_text() for path in tmp_path.iterdir()), "no addresses"


def test_the_graphs_before_a_failure_are_there(tmp_path: Path) -> None:
    program = captured(Classifier(layers=1), vectors, 1)
    with pytest.raises(PassError, match="^forgetful: node .* has no value"):
        run_passes(program, (Normalize(), Forgetful()), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00-capture.txt", "01-normalize.txt"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^passes\.dump=.*/file/dump: cannot be written \(Not a directory\)$"):
        run_passes(compiled("fused axes").program, (), tmp_path / "file" / "dump")


def test_the_runner_verifies_after_every_pass() -> None:
    with pytest.raises(PassError, match="^forgetful: node .* has no value"):
        run_passes(compiled("fused axes").program, (Forgetful(),))
    with pytest.raises(PassError, match="^silent: apply returns a NoneType; a pass returns the program$"):
        run_passes(compiled("fused axes").program, (Silent(),))


def test_passes_leave_their_argument_alone() -> None:
    program = captured(Classifier(layers=1), vectors, 1)
    before = render(program)
    run_passes(program, STANDARD.before("find_couplings").passes)
    assert render(program) == before


OPTIONS = PlanOptions(8)


def test_stages_are_assigned_to_an_artifact() -> None:
    artifact = artifact_of(compiled("gpt"))
    plan = AssignStages(OPTIONS, dp=2, pp=2).apply(artifact, local_topology(4), state_tensors=2)
    assert len(plan.tiles) == 4
    (first, then) = {tile.units.spans for tile in plan.tiles}
    assert {first[0].lo, first[0].hi} & {then[0].lo, then[0].hi}
    with pytest.raises(ConfigError, match="parallel.pp=9"):
        AssignStages(OPTIONS, dp=1, pp=9).apply(artifact, local_topology(9), state_tensors=2)


def test_what_does_not_fit_names_what_takes_the_memory() -> None:
    artifact = artifact_of(compiled("tied"))
    message = (
        r"does not fit in memory: .*; the largest parameter is layer.up.weight in unit \d+ \(256 elements\), most is "
        r"kept for backward by unit \d+ .*; recompute=full, precision=bf16 or copies.count=0 need less$"
    )
    with pytest.raises(ConfigError, match=message):
        AssignStages(OPTIONS, dp=1, pp=1).apply(artifact, local_topology(1, memory_bytes=100), state_tensors=2)


def test_the_workload_of_an_artifact() -> None:
    artifact = artifact_of(compiled("tied"))
    workload = make_workload(artifact, OPTIONS, state_tensors=2)
    assert len(workload.units) == len(artifact.units)
    assert [bucket.users for bucket in workload.buckets] == [bucket.users for bucket in artifact.buckets]
    assert all(unit.backward_s == 2 * unit.forward_s for unit in workload.units), "analytic where nothing was measured"
    kind = artifact.units[0].kind
    measured = dataclasses.replace(artifact, measured={kind: (1.0, 3.0, 1.5)})
    unit = make_workload(measured, OPTIONS, 2).units[0]
    assert (unit.backward_s, unit.weights_share) == (3.0, 0.5)


@pytest.mark.parametrize("schedule", ["split", "auto"])
def test_halves_need_the_pass_that_makes_them(schedule: str) -> None:
    result = compiled("gpt")
    whole = {kind: dataclasses.replace(each, halves=None) for kind, each in result.program.kinds.items()}
    artifact = artifact_of(dataclasses.replace(result, program=dataclasses.replace(result.program, kinds=whole)))
    stages = AssignStages(PlanOptions(8, schedule=schedule), dp=1, pp=2)
    if schedule == "split":
        message = "parallel.schedule=split: the pipeline .passes.pipeline. leaves split_backward out; nearest valid"
        with pytest.raises(ConfigError, match=message):
            stages.apply(artifact, local_topology(2), 2)
    else:
        assert stages.apply(artifact, local_topology(2), 2).workload.options.schedule == "1f1b"


@pytest.mark.parametrize("policy", get_args(Policy))
def test_every_policy_can_be_configured(policy: str) -> None:
    assert load_config([f"recompute={policy}"]).recompute == policy


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="recompute=ful: must be one of none, light, full; nearest valid: full"):
        load_config(["recompute=ful"])
