"""The configuration: what it reads, what it refuses and in which words, and the command line around it."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import msgspec
import pytest
from omegaconf import OmegaConf

from elaswave_fx.config.compose import compose, conf_dir, load_config, prepare_overrides
from elaswave_fx.config.faults import Fault
from elaswave_fx.config.keys import (
    Config,
    DataConfig,
    EmulatedConfig,
    HostLinkConfig,
    LinkConfig,
    OptimizerConfig,
    PointConfig,
    PowerConfig,
    ScheduleConfig,
)
from elaswave_fx.config.read import NOT_AVAILABLE_YET, read_config
from elaswave_fx.config.validation import _NAMES_ELSEWHERE, keys_of_kind, nearest_key, show, with_keys_of_today
from elaswave_fx.errors import ConfigError

RECIPES = sorted(path.stem for path in (conf_dir() / "recipe").glob("*.yaml"))
ROOT = Path(__file__).resolve().parent.parent


def test_defaults() -> None:
    config = load_config()
    assert (config.steps, config.seed, config.precision) == (100, 0, "fp32")
    assert config.parallel.ranks == 1
    assert config.model.kind == "gpt"
    assert config.optimizer.betas == (0.9, 0.999)
    assert config.clip_norm == 1.0
    assert config.faults == ()


def test_recipes_are_those_of_the_readme() -> None:
    expected = "gpt_stdlib hf_gpt2 hf_llama lose_and_regain lose_one_host lose_one_rank resnet_digits storm two_tower"
    assert expected.split() == RECIPES


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_composes_and_command_line_wins(recipe: str) -> None:
    config = load_config([f"recipe={recipe}", "steps=3", "parallel.pp=1", "faults=[]"])
    assert (config.steps, config.parallel.dp, config.parallel.pp) == (3, 2, 1)
    assert load_config([f"recipe={recipe}"]).parallel.ranks == 4


def test_recipe_may_be_none() -> None:
    assert load_config(["recipe=null"]) == load_config()


def test_batch_norm_recipe_has_granules() -> None:
    assert load_config(["recipe=resnet_digits"]).parallel.granule > 1


def test_config_is_frozen() -> None:
    config = load_config()
    with pytest.raises(FrozenInstanceError):
        config.steps = 7  # type: ignore[misc]


def test_hugging_face_options_are_carried_with_and_without_plus() -> None:
    config = load_config(["model=hf", "model.name=llama", "model.config.num_hidden_layers=3", "+model.config.width=8"])
    assert (config.model.name, config.model.task) == ("llama", None)
    assert config.model.options == {"num_hidden_layers": 3, "width": 8}


def test_a_task_is_an_argument_of_a_class_of_ones_own() -> None:
    config = load_config(["model._target_=mine.Net", "model.task=regression"])
    assert config.model.options["task"] == "regression" and config.model.task is None


def test_recipes_option_is_replaced() -> None:
    assert load_config(["recipe=hf_gpt2", "+model.config.n_layer=9"]).model.options["n_layer"] == 9


@pytest.mark.parametrize(("group", "name"), [("model", "name"), ("data", "name"), ("optimizer", "target")])
def test_users_class_takes_its_keywords(group: str, name: str) -> None:
    config = load_config([f"{group}._target_=mine.Thing", f"{group}.hidden=8", f"+{group}.sizes=[1,2]"])
    part = getattr(config, group)
    assert getattr(part, name) == "mine.Thing"
    assert part.options == {"hidden": 8, "sizes": [1, 2]}
    assert part.spec == {"_target_": "mine.Thing", "hidden": 8, "sizes": [1, 2]}


def test_users_schedule() -> None:
    schedule = load_config(["schedule._target_=mine.decay", "schedule.rate=0.5"]).schedule
    assert (schedule.name, schedule.target, schedule.options) == ("target", "mine.decay", {"rate": 0.5})


def test_users_optimizer_keeps_the_learning_rate_typed() -> None:
    optimizer = load_config(["optimizer._target_=mine.Lion", "optimizer.lr=3e-4", "optimizer.beta=0.9"]).optimizer
    assert (optimizer.lr, optimizer.options) == (3e-4, {"beta": 0.9})


def test_users_recipe_from_config_dir(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [override /model: target]\nsteps: 7\nmodel: {_target_: my.Net, depth: 2}\n"
    )
    config = load_config(["recipe=mine"], [tmp_path])
    assert (config.steps, config.model.name, config.model.options) == (7, "my.Net", {"depth": 2})


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_config().cache.path == tmp_path / "elaswave_fx"
    assert load_config(["cache.enabled=false"]).cache.path is None
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert load_config().cache.path == tmp_path / "home" / ".cache" / "elaswave_fx"


POINTS = "power.points=[{mhz: 1000, speed: 0.5, watts: 100}, {mhz: 2000, speed: 1, watts: 300}]"
FIRST = min(os.sched_getaffinity(0))

REFUSALS = [
    (["stepz=3"], "stepz: unknown key; nearest valid key: steps"),
    (["+stepz=3"], "stepz: unknown key; nearest valid key: steps"),
    (["optimizer.lrr=1"], "optimizer.lrr: unknown key; nearest valid key: optimizer.lr"),
    (["optimzer.lr=1"], "optimzer.lr: unknown key; nearest valid key: optimizer.lr"),
    (["paralel.dp=2"], "paralel.dp: unknown key; nearest valid key: parallel.dp"),
    (["+parallel.width=2"], "parallel.width: unknown key; valid keys: parallel.dp, "),
    (["model=resnet", "model.heads=2"], "model.heads: unknown key for this model; nearest valid: model=gpt, which"),
    (["modle=gpt"], "modle: unknown key; nearest valid key: model"),
    (["model=gtp"], "model=gtp: no such model; nearest valid value: gpt"),
    (["recipe=gpt_stdlip"], "recipe=gpt_stdlip: no such recipe; nearest valid value: gpt_stdlib"),
    (["steps=["], "steps=[: is no KEY=VALUE (no viable alternative at input '[')"),
    (["steps"], "steps: is no KEY=VALUE (missing EQUAL at '<EOF>')"),
    (["steps=${nothing}"], "steps: Interpolation key 'nothing' not found"),
    (["steps=0"], "steps=0: must be at least 1; nearest valid: 1"),
    (["steps=many"], "steps=many: must be a whole number"),
    (["steps=1.5"], "steps=1.5: must be a whole number; nearest valid: 2"),
    (["steps=1e23"], "steps=1e+23: must be a whole number; nearest valid: 2147483647"),
    (["parallel.pp=1e9"], "parallel.pp=1000000000.0: must be a whole number; nearest valid: 4096"),
    (["parallel.pp=1000000000"], "parallel.pp=1000000000: must be at most 4096; nearest valid: 4096"),
    (
        ["parallel.pp=4000", "parallel.dp=4000", "global_batch=4000"],
        "parallel.dp=4000 x parallel.pp=4000: are 16000000",
    ),
    (["model=null"], "model=null: must name a model; valid values: gpt, hf, resnet, target, two_tower"),
    (["batch_size=8"], "batch_size: unknown key; nearest valid key: global_batch"),
    (["learning_rate=1"], "learning_rate: unknown key; nearest valid key: optimizer.lr"),
    (
        ["gradient_accumulation_steps=4"],
        "gradient_accumulation_steps: unknown key; nearest valid key: parallel.micro_b",
    ),
    (["optimizer.lr=0"], "optimizer.lr=0.0: must be above 0"),
    (["optimizer.lr=nan"], "optimizer.lr=nan: must be a finite number"),
    (["optimizer.betas=[0.9,1.0]"], "optimizer.betas=1.0: must be below 1"),
    (["optimizer=sgd", "optimizer.betas=[0.9,1]"], "optimizer.betas: unknown key for this optimizer; nearest valid: "),
    (["optimizer.betas=[0.9]"], "optimizer.betas=[0.9]: must be a list of 2 values"),
    (["precision=bf61"], "precision=bf61: must be one of fp32, bf16; nearest valid: bf16"),
    (["device=cudaa"], "device=cudaa: must be one of cpu, cuda, npu, emulated; nearest valid: cuda"),
    (
        ["lab.axes=[frequency]"],
        "lab.axes=[frequency]: neither samples nor units could go to other ranks after a loss; nearest valid: "
        "lab.axes=[dataflow]",
    ),
    (
        ["lab.goals=block"],
        "lab.goals=block: must be one of background, blocking, never; nearest valid: blocking",
    ),
    (["lab.axes=[grap]"], "lab.axes=grap: must be one of dataflow, graph, frequency; nearest valid: graph"),
    (
        ["global_batch=10", "parallel.granule=4"],
        "global_batch=10: must be a multiple of parallel.granule=4; nearest valid: 8 or 12",
    ),
    (
        ["global_batch=8", "parallel.granule=4", "parallel.dp=3"],
        "parallel.dp=3: leaves a rank without samples, "
        "global_batch=8 has 2 granules of parallel.granule=4; nearest valid: 2",
    ),
    (
        ["parallel.granule=4", "parallel.micro_batch=2"],
        "parallel.micro_batch=2: must hold at least one granule of parallel.granule=4; nearest valid: 4",
    ),
    (
        ["exact=true", "parallel.granule=2", "parallel.micro_batch=4"],
        "parallel.micro_batch=4: exact=true runs one granule at a time, of parallel.granule=2, in every layout; "
        "nearest valid: parallel.granule=4",
    ),
    (
        ["exact=true", "global_batch=7", "parallel.dp=3", "parallel.micro_batch=2"],
        "parallel.micro_batch=2: exact=true runs one granule at a time, of parallel.granule=1, in every layout; "
        "nearest valid: parallel.micro_batch=1",
    ),
    (
        ["exact=true", "lab.reshard_rng=false"],
        "exact=true: with lab.reshard_rng=false random draws depend on the layout; nearest valid: lab.reshard_rng=true",
    ),
    (
        ["exact=true", "lab.policy=smaller_batch"],
        "exact=true: lab.policy=smaller_batch leaves samples out after a loss, which has other bits than one rank; "
        "nearest valid: lab.policy=drop_replica",
    ),
    (["exact=true", "device=emulated"], "exact=true: device=emulated computes nothing; nearest valid: exact=false"),
    (["model.heads=5"], "model.heads=5: must divide model.width=128; nearest valid: 4"),
    (["model=hf"], "model.name: is missing, model=hf needs a model type as transformers names it"),
    (["model=hf", "model.name=gpt2", "model.task=causal"], "model.task=causal: must be one of causal_lm, "),
    (["model.config.n_layer=2"], "model.config: is a key of model=hf only"),
    (["model=target"], "model._target_: Missing mandatory value"),
    (["model._target_=Net"], "model._target_=Net: must be an import path such as package.Class"),
    (["model=gpt", "model._target_=my.Net"], "model._target_=my.Net: cannot be mixed with model=gpt"),
    (["data=files"], "data.paths: is missing, data=files needs at least one path"),
    (["data=digits", "data.layout=tokens"], "data.layout=tokens: must be one of image, flat, halves; "),
    (["data._target_=my.Data", "data.deadline_s=0"], "data.deadline_s=0.0: must be above 0"),
    (["data._target_=my.Data", "data.deadline_s=1e99"], "data.deadline_s=1e+99: must be at most 2147483647; nearest"),
    (["tokenizer.vocab_size=300"], "tokenizer.vocab_size=300: tokenizer=bytes has 256 tokens; nearest valid: 256"),
    (["tokenizer=bpe", "tokenizer.vocab_size=9"], "tokenizer.vocab_size=9: must hold 256 bytes and the end mark; "),
    (["checkpoint.every=-1"], "checkpoint.every=-1: must be at least 0; nearest valid: 0"),
    (["checkpoint.keep=0"], "checkpoint.keep=0: must be at least 1; nearest valid: 1"),
    (["checkpoint.evry=5"], "checkpoint.evry: unknown key; nearest valid key: checkpoint.every"),
    (["checkpoint.dir=''"], "checkpoint.dir=: must be a folder; nearest valid: null, which is RUN/checkpoints"),
    (["device=emulated", "emulated.unit_ms=0"], "emulated.unit_ms=0.0: must be at least 1e-06; nearest valid: 1e-06"),
    (["device=emulated", "emulated.unit_ms=1e-300"], "emulated.unit_ms=1e-300: must be at least 1e-06; nearest valid"),
    (["device=emulated", "emulated.unit_ms=1e300"], "emulated.unit_ms=1e+300: must be at most 2147483647; nearest"),
    (["device=emulated", "emulated.speeds=[1e-300]"], "emulated.speeds=1e-300: must be at least 1e-06; nearest valid"),
    (["device=emulated", "emulated.speeds=[inf]"], "emulated.speeds=inf: must be a finite number"),
    (["device=emulated", "emulated.link.bytes_per_s=1e300"], "emulated.link.bytes_per_s=1e+300: must be at most 1e+15"),
    (["planner.mtbf_s=1e-300"], "planner.mtbf_s=1e-300: must be at least 1e-06; nearest valid: 1e-06"),
    (["power.points=[{mhz: 1, speed: 1, watts: 1e-300}]"], "power.points[0].watts=1e-300: must be at least 1e-06"),
    (["emulated.unit_ms=2"], "emulated.unit_ms=2: device=cpu is what it is; nearest valid: device=emulated"),
    (["emulated.memory_mb=100"], "emulated.memory_mb=100: device=cpu is what it is; nearest valid: device=emulated"),
    (["emulated.speeds=[1,2]"], "emulated.speeds=[1.0,2.0]: device=cpu is what it is; nearest valid: device=emulated"),
    (["emulated.link.latency_ms=0"], "emulated.link.latency_ms=0: device=cpu is what it is"),
    (["emulated.link.bytes_per_s=1e9"], "emulated.link.bytes_per_s=1e+09: device=cpu is what it is"),
    (["device=emulated", "emulated.memory_mb=-1"], "emulated.memory_mb=-1.0: must be above 0"),
    (["device=emulated", "emulated.memory_mb=nan"], "emulated.memory_mb=nan: must be a finite number"),
    (["device=emulated", "emulated.speeds=2"], "emulated.speeds=2: must be a list such as [a,b]"),
    (["device=emulated", "emulated.speeds=[0]"], "emulated.speeds=0.0: must be at least 1e-06"),
    (["device=emulated", "emulated.speeds=[nan]"], "emulated.speeds=nan: must be a finite number"),
    (
        ["device=emulated", "parallel.dp=4", "emulated.speeds=[1,0.5]"],
        "emulated.speeds=[1.0,0.5]: has 2 speeds for 4 ranks, and each rank has one; nearest valid: [1.0,0.5,1.0,1.0]",
    ),
    (["device=emulated", "emulated.link.latency_ms=-1"], "emulated.link.latency_ms=-1.0: must be at least 0; nearest"),
    (["device=emulated", "emulated.link.latency_ms=nan"], "emulated.link.latency_ms=nan: must be a finite number"),
    (
        ["device=emulated", "emulated.link.bytes_per_s=0"],
        "emulated.link.bytes_per_s=0.0: must be at least 1; ",
    ),
    (["device=emulated", "emulated.link.latency=1"], "emulated.link.latency: unknown key; nearest valid key: "),
    (["device=emulated", "emulated.link=fast"], "emulated.link=fast: must be a group of keys, not a single value"),
    (
        ["device=emulated", "emulated.link={latency_ms: 1000, bytes_per_s: 1e10}"],
        "emulated.link.latency_ms=1000: with emulated.link.bytes_per_s=1e+10 more than 1 GiB would be under way; "
        "nearest valid: 107.374",
    ),
    (["topology.links=[{hosts: [0,1]}]"], "topology.links[0].hosts=[0,1]: 1 ranks with parallel.ranks_per_host=2 are"),
    (["topology.links=[{hosts: [0]}]"], "topology.links[0].hosts=[0]: must be a list of 2 values"),
    (["topology.links=[{hosts: [0,-1]}]"], "topology.links[0].hosts=-1: must be at least 0; nearest valid: 0"),
    (["topology.links=[{latency_ms: 1}]"], "topology.links[0].hosts: is missing"),
    (
        ["parallel.dp=4", "topology.links=[{hosts: [1,1]}]"],
        "topology.links[0].hosts=[1,1]: must be two hosts; ranks of one host share its memory",
    ),
    (
        ["parallel.dp=4", "topology.links=[{hosts: [0,1]},{hosts: [1,0], latency_ms: 3}]"],
        "topology.links[1].hosts=[1,0]: topology.links[0] is of the same two hosts",
    ),
    (["device=emulated", "emulated.unitms=2"], "emulated.unitms: unknown key; nearest valid key: emulated.unit_ms"),
    (["power.cap_w=100"], "power.cap_w=100: needs power.points, which say what a rank draws"),
    ([POINTS, "power.cap_w=-1"], "power.cap_w=-1.0: must be at least 1e-06"),
    ([POINTS, "power.cap_w=nan"], "power.cap_w=nan: must be a finite number"),
    ([POINTS, "parallel.dp=4", "power.cap_w=399"], "power.cap_w=399: 4 ranks draw at least 400 W; nearest valid: 400"),
    ([POINTS, "power.idle_w=-1"], "power.idle_w=-1.0: must be at least 0; nearest valid: 0"),
    ([POINTS, "power.clocked=1.5"], "power.clocked=1.5: must be at most 1; nearest valid: 1"),
    (
        [POINTS],
        "power.actuator=emulated: device=cpu computes at the clock that it has; nearest valid: power.actuator=cp",
    ),
    (
        [POINTS, "power.actuator=nvm"],
        "power.actuator=nvm: must be one of emulated, cpufreq, nvml, ascend; nearest valid: ",
    ),
    ([POINTS, "power.actuator=nvml", "power.hook=a.b"], "power.hook=a.b: is for power.actuator=ascend"),
    ([POINTS, "power.actuator=ascend", "power.hook=hook"], "power.hook=hook: must be an import path"),
    (
        [POINTS, "power.actuator=cpufreq"],
        "power.processors=[]: has 0 lists for 1 ranks; with power.actuator=cpufreq each",
    ),
    (
        [POINTS, "power.actuator=cpufreq", "power.processors=[[]]"],
        "power.processors[0]=[]: must name at least one processor",
    ),
    (
        [POINTS, "power.actuator=cpufreq", "power.processors=[[99999]]"],
        "power.processors[0]=[99999]: this job may use processors [",
    ),
    (
        [POINTS, "power.actuator=cpufreq", "parallel.dp=2", f"power.processors=[[{FIRST}],[{FIRST}]]"],
        f"power.processors[1]=[{FIRST}]: rank 0 has processor {FIRST}; a clock is one rank's",
    ),
    (["power.points=[{mhz: 1, speed: 1}]"], "power.points[0].watts: is missing"),
    (["power.points=[{mhz: 1, speed: 1, watts: 0}]"], "power.points[0].watts=0.0: must be at least 1e-06"),
    (["power.points=[{mhz: 1, speed: 0.5, watts: 9}]"], "power.points: one has speed 1, that at which units take"),
    (
        ["power.points=[{mhz: 2, speed: 1, watts: 9}, {mhz: 1, speed: 2, watts: 9}]"],
        "power.points[1].mhz=1: must be above 2, which the point before has; clocks and speeds rise",
    ),
    (
        ["power.points=[{mhz: 2, speed: 1, watts: 9}, {mhz: 3, speed: 1, watts: 9}]"],
        "power.points[1].speed=1: must be above 1, which the point before has",
    ),
    (["resume=''"], "resume=: must be auto, off or a path; nearest valid: auto"),
    (["init_from=/nowhere"], "init_from=/nowhere: is for Hugging Face models; nearest valid: model=hf"),
    (["model=hf", "init_from=/nowhere"], "init_from=/nowhere: no such folder with a config.json in it"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSALS, ids=[" ".join(case[0]) for case in REFUSALS])
def test_refusal(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


NOT_YET = [
    "device=cuda", "device=npu", "launch=env",
    "compile=inductor",
]  # fmt: skip


@pytest.mark.parametrize("override", NOT_YET)
def test_keys_of_later_features(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([override])
    assert str(caught.value) == f"{override} is not available yet"


def test_faults_are_read() -> None:
    config = load_config(
        ["parallel.dp=3", "copies.count=2", "copies.record=bf16", "recovery.allow_rollback=true",
         "faults=[{step:3,rank:1},{step:4,rank:0,kind:stop,phase:backward}]"]
    )  # fmt: skip
    assert config.faults == (Fault(step=3, rank=1), Fault(step=4, rank=0, kind="stop", phase="backward"))


def test_the_emulated_device_is_read() -> None:
    assert load_config(["device=emulated"]).emulated.unit_ms is None
    assert load_config(["device=emulated", "emulated.unit_ms=2"]).emulated.unit_ms == 2.0
    words = ["emulated.memory_mb=64", "emulated.speeds=[1,0.5]", "emulated.link={latency_ms: 2, bytes_per_s: 1e8}"]
    found = load_config(["device=emulated", "parallel.pp=2", "parallel.ranks_per_host=1", *words])
    assert found.emulated == EmulatedConfig(
        unit_ms=None, memory_mb=64.0, speeds=(1.0, 0.5), link=LinkConfig(latency_ms=2.0, bytes_per_s=1e8)
    )


def test_clocks_are_read() -> None:
    found = load_config(["device=emulated", POINTS, "power.cap_w=500", "power.idle_w=10", "power.clocked=0.8"]).power
    assert found == PowerConfig(
        points=(PointConfig(mhz=1000.0, speed=0.5, watts=100.0), PointConfig(mhz=2000.0, speed=1.0, watts=300.0)),
        cap_w=500.0, idle_w=10.0, clocked=0.8, actuator="emulated", processors=(), sysfs="/sys/devices/system/cpu",
        hook=None,
    )  # fmt: skip


def test_links_are_read() -> None:
    links = "topology.links=[{hosts: [0,1], latency_ms: 0.5}, {hosts: [2,0], bytes_per_s: 1e8}]"
    assert load_config(["parallel.dp=6", "global_batch=6", links]).topology.links == (
        HostLinkConfig(hosts=(0, 1), latency_ms=0.5),
        HostLinkConfig(hosts=(2, 0), bytes_per_s=1e8),
    )


IMPOSSIBLE_FAULTS = [
    ("{step:9,rank:1}", "faults[0].step=9: the run has 9 steps; nearest valid: 8"),
    ("{step:-1,rank:1}", "faults[0].step=-1: the run has 9 steps"),
    ("{step:3,rank:4}", "faults[0].rank=4: the run has 4 ranks; nearest valid: 3"),
    ("{step:3,rank:1,kind:kil}", "faults[0].kind=kil: must be one of kill, stop, leave, cut, join, slow"),
    ("{step:3,rank:1,kind:join}", "faults[0].rank=1: numbers are given in turn; nearest valid: 4"),
    ("{step:3,rank:4,kind:join,phase:update}", "faults[0].phase=update: a process is started between two steps"),
    ("{step:3,rank:1,kind:leave},{step:5,rank:1}", "faults[1].rank=1: faults[0] strikes that rank already"),
    ("{step:3,rank:1,kind:cut,seconds:3},{step:5,rank:1}", "faults[1].rank=1: faults[0] strikes that rank already"),
    ("{step:3,rank:1,kind:cut,seconds:0}", "faults[0].seconds=0: must be above 0"),
    ("{step:3,rank:1,kind:cut,seconds:1e9}", "faults[0].seconds=1e+09: must be above 0 and at most 86400"),
    ("{step:3,rank:1,seconds:3}", "faults[0].seconds=3.0: is for kind=cut"),
    ("{step:3,rank:1,kind:slow,speed:1.5}", "faults[0].speed=1.5: must be above 0 and below 1"),
    ("{step:3,rank:1,kind:slow,steps:0}", "faults[0].steps=0: must be at least 1; nearest valid: 1"),
    ("{step:3,rank:1,kind:slow,phase:reduce}", "faults[0].phase=reduce: a rank is slow in whole steps"),
    ("{step:3,rank:1,speed:0.7}", "faults[0].speed=0.7: is for kind=slow"),
    ("{step:3,rank:1,phase:evening}", "faults[0].phase=evening: must be one of forward, backward, reduce, "),
    ("{step:3,rank:1},{step:5,rank:1}", "faults[1].rank=1: faults[0] strikes that rank already"),
    (
        "{step:3,rank:0},{step:5,rank:1},{step:5,rank:2},{step:8,rank:3}",
        "faults: every one of the 4 ranks is taken out",
    ),
    ("{step:3,rnk:1}", "faults[0].rnk: unknown key; nearest valid key: faults[0].rank"),
    ("{rank:1}", "faults[0].step: is missing"),
    ("kill", "faults[0]=kill: must be a group of keys"),
]


@pytest.mark.parametrize(("faults", "message"), IMPOSSIBLE_FAULTS, ids=[case[0] for case in IMPOSSIBLE_FAULTS])
def test_impossible_faults_are_named(faults: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["steps=9", "parallel.dp=2", "parallel.pp=2", f"faults=[{faults}]"])
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("group", "cls"), [("data", DataConfig), ("optimizer", OptimizerConfig), ("schedule", ScheduleConfig)]
)
def test_every_key_of_a_kind_has_a_default_in_its_file(group: str, cls: type) -> None:
    files = [path for path in sorted((conf_dir() / group).glob("*.yaml")) if path.stem != "target"]
    assert {path.stem: set(OmegaConf.load(path)) for path in files} == {
        path.stem: keys_of_kind(cls, path.stem) for path in files
    }


def test_every_later_key_is_tried() -> None:
    assert {override.partition("=")[0] for override in NOT_YET} == set(NOT_AVAILABLE_YET)


def test_init_from_names_the_nearest_folder(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"nearest valid: {tmp_path}/weights"):
        load_config(["model=hf", f"init_from={tmp_path}/wieghts"])
    assert load_config(["model=hf", f"init_from={tmp_path}/weights"]).model.name == ""


def test_unknown_key_in_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\nparallel:\n  pipelines: 2\n")
    with pytest.raises(ConfigError, match=r"^parallel\.pipelines: unknown key"):
        load_config(["recipe=mine"], [tmp_path])


def test_a_recipe_whose_keys_do_not_arrive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("steps: 3\nmodel:\n  width: 8\n")
    with pytest.raises(ConfigError, match="^recipe: its keys .steps, model. do not reach the configuration"):
        load_config(["recipe=mine"], [tmp_path])


def test_other_names_lead_to_keys_that_there_are() -> None:
    known = set(_dotted(load_config().as_dict()))
    assert {key for key in _NAMES_ELSEWHERE.values() if not key.startswith(("model.", "hydra."))} <= known


def _dotted(node: Mapping[str, Any], place: str = "") -> Iterator[str]:
    for name, value in node.items():
        yield place + name
        if isinstance(value, dict):
            yield from _dotted(value, f"{place}{name}.")


def test_recipe_that_mixes_a_class_with_a_kind(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\nmodel:\n  _target_: my.Net\n")
    with pytest.raises(ConfigError, match="`override /model: target` in its defaults"):
        load_config(["recipe=mine"], [tmp_path])


def test_missing_config_dir() -> None:
    with pytest.raises(ConfigError, match="--config-dir /nowhere: no such folder"):
        load_config([], ["/nowhere"])


def test_read_config_takes_plain_mappings_and_extra_keys() -> None:
    plain = OmegaConf.to_container(compose(["steps=3"]), resolve=True)
    assert isinstance(plain, dict)
    assert read_config(plain).steps == 3
    assert read_config({**plain, "out": "here"}, extra=("out",)).steps == 3
    with pytest.raises(ConfigError, match="out: unknown key"):
        read_config({**plain, "out": "here"})
    del plain["seed"]
    with pytest.raises(ConfigError, match="seed: is missing"):
        read_config(plain)


def test_as_dict_names_every_key() -> None:
    tree = load_config(["recipe=two_tower"]).as_dict()
    assert tree["parallel"]["dp"] == 2
    assert tree["model"]["options"]["right_layers"] == 5


def test_prepare_overrides_spells_out_targets() -> None:
    assert prepare_overrides(["steps=1", "model._target_=a.B", "model.x=2", "~data.limit_mb"]) == [
        "steps=1",
        "++model._target_=a.B",
        "++model.x=2",
        "~data.limit_mb",
        "model=target",
    ]
    assert prepare_overrides(["model=target", "model._target_=a.B"]) == ["model=target", "++model._target_=a.B"]
    assert prepare_overrides(["--cfg", "job", "model.width=3"]) == ["model.width=3", "--cfg", "job"]
    assert prepare_overrides(["steps=1", "-m", "--config-dir", "conf", "seed=2"]) == [
        "steps=1", "seed=2", "-m", "--config-dir", "conf",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("data.paths=[~/data/x.txt]", ("~/data/x.txt",)),
        ("data.paths=[data(1).csv,year=2020/x.parquet]", ("data(1).csv", "year=2020/x.parquet")),
        ("data.paths=[1.10, 2024_01]", ("1.10", "2024_01")),
        ("data.paths=['a,b.csv']", ("a,b.csv",)),
        ("data.fields=[sepal length (cm),target]", ("sepal length (cm)", "target")),
        ("data.fields=[1_1,true,null]", ("1_1", "true", "null")),
        ("data.column=1e2", "1e2"),
        ("data.column=null", None),
        ("data.split=1_0", "1_0"),
    ],
)
def test_names_of_files_and_columns_are_what_was_typed(word: str, value: object) -> None:
    config = load_config(["data=hf", "data.paths=[x.csv]", word])
    assert getattr(config.data, word.partition("=")[0].partition(".")[2]) == value


def test_keys_of_a_class_keep_their_types() -> None:
    config = load_config(["data._target_=a.B", "data.column=3", "data.paths=[1,2]"])
    assert dict(config.data.options) == {"column": 3, "paths": [1, 2]}


def test_nearest_key_prefers_siblings() -> None:
    known = ["seed", "eval.every", "checkpoint.every", "checkpoint.keep"]
    assert nearest_key("checkpoint.evry", known) == "nearest valid key: checkpoint.every"
    assert nearest_key("seeds", known) == "nearest valid key: seed"
    assert nearest_key("kept.keep", known) == "nearest valid key: checkpoint.keep"


def test_show_is_what_one_types() -> None:
    assert show(None) == "null"
    assert show((True, 1.5, {"step": [1]})) == "[true,1.5,{step:[1]}]"


# The command line, as a process of its own: a command of three lines in a user's folder.

COMMAND = """
import sys
from elaswave_fx.config.compose import run_hydra
from elaswave_fx.entry import run_command

