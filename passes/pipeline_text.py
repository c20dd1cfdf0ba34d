"""The notation of pipelines: names with options in braces, as in xDSL, and values as on Hydra's command line.

pipeline := pass {"," pass}
pass     := NAME [ "{" {option} "}" ]          a NAME with dots is the import path of a user's class
option   := NAME "=" value
value    := null | true | false | number | word | "text" | "[" [value {"," value}] "]"

read_text("normalize,find_cuts{slack=1.5 least=2}")
    ->  (PassText("normalize", 1, {}), PassText("find_cuts", 11, {"slack": 1.5, "least": 2}))
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from elaswave_fx.errors import ConfigError

_TOKEN = re.compile(
    r'(?P<string>"(?:[^"\\]|\\.)*")|(?P<number>[+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)|(?P<word>[A-Za-z_][\w.]*)'
    r"|(?P<sign>[,{}=\[\]])|(?P<end>\Z)"
)
_BARE = re.compile(r"[A-Za-z_][\w.]*\Z", re.ASCII)
_WORDS: Mapping[str, object] = {"null": None, "true": True, "false": False}


@dataclass(frozen=True)
class PassText:
    """A pass as written: its name, the column of the name (from 1), and the given options."""

    name: str
    column: int
    options: Mapping[str, object]


def read_text(text: str) -> tuple[PassText, ...]:
    """The passes of a text, in order. Raise ConfigError with the column, the text there and what is allowed."""
    return _Reader(text).pipeline()


def write_pass(name: str, options: Mapping[str, object]) -> str:
    """A pass in this notation, with all of `options`: None, bool, int, float, str and tuples of them."""
    written = " ".join(f"{option}={_write(value)}" for option, value in options.items())
    return f"{name}{{{written}}}" if written else name


def _write(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ",".join(map(_write, value)) + "]"
    if isinstance(value, str):
        return value if _BARE.match(value) and value not in _WORDS else json.dumps(value)
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    assert isinstance(value, (int, float)), f"an option holds {value!r}; passes are checked for that when they are made"
    return repr(value)


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    column: int


class _Reader:
    """Parses a text from left to right with one token of lookahead."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._token = self._next()

    def pipeline(self) -> tuple[PassText, ...]:
        passes = [self._pass()]
        while self._take(","):
            passes.append(self._pass())
        if self._token.kind != "end":
            raise self._refusal("',' or the end")
        return tuple(passes)

    def _pass(self) -> PassText:
        name = self._word("the name of a pass")
        options: dict[str, object] = {}
        if self._take("{"):
            while not self._take("}"):
                option = self._word("an option or '}'")
                if option.text in options:
                    raise ConfigError(f"column {option.column}: {name.text}.{option.text} is given twice")
                self._expect("=")
                options[option.text] = self._value()
        return PassText(name.text, name.column, options)

    def _value(self) -> object:
        token = self._token
        if self._take("["):
            return self._list()
        if token.kind in ("sign", "end"):
            raise self._refusal("a value")
        self._token = self._next()
        if token.kind == "number":
            return int(token.text) if re.fullmatch(r"[+-]?\d+", token.text) else float(token.text)
        if token.kind == "word":
            return _WORDS.get(token.text, token.text)
        try:
            return json.loads(token.text)
        except ValueError as error:
            raise ConfigError(f"column {token.column}: {token.text} is no text as JSON writes it ({error})") from error

    def _list(self) -> tuple[object, ...]:
        values: list[object] = []
        while not self._take("]"):
            if values:
                self._expect(",")
            values.append(self._value())
        return tuple(values)

    def _word(self, wanted: str) -> _Token:
        token = self._token
        if token.kind != "word":
            raise self._refusal(wanted)
        self._token = self._next()
        return token

    def _take(self, sign: str) -> bool:
        found = self._token.kind == "sign" and self._token.text == sign
        if found:
            self._token = self._next()
        return found

    def _expect(self, sign: str) -> None:
        if not self._take(sign):
            raise self._refusal(f"'{sign}'")

    def _next(self) -> _Token:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
        column = self._at + 1
        match = _TOKEN.match(self._text, self._at)
        if match is None:
            raise ConfigError(f"column {column}: {self._text[self._at]!r} is no part of a pipeline")
        self._at = match.end()
        assert match.lastgroup is not None, "one alternative matched"
        return _Token(match.lastgroup, match.group(), column)

    def _refusal(self, wanted: str) -> ConfigError:
        found = "the end" if self._token.kind == "end" else f"'{self._token.text}'"
        return ConfigError(f"column {self._token.column}: {found} stands where {wanted} belongs")
