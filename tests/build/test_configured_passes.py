"""The keys under `passes`: what pipeline they make, what is refused, and what of it the program cache knows."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from elaswave_fx.build.builder import build
from elaswave_fx.build.configured_passes import make_pipeline, user_pass_sources, user_passes_of
from elaswave_fx.build.program_key import program_key
from elaswave_fx.config.compose import load_config
from elaswave_fx.errors import ConfigError
from elaswave_fx.passes.find_cuts import FindCuts
from elaswave_fx.passes.pipeline import BUILT_IN, STANDARD, Pipeline
from elaswave_fx.program.artifact import Artifact
from elaswave_fx.program.forward_code import forward_code
from elaswave_fx.program.model_fingerprint import fingerprint
from tests.passes.models import Classifier, vectors

OWN = "tests.passes.own_passes"


def pipeline(*overrides: str) -> Pipeline:
    return make_pipeline(load_config(overrides).passes)


def names(*overrides: str) -> list[str]:
    return [step.name for step in pipeline(*overrides).passes]


def test_the_keys_of_a_pass_are_its_fields_with_their_defaults() -> None:
    fields = {name: dataclasses.fields(kind) for name, kind in BUILT_IN.items()}
    wanted = {name: {field.name: field.default for field in found} for name, found in fields.items() if found}
    assert load_config().passes.options == wanted
    assert pipeline() == STANDARD


def test_an_option_is_a_key() -> None:
    assert FindCuts(least=2, slack=3.0) in pipeline("passes.find_cuts.least=2", "passes.find_cuts.slack=3").passes


def test_recompute_is_the_policy_unless_that_is_set_itself() -> None:
    assert str(pipeline("recompute=full")).endswith("recompute{policy=full},split_backward")
    assert str(pipeline("recompute=full", "passes.recompute.policy=light")).endswith(
        "recompute{policy=light},split_backward"
    )


def test_the_whole_pipeline_as_text() -> None:
    text = str(STANDARD).replace("simplify,", "").replace("least=4", "least=2")
    assert str(pipeline(f"passes.pipeline='{text}'")) == text
    short = ",".join(name for name in BUILT_IN if name != "simplify")
    assert str(pipeline(f"passes.pipeline='{short}'", "passes.find_cuts.least=2")) == text


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ("{_target_:OWN.Seen}", ["normalize", "seen", "replicate_invariants"]),
        ("{_target_:OWN.Seen,after:find_cuts,times:2}", ["find_cuts", "seen", "cut_units"]),
        ("{_target_:OWN.Seen,before:normalize}", ["seen", "normalize"]),
        (
            "{_target_:OWN.Seen,after:find_cuts},{_target_:OWN.Forgetful,after:find_cuts},{_target_:OWN.Silent,before:seen}",
            ["find_cuts", "silent", "seen", "forgetful", "cut_units"],
        ),
    ],
)
def test_a_pass_of_ones_own_has_a_place(entries: str, expected: list[str]) -> None:
    assert ",".join(expected) in ",".join(names(f"passes.extra=[{entries.replace('OWN', OWN)}]"))


REFUSALS = [
    ("passes.find_cuts.least=0", "passes.find_cuts.least=0: must be at least 1; nearest valid: 1"),
    ("passes.find_cuts.slack=wide", "passes.find_cuts.slack=wide: must be a number"),
    ("passes.recompute.policy=ful", "passes.recompute.policy=ful: must be one of none, light, full; nearest "),
    ("passes.pipeline='normalize,find_cutz'", "passes.pipeline: column 11: find_cutz: no such pass; nearest "),
    ("passes.pipeline=normalize", "passes.pipeline: rewrite_rng is missing; these are needed, in this order: "),
    ("passes.extra=[{after:normalize}]", "passes.extra[0]._target_: is missing; it is the import path of a pass"),
    ("passes.extra=[{_target_:Seen}]", "passes.extra[0]._target_=Seen: must be an import path such as "),
    ("passes.extra=[{_target_:no.Such}]", "passes.extra[0]._target_=no.Such: cannot be loaded: ModuleNotFoundError: "),
    ("passes.extra=[{_target_:OWN.Thawed}]", f"passes.extra[0]._target_={OWN}.Thawed: is no frozen dataclass; "),
    ("passes.extra=[{_target_:OWN.Seen,after:find_cut}]", "passes.extra[0].after=find_cut: no pass of that name in "),
    ("passes.extra=[{_target_:OWN.Seen,before:3}]", "passes.extra[0].before=3: no pass of that name in "),
    ("passes.extra=[{_target_:OWN.Seen,tims:2}]", "passes.extra[0].tims: unknown key; nearest valid key: "),
    ("passes.extra=[{_target_:OWN.Seen,times:x}]", "passes.extra[0].times=x: must be a whole number"),
    (
        "passes.extra=[{_target_:OWN.Seen,after:normalize,before:find_cuts}]",
        "passes.extra[0]: has both after=normalize and before=find_cuts; one of them says the place",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("override", "message"), REFUSALS, ids=[case[0] for case in REFUSALS])
def test_refusal(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pipeline(override.replace("OWN", OWN))
    assert str(caught.value).startswith(message)


def test_a_recipe_with_a_pass_that_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\npasses: {find_cutz: {least: 2}}\n")
    with pytest.raises(ConfigError, match=r"^passes\.find_cutz: unknown key; nearest valid key: passes\.find_cuts$"):
        make_pipeline(load_config(["recipe=mine"], [tmp_path]).passes)
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\npasses: {dmup: graphs}\n")
    with pytest.raises(ConfigError, match=r"^passes\.dmup: unknown key; nearest valid key: passes\.dump$"):
        load_config(["recipe=mine"], [tmp_path])


def key(*overrides: str) -> str:
    model, batch = Classifier(), vectors(2, 2)
    return program_key(load_config(overrides), fingerprint(model), batch, forward_code(model, batch), "")


@pytest.mark.parametrize("place", ["", "passes."], ids=["file", "folder without __init__"])
def test_options_and_sources_of_passes_are_part_of_the_key(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    source = (Path(__file__).parents[1] / "passes" / "own_passes.py").read_text()
    folder = tmp_path / place.rstrip(".")
    folder.mkdir(exist_ok=True)
    (folder / "spare.py").write_text("FACTOR = 2\ndef scaled(x): return x * FACTOR\n")
    (folder / "mine.py").write_text(f"{source}\nfrom {place}spare import scaled\n")

    def found(word: str) -> str:
        for module in ("mine", "spare"):
            sys.modules.pop(f"{place}{module}", None)
        return key(f"passes.extra=[{{_target_:{place}mine.Seen{word}}}]")

    first = found("")
    assert first not in (key(), found(",times:2"), found(",after:find_cuts")) and first == found("")
    (folder / "spare.py").write_text("FACTOR = 3\ndef scaled(x): return x * FACTOR\n")
    assert found("") != first, "a helper beside the pass has changed"
    assert user_pass_sources(load_config([f"passes.pipeline='normalize,{OWN}.Seen'"]).passes)[0][0] == f"{OWN}.Seen"


def test_the_graphs_of_a_program_that_the_cache_has(tmp_path: Path) -> None:
    words = ["recipe=two_tower", "data=synthetic", "data.layout=halves", f"cache.dir={tmp_path}/cache"]
    words.append(f"passes.extra=[{{_target_:{OWN}.Seen,after:cut_units}}]")
    first = build(load_config(words), None)
    text = (first.folder / "artifact.json").read_text()
    again = build(load_config([*words, f"passes.dump={tmp_path}/graphs"]), None)
    assert (first.origin, build(load_config(words), None).origin) == ("program captured", "program from the cache")
    assert again.origin == f"program captured, though the cache has it, with its graphs in {tmp_path}/graphs"
    files = sorted(path.name for path in (tmp_path / "graphs").iterdir())
    assert files[:2] == ["00-capture.txt", "01-normalize.txt"] and files[11] == "11-seen.txt" and len(files) == 17
    assert again.folder == first.folder and (first.folder / "artifact.json").read_text() == text
    assert [path.name for path in first.folder.parent.iterdir()] == [first.folder.name], "nothing half-written"
    made = Artifact.load(first.folder).pipeline
    assert Pipeline.parse(made) == pipeline(*words)
    assert user_passes_of(made) == (f"{OWN}.Seen{{times=1}}",)


def test_a_file_that_parses_the_command_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script_pass.py").write_text("import argparse\nargparse.ArgumentParser().parse_args(['--what'])\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(["passes.extra=[{_target_:script_pass.Own}]"])
    with pytest.raises(ConfigError, match=r"passes\.extra\[0\].*its module ends the process when it is imported"):
        make_pipeline(config.passes)