def task(job):
    print(f"steps={job.config.steps} lr={job.config.optimizer.lr} dir={job.run_dir} extra={dict(job.extra)}")
    if job.config.seed == 13:
        from elaswave_fx.errors import PlanError
        raise PlanError("no plan")
    if job.config.seed == 14:
        raise KeyError("layer9")
    return {15: 1, 16: 130}.get(job.config.seed, 0)

sys.exit(run_command(lambda: run_hydra(task, *eval(sys.argv.pop(1)))))
"""

# A launcher of Hydra's that runs each job in another process, and has what comes of it back pickled, as joblib's does.
LAUNCHER = """
import multiprocessing
from hydra.core.config_store import ConfigStore
from hydra.core.utils import run_job
from hydra.plugins.launcher import Launcher
from omegaconf import open_dict

class Elsewhere(Launcher):
    def setup(self, *, hydra_context, task_function, config):
        self.context, self.function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides, initial_job_idx):
        return [self.run(number, words) for number, words in enumerate(job_overrides, initial_job_idx)]

    def run(self, number, words):
        config = self.context.config_loader.load_sweep_config(self.config, list(words))
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        ours, theirs = multiprocessing.Pipe()
        work = lambda: theirs.send(run_job(
            hydra_context=self.context, config=config, task_function=self.function,
            job_dir_key="hydra.sweep.dir", job_subdir_key="hydra.sweep.subdir"))
        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        found = ours.recv()
        process.join()
        return found

