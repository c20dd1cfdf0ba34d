"""The compiler knows no model by name: what works for one works for the next one too."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
# Words of this project's language that are model types as well: how stages are balanced, gradients bounded, files kept.
ORDINARY = {"minimax", "clip", "git"}
# Our own model of that name: its file, and where users choose it.
OWN = {"resnet"}
OWN_PLACES = {"elaswave_fx/models/resnet.py", "elaswave_fx/models/build.py", "elaswave_fx/config/groups.py"}


def model_types() -> set[str]:
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    names = {str(name).lower() for name in auto.CONFIG_MAPPING_NAMES}
    return {name.replace("-", "_") for name in names} - ORDINARY


def words(source: str) -> set[str]:
    """Names and words in strings of a source, lower case; comments and docstrings may give examples."""
    found: set[str] = set()
    previous = tokenize.INDENT
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        docstring = token.type == tokenize.STRING and previous in (tokenize.INDENT, tokenize.NEWLINE, tokenize.NL)
        if token.type in (tokenize.NAME, tokenize.STRING) and not docstring:
            found |= {word.lower().replace("-", "_") for word in re.findall(r"[A-Za-z0-9_-]+", token.string)}
        if token.type != tokenize.COMMENT:
            previous = token.type
    return found


def sources() -> list[Path]:
    return [path for top in ("elaswave_fx", "passes") for path in sorted((ROOT / top).rglob("*.py"))]


def named_types(path: Path, types: set[str]) -> list[str]:
    own = OWN if str(path.relative_to(ROOT)) in OWN_PLACES else set()
    return sorted((words(path.read_text()) & types) - own)


def test_no_source_names_a_model_type() -> None:
    types = model_types()
    assert {"gpt2", "llama", "bert", "vit", "t5"} <= types
    assert {str(path.relative_to(ROOT)): found for path in sources() if (found := named_types(path, types))} == {}


def test_the_rule_sees_names_and_strings() -> None:
    assert "gpt2" in words("if config.model_type == 'gpt2':\n    pass\n")
    assert "llama" in words("import transformers.models.llama\n")
    assert "llama" not in words('"""As llama does."""\nx = 1  # llama\n')
