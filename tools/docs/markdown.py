"""Markdown of generated pages: tables, code marks, docstrings of fields.

table(("key", "default"), [("`steps`", "100")])  ->  "| key | default |\\n|---|---|\\n| `steps` | 100 |"
prose("bounded by switch.memory", {"switch.memory"})  ->  "bounded by `switch.memory`"
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_CODE = re.compile(
    r"`[^`]*`|\[\{.*?\}\]|\[[\d, ]+\]|--[a-z-]+"
    r"|[\w.+~*/$-]+[=*$_][\w.=*/+-]*(?:\[[^\]]*\]|\([^)]*\))|[\w.+~*/$-]*[=*$_][\w.=*/+-]+"
    r"|torch\.\w[\w.]*\w|\w+\.[a-z_]+\.?[a-z_]*\b"
)
_LEAD = re.compile(
    r"(?:(?<=^)|(?<=[|:;] ))([\w.\[\]-]+)(?=: )|(?:(?<=^)|(?<=[|:] ))([\w-]+)(?= \|)|(?<=\| )([\w-]+)(?=;|$)"
)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; `|` in cells is escaped."""
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("|" + "|".join(f" {cell} " if cell != "---" else cell for cell in line) + "|" for line in lines)


def page_of(title: str, intro: str, *sections: str) -> str:
    """Return a page that says how it is made."""
    made = "<!-- Made by `make docs`; do not edit. -->"
    lead = intro if intro.startswith(" ") else wrapped(intro)
    return "\n\n".join([f"# {title}", made, lead, *(each for each in sections if each)]) + "\n"


def code(text: str) -> str:
    """Return the text as code, if there is any."""
    return f"`{text}`" if text else ""


def prose(text: str, names: Collection[str] = ()) -> str:
    """Return a comment as prose: keys, values and expressions become code, ` | ` between choices a semicolon."""
    text = _LEAD.sub(lambda found: f"`{found[0]}`", text)

    def marked(found: re.Match[str]) -> str:
        word = found[0]
        tail = word[len(word.rstrip(".,:")) :]
        word = word.rstrip(".,:")
        if word.startswith("`"):
            return word + tail
        is_name = not re.search(r"[=*$_\[{]|^--|^torch\.", word)
        return (word if is_name and word not in names and not word.endswith("json") else f"`{word}`") + tail

    return _CODE.sub(marked, text).replace(" | ", "; ")


def wrapped(text: str) -> str:
    """Return a paragraph in lines as long as those of other pages."""
    return textwrap.fill(text.strip(), 115, break_long_words=False, break_on_hyphens=False)


def clause(doc: str) -> str:
    """Return a docstring as part of a sentence."""
    words = doc.rstrip(".")
    return prose(words[:1].lower() + words[1:])


def first_paragraph(docstring: str | None) -> str:
    """Return the first paragraph in one line."""
    return " ".join(inspect.cleandoc(docstring or "").split("\n\n")[0].split())


def field_docs(cls: type) -> dict[str, str]:
    """Return the docstrings that stand under the fields of a class, each in one line."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    return _under_names(body.body)


def constant_docs(module: object) -> dict[str, str]:
    """Return the docstrings that stand under the names that a module assigns."""
    return _under_names(ast.parse(inspect.getsource(module)).body)  # type: ignore[arg-type]


def _under_names(body: Sequence[ast.stmt]) -> dict[str, str]:
    found: dict[str, str] = {}
    for statement, below in zip(body, [*body[1:], None], strict=True):
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        target = targets[0] if targets else getattr(statement, "target", None)
        if isinstance(target, ast.Name) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[target.id] = " ".join(str(below.value.value).split())
    return found
