"""What else a run promises: the same bits twice, evaluation, bf16, weights from a folder, lanes of all kinds."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from elaswave_fx.build.build_job import build_job
from elaswave_fx.build.initial_plan import options_of
from elaswave_fx.build.make_model import make_model
from elaswave_fx.config.compose import load_config
from elaswave_fx.config.keys import Config
from elaswave_fx.data import load_batch, open_source
from elaswave_fx.launch.job import JobSpec
from elaswave_fx.launch.local import launch
from elaswave_fx.passes.assign_stages import make_workload
from elaswave_fx.plan.make.derive import make_plan
from elaswave_fx.plan.make.planner import Widths, plan_lanes
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.tiling import split_micro_batches
from elaswave_fx.plan.work.topology import local_topology
from elaswave_fx.program.artifact import Artifact
from elaswave_fx.worker.loop import run_worker
from tests.marks import slow
from tests.plan.samples import lane
from tests.reference import ReferenceRun, relative_difference
from tests.runs import Run, reference, run_job, small_config


def test_the_same_run_twice_gives_the_same_bits(tmp_path: Path) -> None:
    config = small_config("gpt_stdlib", "parallel.dp=2", "parallel.pp=2")
    first, second = (run_job(config, tmp_path / name) for name in ("a", "b"))
    assert first.losses == second.losses
    assert first.summary["params_digest"] == second.summary["params_digest"]
    assert first.summary["params_digest"] is not None


def test_held_out_samples_are_evaluated_alike_on_every_layout(tmp_path: Path) -> None:
    found = []
    for dp, pp in ((1, 1), (2, 2)):
        config = small_config("two_tower", f"parallel.dp={dp}", f"parallel.pp={pp}", "eval.every=10", "steps=20")
        run = run_job(config, tmp_path / f"{dp}x{pp}")
        assert run.code == 0
        found.append([json.loads(line) for line in (run.folder / "eval.jsonl").read_text().splitlines()])
    alone, spread = found
    assert [line["step"] for line in alone] == [10, 20]
    assert [line["loss"] for line in spread] == pytest.approx([line["loss"] for line in alone], rel=1e-5)
    assert [line["count"] for line in spread] == [line["count"] for line in alone]


def test_running_statistics_serve_evaluation(tmp_path: Path) -> None:
    config = small_config("resnet_digits", "parallel.dp=2", "parallel.pp=1", "eval.every=20", "optimizer.lr=0.02")
    run = run_job(config, tmp_path)
    assert run.code == 0
    (line,) = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    statistics = {name for name in run.tensors if "running_" in name}
    assert statistics
    assert line["loss"] == pytest.approx(held_out_loss(config, run.tensors), rel=1e-5)
    without = {name: tensor for name, tensor in run.tensors.items() if name not in statistics}
    assert held_out_loss(config, without) != pytest.approx(line["loss"], rel=1e-2), "the first statistics would not do"


def held_out_loss(config: Config, tensors: Mapping[str, Tensor]) -> float:
    """By plain PyTorch: the model in evaluation mode with those parameters and buffers; others as at the beginning."""
    source = open_source(config)
    model = make_model(config, source.dataset)
    model.load_state_dict(tensors, strict=False)
    model.eval()
    loss = count = 0.0
    with torch.no_grad():
        for number in range(source.eval_batches):
            first = number * config.global_batch
            found = model(**load_batch(source.evaluation, source.held_out, first, config.global_batch))
            loss, count = loss + float(found[0]), count + float(found[1])
    return loss / count


def test_bf16_follows_fp32_and_keeps_an_fp32_master(tmp_path: Path) -> None:
    runs = {}
    for precision in ("fp32", "bf16"):
        config = small_config("gpt_stdlib", "parallel.dp=2", "parallel.pp=2", f"precision={precision}")
        runs[precision] = run = run_job(config, tmp_path / precision)
        assert run.code == 0
        assert all(tensor.dtype == torch.float32 for tensor in run.tensors.values())
        untrained = make_model(config, open_source(config).dataset).state_dict()
    fp32, bf16 = runs["fp32"], runs["bf16"]
    assert bf16.losses != fp32.losses
    assert bf16.losses == pytest.approx(fp32.losses, rel=1e-3)
    # Measured by how far training has moved the parameters: 0.01 of it, where a bf16 master would lose most of it.
    assert relative_difference(moved(bf16, untrained), moved(fp32, untrained)) < 0.03


def moved(run: Run, untrained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What training has added to each parameter."""
    return {name: tensor - untrained[name] for name, tensor in run.tensors.items()}


@pytest.mark.parametrize("recompute", ["full"])
def test_recomputing_changes_nothing_but_memory(recompute: str, tmp_path: Path) -> None:
    runs = []
    for choice in ("none", recompute):
        config = small_config("gpt_stdlib", "parallel.dp=1", "parallel.pp=2", f"recompute={choice}", "steps=5")
        runs.append(run_job(config, tmp_path / choice))
    assert [run.code for run in runs] == [0, 0]
    assert runs[0].losses == pytest.approx(runs[1].losses, rel=1e-6)


