"""A short form of `make fuzz`, and that a parser which breaks is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import fuzz


def test_damaged_input_is_refused_in_the_parsers_own_words(tmp_path: Path) -> None:
    for parser in fuzz.parsers(tmp_path):
        for data in parser.valid:
            parser.parse(data)
        found = [each for each in fuzz.fuzz(parser, 4000, seed=0) if each is not None]
        assert not found, f"{len(found)} findings, first {found[0]}"


def test_a_parser_that_breaks_is_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    broken = fuzz.Parser("broken", (b"{}",), lambda data: data.decode("ascii"), ())
    monkeypatch.setattr(fuzz, "parsers", lambda folder: [broken])
    assert fuzz.main(["--inputs", "200"]) == 1
    assert "broken, seed " in capsys.readouterr().out


@pytest.mark.parametrize(("only", "native", "code"), [("", 0, 0), ("", 1, 1), ("none", 0, 0), ("none", 3, 1)])
def test_the_native_parsers_count_too(
    only: str, native: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz, "parsers", lambda folder: [fuzz.Parser("fine", (b"{}",), len, ())])
    program = tmp_path / "fuzz_parsers"
    program.write_text(f'#!/bin/sh\ntest "$*" = "--inputs 20 --seed 7 --only {only}" && exit {native}\nexit 9\n')
    program.chmod(0o755)
    assert fuzz.main(["--inputs", "20", "--seed", "7", "--only", only, "--native", str(program)]) == code
