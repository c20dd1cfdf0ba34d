"""What the documentation shows works: its files run as they stand, its links lead somewhere.

A fenced block after `<!-- file: NAME -->` is the content of that file.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests import commands
from tests.marks import slow

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
_FILE = re.compile(r"<!-- file: (\S+) -->\n```\w*\n(.*?)```", re.DOTALL)
_LINK = re.compile(r"\]\(([^)#:]*)(?:#([^)]*))?\)")


def write_files(page: str, folder: Path) -> None:
    """The files of a page, in `folder`."""
    found = _FILE.findall((ROOT / "docs" / page).read_text())
    assert found, f"docs/{page} shows no files"
    for name, text in found:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return commands.run(*words, cwd=folder, timeout=900)


def train(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    common = ("--config-dir", ".", "recipe=spirals", "hydra.run.dir=run", f"cache.dir={folder / 'cache'}")
    return run(folder, "elaswave_fx.train", *common, *words)


def test_the_recipe_of_ones_own_learns(tmp_path: Path) -> None:
    write_files("start/recipes.md", tmp_path)
    done = train(tmp_path, "steps=100")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 100
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["eval_loss_last"] < lines[0]["loss"]


@pytest.mark.parametrize(
    "words",
    ["model.widht=3", "data.samples=10", slow("parallel.pp=9"),
     slow("model._target_=mistakes.MeanNet"), "optimizer._target_=mistakes.NormedLion"],
)  # fmt: skip
def test_mistakes_are_answered_as_the_page_says(words: str, tmp_path: Path) -> None:
    write_files("start/recipes.md", tmp_path)
    done = train(tmp_path, words)
    assert done.returncode == 2, done.stdout + done.stderr
    page = " ".join((ROOT / "docs" / "start" / "recipes.md").read_text().split())
    assert f"recipe=spirals {words} {' '.join(done.stderr.split())}" in page


def test_the_pass_and_its_test_work(tmp_path: Path) -> None:
    write_files("start/passes.md", tmp_path)
    done = run(tmp_path, "pytest", "-q", "-p", "no:cacheprovider", "test_drop_unit_scale.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_the_pass_runs_from_a_recipe(tmp_path: Path) -> None:
    write_files("start/passes.md", tmp_path)
    common = ("--config-dir", ".", "recipe=unscaled", f"cache.dir={tmp_path / 'cache'}")
    done = run(tmp_path, "elaswave_fx.train", *common, "hydra.run.dir=run", "steps=10")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass of yours: drop_unit_scale.DropUnitScale{divisions=false}" in done.stdout
    seen = run(tmp_path, "elaswave_fx.inspect", *common, "out=seen", "passes.dump=graphs")
    assert seen.returncode == 0, seen.stdout + seen.stderr
    assert seen.stdout.startswith("program captured, though the cache has it, with its graphs in graphs\n")
    text = "normalize,drop_unit_scale.DropUnitScale{divisions=false},replicate_invariants,"
    assert f"pipeline: {text}" in seen.stdout
    assert (tmp_path / "seen" / "graph.txt").read_text().startswith(f"pipeline: {text}")
    assert (tmp_path / "graphs" / "02-drop_unit_scale.txt").is_file()


@pytest.mark.parametrize(
    "words",
    ["passes.find_cuts.slak=2", "passes.extra=[{_target_: drop_unit_scale.calls}]",
     slow('passes.pipeline="normalize,find_cutz"'),
     slow("passes.extra=[{_target_: drop_unit_scale.DropUnitScale, division: false}]"),
     slow("passes.extra=[{_target_: drop_unit_scale.DropUnitScale, after: normalise}]")],
)  # fmt: skip
def test_a_pipeline_that_cannot_be_is_answered_as_the_page_says(words: str, tmp_path: Path) -> None:
    write_files("start/passes.md", tmp_path)
    done = run(tmp_path, "elaswave_fx.inspect", words, "data=synthetic", f"cache.dir={tmp_path / 'cache'}")
    assert done.returncode == 2, done.stdout + done.stderr
    page = " ".join((ROOT / "docs" / "start" / "passes.md").read_text().split())
    quoted = f"'{words}'" if set(words) & set('{"') else words
    assert f"{quoted} {' '.join(done.stderr.split())}" in page


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in _LINK.findall(page.read_text()):
        where = (page.parent / target) if target else page
        assert where.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(where), f"{page.name} links to {target}#{anchor}"