ConfigStore.instance().store(
    group="hydra/launcher", name="elsewhere", node={"_target_": "hydra_plugins.elsewhere.Elsewhere"}, provider="test")
"""


def command(folder: Path, *words: str, name: str = "('config',)", **environ: str) -> subprocess.CompletedProcess[str]:
    (folder / "command.py").write_text(COMMAND)
    return subprocess.run(
        [sys.executable, "command.py", name, *words],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder), **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_command_runs_in_the_given_directory(tmp_path: Path) -> None:
    done = command(tmp_path, "steps=4", "hydra.run.dir=here")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"steps=4 lr=0.001 dir={tmp_path / 'here'} extra={{}}\n"
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == [".hydra"]


def test_command_makes_a_run_directory(tmp_path: Path) -> None:
    assert command(tmp_path).returncode == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / ".hydra" / "overrides.yaml").is_file()


def test_command_with_keys_of_its_own(tmp_path: Path) -> None:
    done = command(tmp_path, "out=plan", "lose=[1,2]", name="('inspect', ('out', 'lose'))")
    assert done.stdout == f"steps=100 lr=0.001 dir={tmp_path / 'plan'} extra={{'out': 'plan', 'lose': [1, 2]}}\n"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["stepz=1"], 2, "error: stepz: unknown key; nearest valid key: steps\n"),
        (["device=npu"], 2, "error: device=npu is not available yet\n"),
        (["hydra.run.dir=command.py/a"], 2, "error: hydra.run.dir=command.py/a: cannot be written (Not a directory)\n"),
        (["--config-dir", "nowhere"], 2, "error: Additional config directory"),
        (["seed=13"], 1, "error: no plan\n"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_command_says_one_line(tmp_path: Path, words: list[str], code: int, message: str) -> None:
    done = command(tmp_path, *words)
    assert done.returncode == code
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("word", "prepared"),
    [
        ("init_from=/data/größe", "init_from='/data/größe'"),
        ("data.paths=[/ä/a.txt,b.txt]", "data.paths=['/ä/a.txt',b.txt]"),
        ("data.paths=['/ä/a.txt']", "data.paths=['/ä/a.txt']"),
        ("data.path=/ä/${seed}", "data.path=/ä/${seed}"),
        ("data.path=ä,b", "data.path='ä',b"),
        ("+model.config.name=模型", "++model.config.name='模型'"),
        ("data.path=/plain", "data.path=/plain"),
        ("--größe=3", "--größe=3"),
    ],
)
def test_what_is_not_ascii_is_quoted_for_hydra(word: str, prepared: str) -> None:
    assert prepare_overrides([word]) == [prepared]


def test_command_runs_in_a_folder_whose_name_is_not_ascii_in_a_locale_that_is(tmp_path: Path) -> None:
    folder = tmp_path / "größe"
    folder.mkdir()
    for words in ((), (f"hydra.run.dir={folder / 'läuft'}",)):
        done = command(folder, *words, LC_ALL="C", PYTHONUTF8="0")
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert (folder / "läuft" / ".hydra").is_dir()


def test_names_whose_bytes_are_not_utf8_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data\.paths\[1\]=a\udc80: has bytes that are not UTF-8"):
        read_config({"data": {"paths": ["a.txt", "a\udc80"]}})
    folder = os.fsdecode(bytes(tmp_path) + b"/caf\xe9")
    os.mkdir(folder)
    for key, environment in (("cache.dir", {}), ("hydra.run.dir", {"XDG_CACHE_HOME": str(tmp_path)})):
        done = command(Path(folder), "steps=1", **environment)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert re.search(f"{key}=.*: has bytes that are not UTF-8; nearest valid: another name", done.stderr)


def test_command_in_a_folder_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "command.py").write_text(COMMAND)
    script = f"mkdir gone; cd gone; rmdir ../gone; {sys.executable} -m command \"('config',)\""
    environ = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr == "error: the working folder was removed; change to one that exists\n"


def test_command_help(tmp_path: Path) -> None:
    done = command(tmp_path, "--help")
    assert done.returncode == 0
    for word in ("recipe: gpt_stdlib", "model: gpt, hf, resnet, target, two_tower", "global_batch: 16", "Exit code 0"):
        assert word in done.stdout
    assert not (tmp_path / "runs").exists()


def test_command_shows_the_job(tmp_path: Path) -> None:
    done = command(tmp_path, "recipe=resnet_digits", "--cfg", "job")
    assert done.returncode == 0
    assert "granule: 8" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_command_multirun(tmp_path: Path) -> None:
    done = command(tmp_path, "--multirun", "optimizer.lr=0.1,0.2", "hydra.sweep.dir=sweep")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"steps=100 lr={rate} dir={tmp_path / 'sweep' / str(job)} extra={{}}" for job, rate in enumerate((0.1, 0.2))
    ]


@pytest.mark.parametrize("launcher", ["basic", "elsewhere"])
@pytest.mark.parametrize(
    ("seed", "code", "reason"),
    [
        (-1, 2, "seed=-1: must be at least 0; nearest valid: 0"),
        (13, 1, "no plan"),
        (15, 1, ""),
    ],
)
def test_a_job_of_a_multirun_that_fails_is_said_at_the_end_and_others_go_on(
    seed: int, code: int, reason: str, launcher: str, tmp_path: Path
) -> None:
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "elsewhere.py").write_text(LAUNCHER)
    done = command(tmp_path, "--multirun", f"seed=1,{seed},2", "hydra.sweep.dir=sweep", f"hydra/launcher={launcher}")
    assert done.returncode == code, done.stderr
    lines = done.stderr.splitlines()
    assert lines[-1] == f"error: the run with seed={seed} ended with exit code {code}" + (
        f": {reason}" if reason else ""
    )
    assert not reason or lines[0] == f"error: {reason}", "it is said when it happens, too"
    assert "Traceback" not in done.stderr
    assert done.stdout.count("steps=100") == (2 if seed < 0 else 3)


def test_a_multirun_ends_when_one_of_its_jobs_is_stopped(tmp_path: Path) -> None:
    done = command(tmp_path, "--multirun", "seed=1,16,2", "hydra.sweep.dir=sweep")
    assert (done.returncode, done.stdout.count("steps=100")) == (130, 2)
    assert done.stderr == "error: the run with seed=16 ended with exit code 130\n"


def test_what_nobody_foresaw_is_one_line_and_a_file(tmp_path: Path) -> None:
    done = command(tmp_path, "seed=14", "hydra.run.dir=run")
    (path,) = (tmp_path / "run").glob("traceback-*.txt")
    assert done.returncode == 1
    assert done.stderr == (
        f"error: 'layer9' (KeyError, {tmp_path / 'command.py'}, line 12); the traceback is in {path}\n"
    )
    assert 'raise KeyError("layer9")' in path.read_text()


def test_command_takes_a_users_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine" / "recipe").mkdir(parents=True)
    (tmp_path / "mine" / "recipe" / "short.yaml").write_text("# @package _global_\nsteps: 3\n")
    done = command(tmp_path, "--config-dir", "mine", "recipe=short", "hydra.run.dir=run")
    assert done.stdout.startswith("steps=3 ")


def test_reading_the_configuration_does_not_import_torch() -> None:
    script = (
        "import sys; from elaswave_fx.config.compose import load_config; load_config(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_installed_package_finds_its_own_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel holds `conf` and `recipes` inside the package, and nothing beside it."""
    package = tmp_path / "site" / "elaswave_fx"
    shutil.copytree(conf_dir(), package / "conf")
    monkeypatch.setattr("elaswave_fx.config.compose.__file__", str(package / "config" / "compose.py"))
    (package / "conf" / "recipe" / "two_tower.yaml").unlink()
    assert conf_dir() == package / "conf"
    assert load_config(["recipe=hf_gpt2"]).steps == 60
    with pytest.raises(ConfigError, match="recipe=two_tower: no such recipe"):
        load_config(["recipe=two_tower"])
    shutil.rmtree(package / "conf")
    with pytest.raises(ConfigError, match="installed without its conf folder"):
        conf_dir()


