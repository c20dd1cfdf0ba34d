"""`verify` finds what was planted in a run, with step and place, and nothing in one that is as it should be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from elaswave_fx import verify
from elaswave_fx.audit.finding import Finding, Verdict
from elaswave_fx.config.keys import Config
from elaswave_fx.control.protocol import do
from elaswave_fx.control.protocol.types import Certificate
from elaswave_fx.control.store.ledger import CHAIN_START, linked
from elaswave_fx.data.order import SampleOrder
from elaswave_fx.entry import run_command
from elaswave_fx.plan.lower import engine_spec
from elaswave_fx.plan.work.box import numbered
from elaswave_fx.worker.loop import Training
from tests.recovery.harness import Finished, finish
from tests.runs import small_config

STEPS = 8
LOST = "faults=[{step: 1, rank: 1, kind: kill, phase: backward}]"


def config(*words: str) -> Config:
    return small_config("gpt_stdlib", f"steps={STEPS}", "exact=true", "parallel.dp=2", "parallel.pp=2", *words)


def findings(run: Path, other: Path | None = None, steps: tuple[int, int] | None = None) -> dict[str, Finding]:
    """The findings by check; of several of a check the first."""
    found: dict[str, Finding] = {}
    for finding in verify.verify(verify.Wanted(run, other, steps), lambda what, done, of: None):
        found.setdefault(finding.check, finding)
    return found


def wrong(run: Path, other: Path | None = None, steps: tuple[int, int] | None = None) -> dict[str, str]:
    return {
        check: finding.words
        for check, finding in findings(run, other, steps).items()
        if finding.verdict is Verdict.WRONG
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run that lost a rank and has checkpoints."""
    run = finish(config("checkpoint.every=3", "checkpoint.keep=9", LOST), tmp_path_factory.mktemp("whole") / "run")
    assert run.code == 0, run.console[-3000:]
    assert run.of_kind("left")
    return run


