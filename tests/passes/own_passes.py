"""Passes as users write them: good ones, and ones that are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from elaswave_fx.program.ir import Program, calls


@dataclass(frozen=True)
class Everything:
    """Has an option of every type that an option may have."""

    name: ClassVar[str] = "everything"
    count: int
    share: float
    on: bool
    word: str
    mode: Literal["fast", "slow"] = "fast"
    limit: int | None = None
    label: str | None = None
    sizes: tuple[int, ...] = ()
    pair: tuple[str, float] = ("a", 1.0)
    nested: tuple[tuple[int, ...], ...] = ()

    def apply(self, program: Program) -> Program:
        return program


@dataclass(frozen=True)
class Seen:
    """Leaves everything as it is."""

    name: ClassVar[str] = "seen"
    times: int = 1

    def apply(self, program: Program) -> Program:
        return program


@dataclass(frozen=True)
class Forgetful:
    """Loses the value of a call."""

    name: ClassVar[str] = "forgetful"

    def apply(self, program: Program) -> Program:
        program = program.clone()
        next(calls(program.graph.graph)).meta.pop("val")
        return program


@dataclass(frozen=True)
class Silent:
    """Forgets to return the program."""

    name: ClassVar[str] = "silent"

    def apply(self, program: Program) -> Any:
        program.clone()


@dataclass
class Thawed:
    """Is not frozen."""

    name: ClassVar[str] = "thawed"

    def apply(self, program: Program) -> Program:
        return program


@dataclass(frozen=True)
class Idle:
    """Does nothing."""

    name: ClassVar[str] = "idle"


@dataclass(frozen=True)
class Nameless:
    """Has no name."""

    def apply(self, program: Program) -> Program:
        return program


@dataclass(frozen=True)
class Impostor:
    """Takes the name of a pass of the compiler."""

    name: ClassVar[str] = "normalize"

    def apply(self, program: Program) -> Program:
        return program


@dataclass(frozen=True)
class Mute:
    name: ClassVar[str] = "mute"

    def apply(self, program: Program) -> Program:
        return program


@dataclass(frozen=True)
class Unwritable:
    """Has an option that no text can give."""

    name: ClassVar[str] = "unwritable"
    table: dict[str, int]

    def apply(self, program: Program) -> Program:
        return program


@dataclass(frozen=True)
class Placed:
    """Has an option named as the key that says its place."""

    name: ClassVar[str] = "placed"
    after: int = 1

    def apply(self, program: Program) -> Program:
        return program