def test_a_recorded_configuration_of_earlier_keys_is_read_as_one_of_today() -> None:
    today = load_config(["lab.policy=restart", "lab.copy_mode=state", "lab.reshard_rng=false"]).as_dict()
    earlier = json.loads(json.dumps(today))
    lab = earlier.pop("lab")
    earlier |= {"policy": lab["policy"], "rng": {"reshard": lab["reshard_rng"]}}
    earlier["planner"] |= {"axes": lab["axes"], "goals": lab["goals"]}
    earlier["copies"]["mode"], earlier["launch"]["exit_words"] = lab["copy_mode"], lab["exit_words"]
    before = json.dumps(earlier)
    for recorded in (earlier, json.loads(json.dumps(today))):
        assert msgspec.convert(with_keys_of_today(recorded), Config) == msgspec.convert(today, Config)
    assert json.dumps(earlier) == before, "what was recorded is left as it is"
    assert with_keys_of_today({"policy": 3, "rng": 7, "lab": "no group"}) == {"policy": 3, "rng": 7, "lab": "no group"}


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("policy=restart", "lab.policy"), ("planner.axes=[graph]", "lab.axes"), ("copies.mode=state", "lab.copy_mode"),
        ("rng.reshard=false", "lab.reshard_rng"), ("launch.exit_words=false", "lab.exit_words"),
    ],
)  # fmt: skip
def test_an_earlier_key_says_what_it_is_called_now(word: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key; nearest valid key: {key}"):
        load_config([word])