@pytest.fixture
def copy(whole: Finished, tmp_path: Path) -> Path:
    """One to be damaged."""
    return Path(shutil.copytree(whole.folder, tmp_path / "copy", symlinks=True))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The same on one rank."""
    run = finish(config("parallel.dp=1", "parallel.pp=1"), tmp_path_factory.mktemp("alone") / "run")
    assert run.code == 0, run.console[-3000:]
    return run


def rewrite(path: Path, change: Callable[[list[str]], None]) -> None:
    lines = path.read_text().splitlines()
    change(lines)
    path.write_text("".join(line + "\n" for line in lines))


def edit(path: Path, number: int, **fields: object) -> None:
    """One line of a file, with other fields."""

    def change(lines: list[str]) -> None:
        lines[number] = json.dumps({**json.loads(lines[number]), **fields})

    rewrite(path, change)


def chain_anew(folder: Path) -> None:
    """As somebody would who knows how lines follow each other, and edits the summary too."""
    texts, head = [], CHAIN_START
    for line in (folder / "ledger.jsonl").read_text().splitlines():
        text, head = linked({key: value for key, value in json.loads(line).items() if key != "previous"}, head)
        texts.append(text)
    (folder / "ledger.jsonl").write_text("".join(text + "\n" for text in texts))
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "ledger_head": head}))


def test_a_run_is_as_it_should_be(whole: Finished, alone: Finished) -> None:
    # One of the two is given up if owners move while it is written.
    kept = min(step for step in (3, 6) if (whole.folder / f"checkpoints/step-{step}").exists())
    found = findings(whole.folder, alone.folder, (kept + 1, 7))
    assert {check: finding.verdict for check, finding in found.items()} == dict.fromkeys(
        (
            "chain", "cover", "tiles", "fingerprint", "states", "metrics", "summary", "contents", "counts", "keys",
            "model", "recipes", "compared", "replay",
        ),
        Verdict.HOLDS,
    ), "\n".join(map(str, found.values()))  # fmt: skip
    assert found["replay"].words.startswith(f"steps {kept} to 7 once more from step-{kept}")
    assert wrong(alone.folder, whole.folder, (0, 0)) == {}


@pytest.mark.parametrize(
    "kind", [("two_tower",), ("resnet_digits", "parallel.granule=4"), ("hf_gpt2", "precision=bf16")]
)
def test_other_models_and_data_are_checked_too(kind: tuple[str, ...], tmp_path: Path) -> None:
    words = ("steps=3", "exact=true", "parallel.dp=2", "checkpoint.every=2", *kind[1:])
    assert finish(small_config(kind[0], *words), tmp_path).code == 0
    found = findings(tmp_path, steps=(2, 2))
    assert [str(each) for each in found.values() if each.verdict is not Verdict.HOLDS] == []


def test_a_run_that_is_gone_on_with_is_one_chain(tmp_path: Path) -> None:
    words = ("checkpoint.every=2", "resume=auto")
    assert finish(config(*words, "steps=5"), tmp_path).code == 0
    assert finish(config(*words, "parallel.dp=1"), tmp_path).code == 0
    found = findings(tmp_path, steps=(5, 7))
    assert [str(each) for each in found.values() if each.verdict is not Verdict.HOLDS] == []
    edit(tmp_path / "ledger.jsonl", 1, count=(1.0).hex())
    assert wrong(tmp_path)["chain"].startswith("line 3 does not follow line 2")


# --- What is planted in the files of a run


def test_an_edited_line_is_found(copy: Path) -> None:
    edit(copy / "ledger.jsonl", 2, loss=(1.5).hex())
    found = wrong(copy)
    assert found["chain"].startswith("line 4 does not follow line 3")
    assert found["metrics"].startswith("step 2: loss is ")
    assert set(found) == {"chain", "metrics"}


def test_an_edited_last_line_is_found(copy: Path) -> None:
    edit(copy / "ledger.jsonl", -1, squares=(1.5).hex())
    assert wrong(copy)["chain"] == "line 8 is not the last one of the run, or was edited"


def test_a_removed_line_is_found(copy: Path) -> None:
    rewrite(copy / "ledger.jsonl", lambda lines: lines.pop(4))
    found = wrong(copy)
    assert found["chain"].startswith("line 5 does not follow line 4")
    assert found["cover"].startswith("step 4 has 0 lines")


def test_swapped_lines_are_found(copy: Path) -> None:
    rewrite(copy / "ledger.jsonl", lambda lines: lines.insert(5, lines.pop(2)))
    assert wrong(copy)["chain"].startswith("line 3 does not follow line 2")


def test_a_cut_ledger_is_found(copy: Path) -> None:
    path = copy / "ledger.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    found = wrong(copy)
    assert found["ledger"] == "line 8 is cut off"
    assert found["chain"] == "line 7 is not the last one of the run, or was edited"
    rewrite(path, lambda lines: lines.pop())
    assert wrong(copy)["summary"] == "says 8 steps, the ledger has 7"


def test_a_line_that_is_none_is_found(copy: Path) -> None:
    rewrite(copy / "ledger.jsonl", lambda lines: lines.__setitem__(3, '{"step": "three"}'))
    found = findings(copy)
    assert found["ledger"].verdict is Verdict.WRONG and found["ledger"].words.startswith(
        "line 4 is no line of a ledger"
    )
    rewrite(copy / "ledger.jsonl", lambda lines: lines.__setitem__(3, "{"))
    found = findings(copy)
    assert found["chain"].verdict is found["states"].verdict is Verdict.UNCHECKED


def test_an_edited_loss_is_found(copy: Path) -> None:
    edit(copy / "metrics.jsonl", 5, loss=1.25)
    assert wrong(copy) == {"metrics": wrong(copy)["metrics"]}
    assert wrong(copy)["metrics"].startswith("step 5: loss is 1.25, the ledger's line 6 says ")
    rewrite(copy / "metrics.jsonl", lambda lines: lines.pop(6))
    assert wrong(copy)["metrics"].startswith("step 5")


@pytest.mark.parametrize(
    ("fields", "check", "words"),
    [
        ({"count": (7.0).hex(), "weight_sum": 7.0}, "counts", "step 5 (line 6): 7 targets were counted"),
        ({"keys": {"0": "00", "1": "00", "2": "00"}}, "keys", "step 5 (line 6), rank "),
        ({"content_hash": "00"}, "contents", "step 5 (line 6): content_hash is not that of its tiles"),
        ({"state_digest": "00"}, "states", "step 5 (line 6): the digests of its buckets do not add up"),
        ({"fingerprint": "00"}, "fingerprint", "step 5 (line 6): another machine or program"),
        ({"tiles": {"0": [[0, 1, 0, 8]]}}, "tiles", "step 5 (line 6): rank 0 consumed "),
    ],
)
def test_an_edit_with_a_new_chain_is_found_by_what_it_says(
    fields: dict[str, object], check: str, words: str, copy: Path
) -> None:
    edit(copy / "ledger.jsonl", 5, **fields)
    chain_anew(copy)
    found = wrong(copy)
    assert "chain" not in found and found[check].startswith(words), found


def test_another_model_file_is_found(copy: Path) -> None:
    path = copy / "model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[0] += 1.0
    save_file(tensors, path)
    assert wrong(copy)["model"].endswith("its parameters are not those that the run ended with (params_digest)")
    path.write_bytes(b"no model")
    assert "cannot be read" in wrong(copy)["model"]


def test_other_running_statistics_are_found(tmp_path: Path) -> None:
    """In the model file, in a checkpoint that a replay begins from, and in the ledger beside another run's."""
    words = ("steps=4", "exact=true", "parallel.dp=2", "parallel.granule=4")
    for folder in (tmp_path / "one", tmp_path / "two"):
        assert finish(small_config("resnet_digits", *words), folder).code == 0
    one, two = tmp_path / "one", tmp_path / "two"
    assert wrong(one, two, (0, 3)) == {}
    lines = [json.loads(line) for line in (one / "ledger.jsonl").read_text().splitlines()]
    summary = json.loads((one / "summary.json").read_text())
    assert all(line["buckets"].keys() == summary["buckets"].keys() for line in lines)
    last = max(map(int, summary["buckets"])) - 1  # of running statistics; counters of steps come after them
    other = {**lines[2]["buckets"], str(last): "0" * 32}
    edit(one / "ledger.jsonl", 2, buckets=other)
    found = wrong(one, two, (0, 3))
    assert f"bucket {last}, unit4.buffers (" in found["compared"], found
    assert f"bucket {last}, unit4.buffers (" in found["replay"], found
    tensors = load_file(two / "model.safetensors")
    tensors["stem_norm.running_mean"][0] += 1.0
    save_file(tensors, two / "model.safetensors")
    assert "unit0.buffers (stem_norm.running_mean, stem_norm.running_var)" in wrong(two)["model"]
    save_file({**tensors, "stem_norm.running_mean": torch.zeros(3)}, two / "model.safetensors")
    assert "unit0.buffers (stem_norm.running_mean, stem_norm.running_var)" in wrong(two)["model"]