FAMILIES = {
    "bert": ("model.task=masked_lm", "model.config.num_hidden_layers=2", "model.config.hidden_size=32",
             "model.config.num_attention_heads=2", "model.config.intermediate_size=64"),
    "vit": ("model.task=image_classification", "model.config.num_hidden_layers=2", "model.config.hidden_size=32",
            "model.config.num_attention_heads=2", "model.config.intermediate_size=64", "model.config.patch_size=4",
            "data=digits"),
}  # fmt: skip


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize(("dp", "pp"), [(1, 1), (2, 2)])
def test_families_train_from_their_configuration_alone(family: str, dp: int, pp: int, tmp_path: Path) -> None:
    common = ("model=hf", f"model.name={family}", "seq_len=32", "global_batch=8", "steps=20", "data.limit_mb=1")
    words = [word for word in (*common, *FAMILIES[family]) if family != "vit" or word != "data.limit_mb=1"]
    config = load_config([*words, f"parallel.dp={dp}", f"parallel.pp={pp}"])
    run = run_job(config, tmp_path)
    assert run.code == 0
    expected = reference(config)
    assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    tensors = run.tensors
    assert relative_difference({name: tensors[name] for name in expected.parameters}, expected.parameters) < 1e-4


def test_weights_come_from_a_folder(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    settings = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 256, "n_positions": 32}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **settings))
    model.save_pretrained(tmp_path / "weights")
    config = load_config(
        ["model=hf", f"init_from={tmp_path / 'weights'}", "seq_len=32", "global_batch=4", "steps=1", "data.limit_mb=1",
         "optimizer=sgd", "optimizer.lr=1e-30", "optimizer.momentum=0", "parallel.pp=2"]
    )  # fmt: skip
    run = run_job(config, tmp_path / "run")
    assert run.code == 0
    found = {name.removeprefix("model."): tensor for name, tensor in run.tensors.items()}
    for name, parameter in model.named_parameters():
        assert torch.allclose(found[name], parameter.detach(), rtol=0, atol=1e-25), name


def run_with_plan(config: Config, folder: Path, planner: object) -> Run:
    folder.mkdir(parents=True, exist_ok=True)
    hosts = tuple(f"host-{rank // config.parallel.ranks_per_host}" for rank in range(config.parallel.ranks))
    spec = JobSpec(
        hosts=hosts,
        run_dir=folder,
        steps=config.steps,
        builder=lambda: build_job(config, folder, planner),  # type: ignore[arg-type]
        worker=lambda context: run_worker(config, context),
        faults=config.faults,
    )
    return Run(launch(spec), folder)


def lanes_of(widths: Widths) -> object:
    def planner(config: Config, artifact: Artifact) -> Plan:
        workload = make_workload(artifact, options_of(config), 2)
        return plan_lanes(workload, local_topology(sum(map(sum, widths))), widths)

    return planner


def combs(config: Config, artifact: Artifact) -> Plan:
    """Two lanes of two stages; each has every second micro-batch."""
    size, units = artifact.granule if artifact.batch_coupled else 2, len(artifact.units)
    pieces = split_micro_batches(Span(0, config.global_batch), size, artifact.granule)
    lanes = [
        lane([((first,), (0, units // 2)), ((first + 1,), (units // 2, units))], pieces[number::2])
        for number, first in enumerate((0, 2))
    ]
    return make_plan(local_topology(4), make_workload(artifact, options_of(config), 2), lanes, "combs")


UNEVEN: dict[str, tuple[object, int]] = {
    "widths 1-2": (lanes_of([(1, 2)]), 3),
    "widths 3-2": (lanes_of([(3, 2)]), 5),
    "widths 2-3-1": (lanes_of([(2, 3, 1)]), 6),
    "depths 1, 2": (lanes_of([(1,), (1, 1)]), 3),
    "depths 3, 1": (lanes_of([(1, 1, 1), (1,)]), 4),
    "a wide lane and a narrow one": (lanes_of([(2, 1), (1, 1)]), 5),
    "samples that do not adjoin": (combs, 4),
}


@cache
def reference_of(recipe: str, *words: str) -> ReferenceRun:
    return reference(small_config(recipe, *words))


@pytest.mark.parametrize("tiling", sorted(UNEVEN))
@pytest.mark.parametrize("recipe", ["gpt_stdlib", slow("resnet_digits")])
def test_lanes_of_all_kinds(tiling: str, recipe: str, tmp_path: Path) -> None:
    planner, ranks = UNEVEN[tiling]
    granule = "parallel.granule=4" if recipe == "resnet_digits" else "parallel.granule=1"
    config = small_config(recipe, f"parallel.dp={ranks}", "parallel.pp=1", granule)
    run = run_with_plan(config, tmp_path, planner)
    assert run.code == 0
    expected = reference_of(recipe, granule)
    assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    tensors = run.tensors
    assert relative_difference({name: tensors[name] for name in expected.parameters}, expected.parameters) < 1e-4
