"""What real models have besides equal blocks: frozen parts, own operators, padding, an encoder beside a decoder.

Each trains as the plain PyTorch loop does, on one rank and on 2 x 2, or is refused before a worker starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elaswave_fx.build.builder import build
from elaswave_fx.build.initial_plan import options_of
from elaswave_fx.build.make_model import make_model
from elaswave_fx.config.compose import load_config
from elaswave_fx.config.keys import Config
from elaswave_fx.data import load_batch, open_source
from elaswave_fx.errors import ConfigError
from elaswave_fx.passes.assign_stages import make_workload
from elaswave_fx.plan.make.derive import make_plan
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.tiling import split_micro_batches
from elaswave_fx.plan.work.topology import local_topology
from elaswave_fx.program.artifact import Artifact
from tests.e2e.test_training import run_with_plan
from tests.marks import slow
from tests.plan.samples import lane
from tests.reference import ReferenceRun, relative_difference
from tests.runs import Run, reference, run_job

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 4
COMMON = ("global_batch=8", f"steps={STEPS}", "eval.every=0")
LAYOUTS = ((1, 1), (2, 2))
TOKENS = ("data=synthetic", "data.vocab_size=64", "seq_len=16")
IMAGES = ("data=synthetic", "data.layout=flat")
PADDED = ("data._target_=tests.e2e.unusual.PaddedTokens", "seq_len=16", "+model.config.vocab_size=64")
SMALL = ("+model.config.hidden_size=32", "+model.config.intermediate_size=64", "+model.config.num_hidden_layers=1",
         "+model.config.num_attention_heads=4")  # fmt: skip
TWO_SIDED = ("+model.config.d_model=32", "+model.config.encoder_layers=1", "+model.config.decoder_layers=2",
             "+model.config.encoder_attention_heads=4", "+model.config.decoder_attention_heads=4",
             "+model.config.encoder_ffn_dim=64", "+model.config.decoder_ffn_dim=64")  # fmt: skip
EXPERTS = ("+model.config.num_experts_per_tok=2",)
GROUPED, DROPOUT = "+model.config.num_key_value_heads=2", "+model.config.attention_dropout=0.2"

MODELS: dict[str, tuple[str, ...]] = {
    "attention dropout": ("model=hf", "model.name=llama", *SMALL, GROUPED, DROPOUT, *TOKENS),
    "frozen backbone": ("model._target_=tests.e2e.unusual.HalfFrozen", "+model.width=32", "+model.layers=3", *TOKENS),
    "autograd function": ("model._target_=tests.e2e.unusual.OwnFunction", *IMAGES),
    "custom operator": ("model._target_=tests.e2e.unusual.OwnOperator", *IMAGES),
    "experts": ("model=hf", "model.name=mixtral", *SMALL, GROUPED, *EXPERTS, *TOKENS,
                "+model.config.num_local_experts=4"),
    "experts and a shared one": ("model=hf", "model.name=qwen2_moe", *SMALL, GROUPED, *EXPERTS, *TOKENS,
                                 "+model.config.num_experts=4", "+model.config.moe_intermediate_size=32",
                                 "+model.config.shared_expert_intermediate_size=32"),
    "experts with biases": ("model=hf", "model.name=gpt_oss", *SMALL, GROUPED, *EXPERTS, *TOKENS,
                            "+model.config.head_dim=8", "+model.config.num_local_experts=4"),
    "padded decoder": ("model=hf", "model.name=llama", *SMALL, GROUPED, *PADDED),
    "padded encoder": ("model=hf", "model.name=bert", "model.task=masked_lm", "model.mask_token=63", *SMALL, *PADDED),
    "padded encoder-decoder": ("model=hf", "model.name=bart", *TWO_SIDED, *PADDED),
}  # fmt: skip
PADDED_NAMES = [name for name in MODELS if name.startswith("padded")]


def config_of(name: str, *words: str) -> Config:
    return load_config([*MODELS[name], *COMMON, *words])


def assert_agrees(run: Run, expected: ReferenceRun) -> None:
    assert run.code == 0
    assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    assert [line["grad_norm"] for line in run.metrics] == pytest.approx(expected.grad_norms, rel=1e-4)
    tensors = run.tensors
    assert relative_difference({name: tensors[name] for name in expected.parameters}, expected.parameters) < 1e-4


@pytest.mark.parametrize(
    "name",
    [
        *("attention dropout", "autograd function", "experts"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("experts and a shared one", "experts with biases")),
    ],
)
def test_trains_as_plain_pytorch_does(name: str, tmp_path: Path) -> None:
    expected = reference(config_of(name))
    for dp, pp in LAYOUTS:
        run = run_job(config_of(name, f"parallel.dp={dp}", f"parallel.pp={pp}"), tmp_path / f"{dp}x{pp}")
        assert_agrees(run, expected)


@pytest.mark.slow
def test_workers_import_what_registers_an_operator(tmp_path: Path) -> None:
    """Through the command: nothing that a worker is forked from has imported the operator before."""
    words = ("parallel.dp=2", "parallel.pp=2")
    command = [sys.executable, "-m", "elaswave_fx.train", f"hydra.run.dir={tmp_path}", *MODELS["custom operator"]]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [*command, *COMMON, *words],
        cwd=tmp_path,
        env=environment,
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert_agrees(Run(0, tmp_path), reference(config_of("custom operator", *words)))


# --- Frozen parts


@pytest.mark.parametrize(("dp", "pp"), LAYOUTS)
def test_what_is_frozen_stays_as_it_was_and_has_no_state(dp: int, pp: int, tmp_path: Path) -> None:
    config = config_of("frozen backbone", f"parallel.dp={dp}", f"parallel.pp={pp}")
    model = make_model(config, open_source(config).dataset)
    frozen = {name: each.detach() for name, each in model.named_parameters() if not each.requires_grad}
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    run = run_job(config, tmp_path)
    assert_agrees(run, reference(config))
    tensors = run.tensors
    assert len(frozen) > 20
    assert all(torch.equal(tensors[name], each) for name, each in frozen.items())
    plan = Plan.from_json((tmp_path / "plan-0.json").read_text())
    assert sum(box.span.hi - box.span.lo for box in plan.boxes) == trained


# --- Sequences of different lengths


@pytest.mark.parametrize("name", [name if "-" in name else slow(name) for name in PADDED_NAMES])
def test_padding_is_neither_counted_nor_read(name: str, tmp_path: Path) -> None:
    """Counts are those of the real tokens, and other tokens in the padding, on 2 x 2, change no loss."""
    config = config_of(name)
    expected = reference(config)
    for (dp, pp), filler in zip(LAYOUTS, (0, 9), strict=True):
        words = (f"parallel.dp={dp}", f"parallel.pp={pp}", f"+data.filler={filler}")
        run = run_job(config_of(name, *words), tmp_path / f"{dp}x{pp}")
        assert_agrees(run, expected)
        if config.model.task == "masked_lm":  # it draws which tokens to predict
            continue
        source = open_source(config)
        batches = [load_batch(source.dataset, source.train, step * 8, 8) for step in range(STEPS)]
        assert [line["tokens"] for line in run.metrics] == [int(b["attention_mask"].sum()) for b in batches]


# --- Encoder and decoder


def cut_in_the_decoder(stages: int) -> object:
    """All borders lie between readers of the value that most units read, but the first of four, which is before it."""

    def planner(config: Config, artifact: Artifact) -> Plan:
        value = max(artifact.values, key=lambda value: len(value.consumers))
        inside = range(value.consumers[0] + 1, value.consumers[-1] + 1)
        borders = (inside[len(inside) // 2],) if stages == 2 else (value.producer, inside[0], inside[-1])
        ends = (0, *borders, len(artifact.units))
        workload = make_workload(artifact, options_of(config), 2)
        pieces = split_micro_batches(Span(0, config.global_batch), 2, 1)
        pipeline = lane([((stage,), ends[stage : stage + 2]) for stage in range(stages)], pieces)
        return make_plan(local_topology(stages), workload, [pipeline], f"cut at {borders}")

    return planner


@pytest.mark.parametrize("stages", [2, 4])
def test_the_encoders_output_crosses_every_border_of_the_decoder(stages: int, tmp_path: Path) -> None:
    config = config_of("padded encoder-decoder", f"parallel.pp={stages}")
    run = run_with_plan(config, tmp_path, cut_in_the_decoder(stages))
    assert_agrees(run, reference(config))
    plan = Plan.from_json((tmp_path / "plan-0.json").read_text())
    value = max(plan.workload.values, key=lambda value: len(value.consumers))
    readers = {t.rank for t in plan.tiles for unit in value.consumers if unit in t.units}
    assert len(readers) >= 2, "the encoder's output is read by one stage alone"


# --- What cannot be trained


REFUSED = {
    "Rounded": ("RoundStraightThrough", "detach()"),
    "Hooked": ("the hook Hooked.activate", "unusual.py", "changes gradients", "detach()"),
    "Underivable": ("elaswave_unusual.no_derivative", "register_autograd"),
    "Branching": ("Branching.activate", "x.sum() > 0", "data-dependent", "a way out"),
    "Numbered": ("aten.item", "keep it a tensor"),
    "Infinite": ("the loss of Infinite is nan",),
    "Unfitting": ("Unfitting.forward", "self.enter(image)", "image [2, 64]"),
    "Renamed": ("unexpected keyword argument 'image'", "forward takes them by these names"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_in_one_line_that_names_it_and_a_way_out(name: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        build(load_config([f"model._target_=tests.e2e.unusual.{name}", *IMAGES, *COMMON]), None)
    assert "\n" not in str(refusal.value)
    for words in ("model: ", *REFUSED[name]):
        assert words in str(refusal.value)


def test_a_gradient_through_rounding_can_be_written_with_detach(tmp_path: Path) -> None:
    config = load_config(["model._target_=tests.e2e.unusual.RoundedByDetach", *IMAGES, *COMMON])
    assert_agrees(run_job(config, tmp_path), reference(config))