# --- What is planted in a run while it goes on


def test_a_flipped_bit_is_found_by_another_run_and_by_a_replay(
    alone: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Training._take_step

    def step_and_flip(training: Training, what: do.TakeStep) -> Certificate:
        worker = training._worker
        if what.step == 4 and worker.rank == 2:
            box_number, box = next((n, box) for n, box in numbered(worker.plan.boxes) if box.owner == 2)
            state = worker.engine.native.read(box_number)
            assert state is not None and len(box.span) > 0
            state.master.view(torch.int32)[0] ^= 1 << 20
        return step(training, what)

    monkeypatch.setattr(Training, "_take_step", step_and_flip)
    run = finish(config("copies.count=0", "checkpoint.every=3", "checkpoint.keep=9"), tmp_path)
    monkeypatch.undo()
    assert run.code == 0, run.console[-3000:]
    found = wrong(tmp_path, alone.folder, (3, 7))
    assert set(found) == {"compared", "replay"}
    assert found["compared"].startswith("step 5 (lines 6 and 6): it began from other states: bucket ")
    assert found["replay"].startswith("step 5 (line 6): the state that it began from has another bucket ")
    named = found["compared"].partition("bucket ")[2].removesuffix(" is another one")
    assert named in found["replay"] and ".weight" in named


def test_a_repeated_sample_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    indices = SampleOrder.indices

    def with_one_twice(order: SampleOrder, first: int, count: int):
        found = indices(order, first, count)
        place = 3 * 8 + 5  # sample 5 of step 3
        if first <= place - 1 and place < first + count:
            found[place - first] = found[place - first - 1]
        return found

    monkeypatch.setattr(SampleOrder, "indices", with_one_twice)
    assert finish(config(), tmp_path).code == 0
    monkeypatch.undo()
    found = wrong(tmp_path)
    assert set(found) == {"contents"}
    assert found["contents"].startswith("step 3 (line 4), rank ") and "samples 4 to 7" in found["contents"]


def test_a_foreign_seed_in_one_unit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of a rank draws with another seed: all units of its tile do, and the rank has one that draws."""
    original = engine_spec.engine_spec
    from elaswave_fx.worker import engine as worker_engine

    def with_foreign_seed(job, plan, rank, kernels=None):
        spec = original(job, plan, rank, kernels)
        if rank == 1:
            return replace(spec, keys=replace(spec.keys, seed=99))
        return spec

    monkeypatch.setattr(worker_engine, "engine_spec", with_foreign_seed)
    words = ("model.dropout=0.1", "model.attention_dropout=0.1")
    assert finish(config("parallel.dp=1", "parallel.pp=4", *words), tmp_path).code == 0
    monkeypatch.undo()
    found = wrong(tmp_path)
    assert set(found) == {"keys"}
    assert found["keys"].startswith("step 0 (line 1), rank 1, samples 0 to 7, units ")


# --- What cannot be checked


def test_draws_by_rank_are_checked_too(tmp_path: Path) -> None:
    assert finish(config("exact=false", "lab.reshard_rng=false", "model.dropout=0.1", LOST), tmp_path).code == 0
    found = findings(tmp_path)
    assert [str(each) for each in found.values() if each.verdict is not Verdict.HOLDS] == []


def test_a_run_without_exact_is_checked_as_far_as_that_goes(alone: Finished, tmp_path: Path) -> None:
    assert finish(config("exact=false"), tmp_path).code == 0
    found = findings(tmp_path, alone.folder, (2, 3))
    assert found["contents"].verdict is found["keys"].verdict is found["chain"].verdict is Verdict.HOLDS
    assert found["recipes"].verdict is found["replay"].verdict is Verdict.UNCHECKED
    assert "without exact=true" in found["replay"].words


def test_other_data_is_said(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = json.loads((copy / "run.json").read_text())
    said["config"]["data"]["limit_mb"] = 0.5
    (copy / "run.json").write_text(json.dumps(said))
    assert wrong(copy)["contents"].startswith("step 0 (line 1), rank ")


def test_a_program_that_is_not_there_any_more_is_said(copy: Path) -> None:
    said = json.loads((copy / "run.json").read_text())
    said["program"] = "0" * 24
    (copy / "run.json").write_text(json.dumps(said))
    found = findings(copy, steps=(4, 5))
    for check in ("contents", "counts", "keys", "model", "replay"):
        assert found[check].verdict is Verdict.UNCHECKED and "make another program now" in found[check].words


def test_a_killed_run_has_no_summary_to_hold_against(copy: Path) -> None:
    (copy / "summary.json").unlink()
    found = findings(copy, steps=(7, 7))
    assert found["chain"].verdict is found["summary"].verdict is found["model"].verdict is Verdict.UNCHECKED
    assert found["replay"].verdict is Verdict.HOLDS and "at their beginnings" in found["replay"].words


def test_files_of_a_run_that_goes_on_may_be_apart(copy: Path) -> None:
    (copy / "summary.json").unlink()
    path = copy / "ledger.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    found = findings(copy)
    assert found["ledger"].verdict is Verdict.UNCHECKED and found["metrics"].verdict is Verdict.HOLDS
    for number in (6, 5):
        rewrite(copy / "metrics.jsonl", lambda lines, number=number: lines.__delitem__(slice(number, None)))
        assert findings(copy)["metrics"].verdict is Verdict.HOLDS


def test_a_machine_of_other_bits_does_not_replay(copy: Path) -> None:
    said = json.loads((copy / "run.json").read_text())
    said["fingerprint"]["cpu_capability"] = "another"
    (copy / "run.json").write_text(json.dumps(said))
    found = findings(copy, steps=(4, 4))
    assert found["replay"].verdict is Verdict.UNCHECKED
    assert found["replay"].words.startswith("this machine computes other bits: cpu_capability is ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "verify takes one or two run directories, not 0; see --help"),
        (["a", "b", "c"], "verify takes one or two run directories, not 3; see --help"),
        (["RUN", "replay=x"], "replay=x: is no step and no range of steps; nearest valid: replay=40-45"),
        (["RUN", "replay=7-3"], "replay=7-3: the run has steps 0 to 7"),
        (["RUN", "replay=9"], "replay=9-9: the run has steps 0 to 7"),
        (["RUN", "--all"], "--all: unknown option; see --help"),
        (["/nowhere"], "/nowhere: is no run directory, it has no ledger.jsonl"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], message: str, whole: Finished, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(whole.folder)
    monkeypatch.setattr("sys.argv", ["verify", *(run if word == "RUN" else word for word in words)])
    assert run_command(verify.main) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_the_exit_code_says_whether_something_is_wrong(
    whole: Finished, copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["verify", str(whole.folder)])
    assert verify.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{whole.folder}: 11 holds"
    edit(copy / "metrics.jsonl", 5, loss=1.25)
    monkeypatch.setattr("sys.argv", ["verify", str(copy)])
    assert verify.main() == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"{copy}: 10 holds, 1 WRONG"


@pytest.fixture(autouse=True)
def _deterministic_here_only() -> Iterator[None]:
    """A replay sets this process up as it does ranks."""
    before = torch.get_deterministic_debug_mode()
    yield
    torch.set_deterministic_debug_mode(before)
