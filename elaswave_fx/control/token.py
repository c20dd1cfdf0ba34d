"""The token of a job: the secret that each of its processes proves to know.

ELASWAVE_TOKEN=8f3e…                   from the environment, the same on every machine
ELASWAVE_TOKEN_FILE=~/elaswave-token   from a file that only its owner may read
neither: a new one for each job, which stands in RUN/control/job.json
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from elaswave_fx.errors import ConfigError
from elaswave_fx.files import read_plain

TOKEN, TOKEN_FILE = "ELASWAVE_TOKEN", "ELASWAVE_TOKEN_FILE"
LEAST = 32
"""Characters of a token: 128 random bits, if they are hexadecimal digits."""

_CURE = "nearest valid: that of openssl rand -hex 32"


def job_token() -> str:
    """The token for a new job: the given one, or one made here."""
    return given_token() or secrets.token_hex(32)


def given_token() -> str | None:
    """The token of the environment; None if it has none. Raises `ConfigError` for one that others know or may guess."""
    token, path = os.environ.get(TOKEN, ""), os.environ.get(TOKEN_FILE, "")
    if token and path:
        raise ConfigError(f"{TOKEN_FILE}={path}: {TOKEN} is set, too; nearest valid: one of them")
    where = TOKEN
    if path:
        where, token = f"{TOKEN_FILE}={path}", _read(Path(path).expanduser())
    elif not token:
        return None
    if len(token) < LEAST:
        raise ConfigError(f"{where}: a token of {len(token)} characters may be guessed; {_CURE}")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{where}: the token has characters that are no letters, digits or signs; {_CURE}")
    return token


def _read(path: Path) -> str:
    try:
        others = stat.S_IMODE(path.lstat().st_mode) & (stat.S_IRWXG | stat.S_IRWXO)
        text = read_plain(path).decode(errors="replace").strip()
    except OSError as error:
        raise ConfigError(f"{TOKEN_FILE}={path}: cannot be read ({error.strerror})") from error
    if others:
        raise ConfigError(f"{TOKEN_FILE}={path}: other users may read it; nearest valid: chmod 600 {path}")
    return text
