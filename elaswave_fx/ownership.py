"""Checks of who owns a folder whose code is run, or whose files are written or removed.

    refuse_others(run_dir, "hydra.run.dir=runs/x")       ConfigError: it is user bob's, who may change what it holds
    refuse_links(run_dir, "hydra.run.dir=runs/x", ("logs", "clocks"))     ConfigError: its logs is a link to …

Root is trusted, and so is a user's own group, so that a project may share its folders; see `files.place_of_others`. A
checkpoint is read for numbers alone; any user may own it.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable
from pathlib import Path

from elaswave_fx.errors import ConfigError
from elaswave_fx.files import place_of_others


def refuse_others(folder: Path, what: str) -> None:
    """Raise `ConfigError` if another user may change what `folder` holds. `what` names it to the user."""
    place = place_of_others(folder)
    if place is None:
        return
    owner = place.stat().st_uid
    if owner in (0, os.geteuid()):
        raise ConfigError(
            f"{what}: everybody may write to {place}, and so change what is run as you; nearest valid: chmod o-w "
            f"{place}, or a folder of your own"
        )
    raise ConfigError(
        f"{what}: {place} is {user_name(owner)}'s, who may change what would be run as {user_name(os.geteuid())}; "
        f"nearest valid: the command as {user_name(owner)}, or a copy of your own (cp -r)"
    )


def refuse_links(folder: Path, what: str, names: Iterable[str]) -> None:
    """Raise `ConfigError` if one of `names`, or an entry in it, is a link: its target would be changed."""
    for name in names:
        entry = folder / name
        inside = sorted(entry.iterdir()) if entry.is_dir() and not entry.is_symlink() else []
        for path in (entry, *inside):
            if path.is_symlink():
                there = path.readlink()
                raise ConfigError(
                    f"{what}: its {path.relative_to(folder)} is a link to {there}, which would be written to; nearest "
                    f"valid: rm {path}, or another folder"
                )


def user_name(number: int) -> str:
    """The name of a user, or the number if the system does not know it."""
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"
