"""What a checkpoint is refused for, in which words; and the folder that checkpoints live in."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_fx.build.builder import build
from elaswave_fx.build.initial_plan import plan_of
from elaswave_fx.checkpoint.folder import MANIFEST, complete, keep_newest, partial_path, publish, sweep
from elaswave_fx.checkpoint.layout import owned_pieces
from elaswave_fx.checkpoint.manifest import (
    Contents,
    Manifest,
    check_files,
    check_model,
    file_digest,
    plain_config,
    read_manifest,
    write_manifest,
)
from elaswave_fx.checkpoint.start import Start, find_start
from elaswave_fx.config.compose import load_config
from elaswave_fx.errors import ConfigError
from elaswave_fx.worker.checkpoints import check_start
from tests.runs import small_config

CONFIG = load_config(["steps=20", "global_batch=8"])
CONTENTS = Contents(
    program="abc",
    tensors={"model/a": ((2, 3), "float32"), "optimizer/0/a": ((2, 3), "float32")},
    frozen={"f": "00"},
    buffers={"b": "00"},
    samples=100,
    data_digest="dd",
)


def make_checkpoint(folder: Path, step: int) -> Path:
    """A checkpoint with one file of nonsense."""
    partial = partial_path(folder, step, epoch=0)
    partial.mkdir(parents=True)
    (partial / "data").write_bytes(b"0123456789")
    files = {"data": (10, file_digest(partial / "data"))}
    write_manifest(partial, Manifest(step, "/somewhere", plain_config(CONFIG), CONTENTS, files))
    return publish(folder, step, epoch=0)


@pytest.mark.parametrize("other", [False, True])
def test_a_checkpoint_that_is_written_once_more_is_replaced_if_it_is_another(tmp_path: Path, other: bool) -> None:
    path = make_checkpoint(tmp_path, 5)
    file = (path / "data").stat().st_ino
    if other:
        (path / MANIFEST).write_text((path / MANIFEST).read_text().replace("/somewhere", "/elsewhere"))
    assert make_checkpoint(tmp_path, 5) == path
    assert ((path / "data").stat().st_ino == file) is not other, "the same one stays in place all the time"
    assert read_manifest(path).step == 5 and [each.name for each in tmp_path.iterdir()] == ["step-5"]


def refusal(overrides: tuple[str, ...], run_dir: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        find_start(load_config(["steps=20", "global_batch=8", *overrides]), run_dir)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 5)
    manifest = read_manifest(path)
    assert (manifest.step, manifest.contents, manifest.config["global_batch"]) == (5, CONTENTS, 8)
    check_files(path, manifest)
    check_model(manifest, CONTENTS, CONFIG, path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: (path / "data").write_bytes(b"012345678"), "data is truncated, it has 9 bytes and had 10"),
        (
            lambda path: (path / "data").write_bytes(b"012345678X"),
            f"data was edited, its SHA-256 differs from that in {MANIFEST}",
        ),
        (lambda path: (path / "data").unlink(), "data is missing"),
    ],
    ids=["truncated", "edited", "missing"],
)  # fmt: skip
def test_damaged_files(tmp_path: Path, change: object, words: str) -> None:
    path = make_checkpoint(tmp_path, 5)
    change(path)  # type: ignore[operator]
    with pytest.raises(ConfigError) as caught:
        check_files(path, read_manifest(path))
    assert str(caught.value) == f"resume={path}: {words}"


def test_a_damaged_manifest(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 5) / MANIFEST
    text = path.read_text()
    path.write_text(text.replace('"step": 5', '"step": 6'))
    assert refusal((f"resume={path.parent}",), tmp_path).endswith(f"{MANIFEST} was edited, its digest differs")
    path.write_text(text[:100])
    assert "it is truncated or edited" in refusal((f"resume={path.parent}",), tmp_path)
    path.write_text(json.dumps({**json.loads(text), "format": 99}))
    assert "has checkpoint format 99, this version reads 1" in refusal((f"resume={path.parent}",), tmp_path)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed=1", "seed=1 would change the samples, the checkpoint was made with seed=0; nearest valid: seed=0"),
        (
            "lab.reshard_rng=false",
            "lab.reshard_rng=false would change the random draws, the checkpoint was made with lab.reshard_rng=true; ",
        ),
        ("global_batch=16", "global_batch=16 would change the samples, the checkpoint was made with global_batch=8; "),
    ],
)
def test_other_samples(tmp_path: Path, override: str, words: str) -> None:
    path = make_checkpoint(tmp_path, 5)
    assert refusal((f"resume={path}", override), tmp_path).startswith(f"resume={path}: {words}")


def test_too_few_steps(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 5)
    words = f"steps=4: the checkpoint {path} is at step 5; nearest valid: 5"
    assert refusal((f"resume={path}", "steps=4"), tmp_path) == words


def test_no_such_path(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "runs" / "first" / "checkpoints", 5)
    (tmp_path / "empty").mkdir()
    assert refusal(("resume=atuo",), tmp_path) == "resume=atuo: no such folder; nearest valid: auto"
    near = tmp_path / "runs" / "frist"
    assert refusal((f"resume={near}",), tmp_path).endswith(f"no such folder; nearest valid: {tmp_path}/runs/first")
    assert refusal((f"resume={tmp_path}/empty",), tmp_path).endswith("empty: holds no complete checkpoint")


@pytest.mark.parametrize("place", ["", "/checkpoints", "/checkpoints/step-9"])
def test_a_run_a_folder_or_a_checkpoint_can_be_named(tmp_path: Path, place: str) -> None:
    for step in (5, 9):
        make_checkpoint(tmp_path / "checkpoints", step)
    start = find_start(load_config(["steps=20", "global_batch=8", f"resume={tmp_path}{place}"]), tmp_path / "new")
    assert (start.step, start.path, start.same_run) == (9, tmp_path / "checkpoints" / "step-9", False)


def test_auto_takes_the_newest_complete_one_of_its_folder(tmp_path: Path) -> None:
    words = ["steps=20", "global_batch=8", "resume=auto"]
    anew = find_start(load_config(words), tmp_path)
    line = f"resume=auto: no complete checkpoint in {tmp_path}/checkpoints; starting anew"
    assert anew == Start(lines=(line,))
    for step in (9, 10):
        make_checkpoint(tmp_path / "checkpoints", step)
    (tmp_path / "checkpoints" / "step-11.partial").mkdir()
    start = find_start(load_config([*words, "optimizer.lr=0.5", "parallel.dp=2"]), tmp_path)
    assert (start.step, start.same_run) == (10, True)
    assert start.lines == (
        f"resuming after step 10 from {tmp_path}/checkpoints/step-10",
        "changed since that checkpoint: optimizer.lr=0.5 (was 0.001), parallel.dp=2 (was 1)",
    )


def test_checkpoints_of_an_earlier_run_are_not_written_over(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoints", 5)
    words = refusal(("checkpoint.every=2",), tmp_path)
    assert words.startswith(
        f"checkpoint.dir={tmp_path}/checkpoints: holds step-5 of an earlier run, and this one starts"
    )
    assert find_start(load_config(["steps=20"]), tmp_path) == Start()


def test_a_model_that_computes_something_else_is_told(tmp_path: Path) -> None:
    start = Start(step=5, path=make_checkpoint(tmp_path, 5))
    (line,) = check_start(start, replace(CONTENTS, buffers={"a": "00", "b": "01"}), CONFIG)
    assert line == "buffer b: the model's constructor makes other values than in that run"
    assert check_start(start, CONTENTS, CONFIG) == ()
    (line,) = check_start(start, replace(CONTENTS, program="xyz"), CONFIG)
    assert line.startswith("the program is xyz, that of the checkpoint was abc: code or values of the model")
    assert check_start(Start(), replace(CONTENTS, program="xyz"), CONFIG) == ()


OTHERS = [
    (replace(CONTENTS, tensors={**CONTENTS.tensors, "model/b": ((1,), "float32")}), (), "it has no model/b"),
    (replace(CONTENTS, tensors={"model/a": ((2, 3), "float32")}), (), "it has optimizer/0/a, which the model has not"),
    (replace(CONTENTS, tensors={"model/a": ((2, 3), "float32")}), (), "such as a momentum: set them as in that run"),
    (
        replace(CONTENTS, tensors={**CONTENTS.tensors, "model/f": ((1,), "float32")}, frozen={}), (),
        "f was frozen in its run, and is trained now, and a checkpoint is for the parameters it trained",
    ),
    (
        replace(CONTENTS, tensors={}, frozen={"a": "00", "f": "00"}), (),
        "a was trained in its run, and is frozen now, and a checkpoint",
    ),
    (
        replace(CONTENTS, tensors={**CONTENTS.tensors, "model/a": ((3, 2), "float32")}), (),
        "it has model/a as float32 [2, 3], the model as float32 [3, 2]",
    ),
    (replace(CONTENTS, tensors={}), (), "which the model has not (and 1 more differences)"),
    (CONTENTS, ("optimizer=sgd",), "optimizer=sgd, but the checkpoint holds the state of adamw; nearest valid: adamw"),
    (
        replace(CONTENTS, frozen={"f": "01"}), (),
        "parameter f, which is not trained, has other values; the model's constructor has to make the same",
    ),
    (
        replace(CONTENTS, frozen={"f": "01"}), ("model=hf", "model.name=gpt2"),
        "parameter f, which is not trained, has other values; see init_from",
    ),
    (
        replace(CONTENTS, buffers={"b": "01"}), ("exact=true",),
        "exact=true cannot go on from it, buffer b has other values; the model's constructor has to make the same, or "
        "persistent=False takes new ones",
    ),
    (
        replace(CONTENTS, samples=90), ("eval.fraction=0.1",),
        "has other samples (90 to train on, 100 in the checkpoint's run) (eval.fraction=0.1 (was 0.05))",
    ),
    (
        replace(CONTENTS, samples=95), ("eval.every=9",),
        "has other samples (95 to train on, 100 in the checkpoint's run) (eval.every=9 (was 0))",
    ),
    (replace(CONTENTS, samples=105), ("eval.data=digits",), "run) (eval.data=digits (was null))"),
    (
        replace(CONTENTS, data_digest="ee"), ("data.transform._target_=mine.Scale",),
        "in the checkpoint's run) (data.transform._target_=mine.Scale (was null))",
    ),
    (replace(CONTENTS, data_digest="ee"), (), "(100 to train on, 100 in the checkpoint's run), the keys of data "),
]  # fmt: skip


@pytest.mark.parametrize(("contents", "overrides", "words"), OTHERS, ids=[words for *_, words in OTHERS])
def test_another_model_optimizer_or_data(
    tmp_path: Path, contents: Contents, overrides: tuple[str, ...], words: str
) -> None:
    path = make_checkpoint(tmp_path, 5)
    with pytest.raises(ConfigError) as caught:
        check_model(read_manifest(path), contents, load_config(["steps=20", "global_batch=8", *overrides]), path)
    assert str(caught.value).startswith(f"resume={path}: ")
    assert words in str(caught.value)


def test_a_checkpoint_of_when_the_last_samples_were_always_held_out(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 5)
    manifest = read_manifest(path)
    then = {name: value for name, value in manifest.config["eval"].items() if name not in ("split", "data")}
    manifest = replace(manifest, config={**manifest.config, "eval": then})
    config = load_config(["steps=20", "global_batch=8"])
    with pytest.raises(ConfigError) as caught:
        check_model(manifest, replace(CONTENTS, samples=105), config, path)
    assert "(eval.split=shuffled (was null)); that run held out" in str(caught.value)
    assert str(caught.value).endswith("set eval.split=last and eval.every")


def test_the_folder_keeps_the_newest_and_sweeps_what_is_half(tmp_path: Path) -> None:
    for step in (8, 9, 10):
        make_checkpoint(tmp_path, step)
    make_checkpoint(tmp_path, 9)
    (tmp_path / "step-11.partial").mkdir()
    (tmp_path / "step-7.old.partial").mkdir()
    (tmp_path / "mine").mkdir()
    assert list(complete(tmp_path)) == [8, 9, 10]
    keep_newest(tmp_path, 2)
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "step-10", "step-9"]
    assert complete(tmp_path / "nothing") == {}


@pytest.mark.parametrize(("dp", "pp"), [(1, 1), (3, 2), (8, 1)])
@pytest.mark.parametrize("recipe", ["gpt_stdlib", "resnet_digits"])
def test_every_element_is_written_by_one_rank(recipe: str, dp: int, pp: int) -> None:
    granule = "parallel.granule=4" if recipe == "resnet_digits" else "parallel.granule=1"
    config = small_config(recipe, f"parallel.dp={dp}", f"parallel.pp={pp}", granule)
    artifact = build(config, None).artifact
    plan = plan_of(config, artifact)
    boxes: dict[str, list[tuple[int, int]]] = {}
    numel = {}
    for rank in plan.ranks:
        for piece in owned_pieces(artifact, plan, rank, 2):
            boxes.setdefault(piece.tensor, []).append((piece.span.lo, piece.span.hi))
            numel[piece.tensor] = math.prod(piece.shape)
    for tensor, found in boxes.items():
        borders = sorted(found)
        assert borders[0][0] == 0 and borders[-1][1] == numel[tensor], tensor
        assert all(before[1] == after[0] for before, after in itertools.pairwise(borders)), tensor
    assert {name.partition("/")[0] for name in boxes} == (
        {"model", "optimizer", "buffer"} if recipe == "resnet_digits" else {"model", "optimizer"}
    )
