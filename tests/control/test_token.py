"""The token of a job: given by the environment or a file of one's own, or made; and the job and its joiners use it."""

from __future__ import annotations

from pathlib import Path

import pytest

from elaswave_fx.control.coordinator.job_file import address_of
from elaswave_fx.control.token import TOKEN, TOKEN_FILE, given_token, job_token
from elaswave_fx.errors import ConfigError
from elaswave_fx.launch.job import JobSpec

GIVEN = "0123456789abcdef" * 4


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (TOKEN, TOKEN_FILE):
        monkeypatch.delenv(name, raising=False)


def test_every_job_has_a_token_of_its_own_unless_one_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert given_token() is None and job_token() != job_token()
    monkeypatch.setenv(TOKEN, GIVEN)
    spec = JobSpec(hosts=("here",), run_dir=tmp_path, steps=1, builder=lambda: None, worker=lambda _: None)  # type: ignore[arg-type,return-value]
    assert job_token() == spec.token == address_of("tcp://127.0.0.1:4711").token == GIVEN


def test_a_file_of_ones_own_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{GIVEN}\n")
    file.chmod(0o600)
    monkeypatch.setenv(TOKEN_FILE, str(file))
    assert job_token() == address_of("tcp://[::1]:4711").token == GIVEN
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(TOKEN_FILE, "~/token")
    assert job_token() == GIVEN


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_may_read_is_refused(mode: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(GIVEN)
    file.chmod(mode)
    monkeypatch.setenv(TOKEN_FILE, str(file))
    with pytest.raises(ConfigError, match=f"{TOKEN_FILE}={file}: other users may read it; nearest valid: chmod 600"):
        job_token()


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("secret", f"{TOKEN}: a token of 6 characters may be guessed; nearest valid: that of openssl rand -hex 32"),
        ("ü" * 40, "characters that are no letters, digits or signs"),
        (f"{GIVEN} {GIVEN}", "characters that are no letters, digits or signs"),
    ],
)
def test_a_token_that_is_none_is_refused(token: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, token)
    for use in (job_token, lambda: address_of("tcp://127.0.0.1:4711")):
        with pytest.raises(ConfigError, match=words):
            use()


def test_what_is_no_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none", "No such file"), (tmp_path, "is no plain file|Is a directory")):
        monkeypatch.setenv(TOKEN_FILE, str(path))
        with pytest.raises(ConfigError, match=f"cannot be read \\(.*({words})"):
            job_token()
    monkeypatch.setenv(TOKEN, GIVEN)
    with pytest.raises(ConfigError, match=f"{TOKEN} is set, too"):
        job_token()
