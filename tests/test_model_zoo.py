"""The page of architectures: which run, which do not and why; overrides as the command line takes them."""

from __future__ import annotations

from pathlib import Path

from elaswave_fx.config.compose import load_config
from tools.model_zoo import Cuts, Entry, Found, _call, _difference, page, read_list

LIST = Path(__file__).parent.parent / "docs" / "model_types.yaml"


def test_the_list_has_twenty_types_of_every_family() -> None:
    entries = read_list(LIST)
    assert len(entries) == len({entry.type for entry in entries}) == 20
    assert {entry.family for entry in entries} == {
        "decoder", "encoder", "encoder-decoder", "vision", "mixture of experts",
    }  # fmt: skip


def test_overrides_are_those_of_the_command_line() -> None:
    entry = Entry("convnext", "vision", {"hidden_sizes": [16, 32], "patch_size": 2}, {"patch_size": 4})
    config = load_config(entry.overrides(deep=True))
    assert config.model.name == "convnext" and config.data.kind == "digits"
    assert config.model.options == {"hidden_sizes": [16, 32], "patch_size": 4}


def test_the_page_shows_what_was_found() -> None:
    entries = [Entry(name, "decoder", {}, {}) for name in ("one", "two")]
    losses = {(1, 1): (5.5, 5.4), (2, 2): (5.5, 5.4)}
    found = [
        Found(entries[0], losses, Cuts(26, 32.77, {2: 0.96, 4: 0.91}), None),
        Found(entries[1], {}, None, "1x1: the model fails to export"),
    ]
    text = page(found, "make models")
    assert "1 of 2 run and agree; 1 of them reach 0.9 at 4 stages." in text
    assert "| `one` | decoder | 5.500 -> 5.400 | 26 | 32.8 | 0.96 | 0.91 | - |" in text
    assert "- `two` (decoder): 1x1: the model fails to export" in text


def test_losses_that_differ_are_a_refusal() -> None:
    assert _difference({(1, 1): (5.5, 5.4), (2, 2): (5.5, 5.400001)}) is None
    assert _difference({(1, 1): (5.5, 5.4), (2, 2): (5.5, 5.41)}) == "step 1: loss 5.4 on one rank, 5.41 on 2x2"


def test_the_reason_is_the_last_line_of_what_failed() -> None:
    assert _call(["-c", "import sys; sys.exit('error: no such operator')"]) == "no such operator"
    assert _call(["-c", "raise SystemExit(3)"]) == "exit code 3"
    assert _call(["-c", "pass"]) is None
