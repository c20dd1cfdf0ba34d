"""The store in files: swaps are atomic, no swap needs the disk, and a killed writer leaves nothing to repair."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from elaswave_fx.control.protocol.register import Absent, Register, Swap
from elaswave_fx.control.protocol.types import SEED, Activation, BoxId, Certificate, Stamp, Term, Version, Vote
from elaswave_fx.control.store import file_store
from elaswave_fx.control.store.exact_total import ExactTotal
from elaswave_fx.control.store.file_store import FileStore, refuse_foreign, settle_dead_jobs
from elaswave_fx.control.store.ledger import Payload, covers_once, first_break, standing
from elaswave_fx.errors import ConfigError
from elaswave_fx.files import json_lines
from elaswave_fx.observe.run_directory import RunDirectory
from elaswave_fx.plan.work.spans import Span, WorkSpan
from elaswave_fx.plan.work.topology import Epoch, Rank
from tests.control.toy_planner import first_assignment
from tests.waiting import await_true

FIRST = Activation(Epoch(0), first_assignment(2, 1), SEED, SEED, None, rollback=True)
START = Register(Term(0), FIRST, SEED, SEED, None, SEED)


def commit(version: int, epoch: int = 0) -> Certificate:
    stamp = Stamp(Version(version), Epoch(epoch))
    halves = [WorkSpan(Span(0, 1), Span(6 * r, 6 * r + 6)) for r in (0, 1)]
    votes = tuple(
        Vote(stamp, Rank(r), (half,), Payload(count=ExactTotal.of(6.0)).pack()) for r, half in enumerate(halves)
    )
    return Certificate(stamp, votes)


def with_line(register: Register, line: Certificate) -> Swap:
    new = replace(register, committed=line.stamp, previous=register.committed, last=line)
    return Swap(register.key, new, (line,))


def with_epoch(register: Register, rollback: Stamp | None = None) -> Swap:
    resume = rollback or register.committed
    activation = replace(
        FIRST, epoch=Epoch(register.epoch + 1), resume=resume, previous=register.previous, rollback=rollback is not None
    )
    absent = (Absent(Rank(1), frozenset({BoxId(0)}), resume.version),)
    return Swap(register.key, replace(register, activation=activation, committed=resume, absent=absent))


def create(folder: Path, first: Register = START) -> FileStore:
    store = FileStore.create(folder, first, "{}")
    _folders.append(store.folder)
    return store


_folders: list[Path] = []


@pytest.fixture(autouse=True)
def _nothing_stays_in_memory() -> Iterator[None]:
    yield
    while _folders:
        shutil.rmtree(_folders.pop(), ignore_errors=True)


def steps(folder: Path) -> list[int]:
    FileStore(folder).flush()
    return [line["step"] for line in json_lines(folder / "ledger.jsonl")]


def test_what_was_swapped_is_read_by_others(tmp_path: Path) -> None:
    store = create(tmp_path)
    assert store.read() == START
    for wanted in (lambda r: with_line(r, commit(1)), lambda r: with_line(r, commit(2)), with_epoch):
        register = store.swap(wanted(store.read()))
        assert FileStore(tmp_path).read() == register
    assert register.epoch == 1 and register.last == commit(2) and steps(tmp_path) == [0, 1]
    register = store.swap(with_line(register, commit(3, epoch=1)))
    assert FileStore(tmp_path).read() == register and steps(tmp_path) == [0, 1, 2]


def test_a_swap_with_another_key_changes_nothing(tmp_path: Path) -> None:
    store = create(tmp_path)
    late = with_line(START, commit(1))
    newer = store.swap(Swap(START.key, replace(START, term=Term(1))))
    assert store.swap(late) == newer == store.read()
    assert steps(tmp_path) == []


@pytest.mark.parametrize("written", [0, 7, 10_000], ids=["nothing", "a part", "all"])
def test_a_writer_that_was_killed_leaves_nothing_to_repair(written: int, tmp_path: Path) -> None:
    store = create(tmp_path)
    register = store.swap(with_line(START, commit(1)))
    store.flush()
    first = (tmp_path / "ledger.jsonl").read_bytes()
    register = store.swap(with_line(register, commit(2)))
    other = FileStore(tmp_path)  # of a coordinator that is killed while it writes, before it can say so
    lines = other._read().lines
    other._write_lines(lines)
    whole = (tmp_path / "ledger.jsonl").read_bytes()
    (tmp_path / "ledger.jsonl").write_bytes(whole[: len(first) + written])
    store._write_since(register, lines)
    assert lines.waiting == (whole[len(first) :].decode(),)
    register = FileStore(tmp_path).swap(with_line(register, commit(3)))
    assert register.committed.version == 3 and steps(tmp_path) == [0, 1, 2]
    assert covers_once(json_lines(tmp_path / "ledger.jsonl"), 1, 12, 0, 3) is None


def test_two_that_flush_at_once_write_the_same(tmp_path: Path) -> None:
    store = create(tmp_path)
    register = store.swap(with_line(START, commit(1)))
    late = store._read().lines
    assert steps(tmp_path) == [0]
    store.swap(with_line(register, commit(2)))
    assert steps(tmp_path) == [0, 1]
    FileStore(tmp_path)._write_lines(late)
    assert steps(tmp_path) == [0, 1] and store.read().committed.version == 2


@pytest.mark.parametrize("name", ["committed.json", "register.json"])
def test_a_half_written_file_beside_is_not_looked_at(name: str, tmp_path: Path) -> None:
    store = create(tmp_path)
    register = store.swap(with_line(START, commit(1)))
    (store.folder / f".{name}.{os.getpid()}.new").write_bytes(b'{"regi')
    assert FileStore(tmp_path).read() == register
    store.swap(with_line(register, commit(2)))


def test_what_cannot_be_read_or_locked_is_an_os_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_store, "LOCK_S", 0.02)
    store = create(tmp_path)
    with (tmp_path / "control" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert store.read() == START
        with pytest.raises(OSError):
            store.swap(with_line(START, commit(1)))
    (store.folder / "register.json").write_text("{")
    with pytest.raises(OSError, match="cannot be read"):
        store.read()
    with pytest.raises(OSError):
        FileStore(tmp_path / "elsewhere").read()


def test_a_ledger_that_became_shorter_is_not_written_to(tmp_path: Path) -> None:
    store = create(tmp_path)
    register = store.swap(with_line(START, commit(1)))
    store.flush()
    (tmp_path / "ledger.jsonl").write_text("")
    store.swap(with_line(register, commit(2)))
    with pytest.raises(OSError, match="it was changed"):
        store.flush()


def test_without_its_run_directory_a_store_is_still_there(tmp_path: Path) -> None:
    store = create(tmp_path / "run")
    register = store.swap(with_line(START, commit(1)))
    shutil.rmtree(tmp_path / "run")
    register = store.swap(with_line(register, commit(2)))
    assert store.read() == register and register.committed.version == 2
    with pytest.raises(OSError, match="ledger"):
        store.flush()


def test_a_disk_that_takes_nothing_for_long_is_a_store_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_store, "MOST_WAITING", 2)
    store, register = create(tmp_path), START
    for version in (1, 2):
        register = store.swap(with_line(register, commit(version)))
    with pytest.raises(OSError, match="3 lines wait"):
        store.swap(with_line(register, commit(3)))
    assert store.read() == register
    assert steps(tmp_path) == [0, 1]
    assert store.swap(with_line(register, commit(3))).committed.version == 3


def test_after_the_end_everything_is_in_the_run_directory(tmp_path: Path) -> None:
    store = create(tmp_path)
    register = store.swap(with_epoch(store.swap(with_line(START, commit(1)))))
    store.write_plan(1, "the plan")
    folder = store.folder
    assert folder.stat().st_mode & 0o777 == 0o700
    initial = RunDirectory.initial(tmp_path)
    initial.mkdir()
    (initial / "state.safetensors").touch()
    store.settle()
    assert not initial.exists(), "only ranks of the job need it"
    store.settle()
    assert not folder.exists() and not (tmp_path / "control").is_symlink()
    assert sorted(path.name for path in (tmp_path / "control").iterdir()) == ["register.json"]
    assert FileStore(tmp_path).read() == register and (tmp_path / "plan-1.json").read_text() == "the plan"
    assert [line["step"] for line in json_lines(tmp_path / "ledger.jsonl")] == [0]


def test_a_job_whose_processes_were_all_killed_is_settled_by_another(tmp_path: Path) -> None:
    ready, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = FileStore.create(tmp_path / "killed", START, "{}")
        store.swap(with_line(START, commit(1)))
        if os.fork() == 0:
            os.write(say, b"!")
        signal.pause()
    living = create(tmp_path / "living")
    folder = FileStore(tmp_path / "killed").folder if os.read(ready, 1) else Path()
    (child,) = psutil.Process(pid).children()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    settle_dead_jobs()
    assert folder.exists(), "one that it has forked lives"
    assert FileStore(tmp_path / "killed").processes() == [child.pid]
    child.kill()
    await_true(lambda: FileStore(tmp_path / "killed").processes() == [], "the other one ends")

    def is_settled() -> bool:
        settle_dead_jobs()  # A launcher that starts meanwhile may be at it, too.
        return not folder.exists()

    await_true(is_settled, "what it had in memory is gone")
    assert not (tmp_path / "killed" / "control").is_symlink()
    assert [line["step"] for line in json_lines(tmp_path / "killed" / "ledger.jsonl")] == [0]
    assert living.read() == START


def test_a_link_that_somebody_else_has_made_leads_nobody_astray(tmp_path: Path) -> None:
    living = create(tmp_path / "living")
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / "control").symlink_to(living.folder)
    assert create(trap).folder != living.folder
    assert living.read() == START, "the folder of another job of ours is not removed"


def test_a_folder_of_the_user_with_that_name_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "mine.py").write_text("")
    with pytest.raises(ConfigError, match="has a control of yours"):
        create(tmp_path)
    assert (tmp_path / "control" / "mine.py").exists()
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "control").write_text("")
    with pytest.raises(ConfigError, match="has a control of yours"):
        refuse_foreign(tmp_path / "file")


def test_a_late_end_leaves_a_newer_job_alone(tmp_path: Path) -> None:
    old = create(tmp_path)
    new = create(tmp_path)
    old.settle()
    assert new.read() == START and FileStore(tmp_path).folder == new.folder


def test_lines_that_nobody_could_write_are_taken_over_by_the_next_run(tmp_path: Path) -> None:
    store = create(tmp_path)
    register = store.swap(with_line(START, commit(1)))
    store.flush()
    store.swap(with_line(register, commit(2)))  # and all processes are killed
    stamp = Stamp(Version(2), Epoch(0))
    create(tmp_path, Register(Term(0), replace(FIRST, resume=stamp, previous=stamp), stamp, stamp, None, stamp))
    assert steps(tmp_path) == [0, 1] and not store.folder.exists()


def test_the_ledger_is_on_disk_when_the_register_names_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = create(tmp_path)
    synced: list[Path] = []
    monkeypatch.setattr(file_store, "sync", synced.append)
    store.flush()
    synced.clear()
    register = store.swap(with_line(START, commit(1)))
    store.flush()
    assert synced == []
    store.swap(Swap(register.key, replace(register, checkpoint=register.committed)))
    store.flush()
    assert synced == [tmp_path / "ledger.jsonl"]


def test_a_line_for_which_there_is_no_room_is_not_half_there(tmp_path: Path) -> None:
    store = create(tmp_path)
    register = store.swap(with_line(START, commit(1)))
    store.flush()
    register = store.swap(with_line(register, commit(2)))
    room = (tmp_path / "ledger.jsonl").stat().st_size + 10
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(OSError):
            store.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [line["step"] for line in json_lines(tmp_path / "ledger.jsonl")] == [0]
    assert store.read() == register and steps(tmp_path) == [0, 1]


def test_a_rollback_makes_later_lines_void(tmp_path: Path) -> None:
    store = create(tmp_path)
    register = START
    for version in (1, 2, 3):
        register = store.swap(with_line(register, commit(version)))
    register = store.swap(with_epoch(register, rollback=Stamp(Version(1), Epoch(0))))
    for version in (2, 3):
        register = store.swap(with_line(register, commit(version, epoch=1)))
    store.flush()
    lines = json_lines(tmp_path / "ledger.jsonl")
    assert [line["rolled_back_to"] for line in lines if "rolled_back_to" in line] == [1]
    assert first_break((tmp_path / "ledger.jsonl").read_text().splitlines()) is None
    assert covers_once(lines, 1, 12, 0, 3) is None


def test_a_run_that_goes_on_keeps_the_lines_before_it(tmp_path: Path) -> None:
    register = START
    store = create(tmp_path)
    for version in (1, 2, 3):
        register = store.swap(with_line(register, commit(version)))
    stamp = Stamp(Version(2), Epoch(0))
    again = Register(Term(0), replace(FIRST, resume=stamp, previous=stamp), stamp, stamp, None, stamp)
    store = create(tmp_path, again)
    assert store.read() == again
    store.swap(with_line(again, commit(3)))
    store.flush()
    lines = json_lines(tmp_path / "ledger.jsonl")
    assert [line.get("step") for line in lines] == [0, 1, 2, None, 2] and lines[3]["rolled_back_to"] == 2
    assert [line["step"] for line in standing(lines)] == [0, 1, 2]
    assert first_break((tmp_path / "ledger.jsonl").read_text().splitlines()) is None


def test_lines_say_by_what_they_were_computed(tmp_path: Path) -> None:
    store = FileStore.create(tmp_path, START, "{}", fingerprint="f")
    _folders.append(store.folder)
    register = store.swap(with_line(START, commit(1)))
    store.swap(with_line(register, commit(2)))
    store.flush()
    assert [line["fingerprint"] for line in json_lines(tmp_path / "ledger.jsonl")] == ["f", "f"]


def _race(folder: Path, wins: object) -> None:
    store = FileStore(folder)
    for _ in range(20):
        register = store.read()
        mine = replace(register, term=Term(register.term + 1), checkpoint=Stamp(Version(0), Epoch(os.getpid())))
        if store.swap(Swap(register.key, mine)) == mine:
            wins.put(mine.term)  # type: ignore[attr-defined]


def test_of_two_that_swap_at_once_one_wins(tmp_path: Path) -> None:
    create(tmp_path)
    fork = multiprocessing.get_context("fork")
    wins = fork.SimpleQueue()
    racers = [fork.Process(target=_race, args=(tmp_path, wins)) for _ in range(3)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    terms = []
    while not wins.empty():
        terms.append(wins.get())
    assert sorted(terms) == list(range(1, len(terms) + 1)), "a term that two had, or nobody"
    assert FileStore(tmp_path).read().term == len(terms)


def test_covering_names_what_is_wrong() -> None:
    line = {"step": 0, "tiles": {"0": [[0, 1, 0, 6]], "1": [[0, 1, 6, 12]]}}
    assert covers_once([line], 1, 12, 0, 1) is None
    assert "step 1 has 0 lines" in str(covers_once([line], 1, 12, 0, 2))
    assert "step 0 has 2 lines" in str(covers_once([line, line], 1, 12, 0, 1))
    assert "skipped 6 and repeated 0" in str(covers_once([{**line, "tiles": {"0": [[0, 1, 0, 6]]}}], 1, 12, 0, 1))
    twice = {**line, "tiles": {"0": [[0, 1, 0, 12]], "1": [[0, 1, 0, 12]]}}
    assert "repeated 12" in str(covers_once([twice], 1, 12, 0, 1))
    assert "has step 0 of a run of 0 steps" in str(covers_once([line], 1, 12, 0, 0))


def test_a_step_covers_the_samples_that_its_plan_does_not_skip() -> None:
    whole = {"step": 0, "tiles": {"0": [[0, 1, 0, 6]], "1": [[0, 1, 6, 12]]}, "plan": "a"}
    hurt = {"step": 1, "tiles": {"0": [[0, 1, 0, 6]], "1": []}, "plan": "b"}
    assert covers_once([whole, hurt], 1, 12, 0, 2, {"a": 0, "b": 6}) is None
    assert "step 1 skipped 6 and repeated 0 of 12 samples" in str(covers_once([whole, hurt], 1, 12, 0, 2))
    assert "step 1 skipped 2 and repeated 0 of 8" in str(covers_once([whole, hurt], 1, 12, 0, 2, {"b": 4}))
    beyond = "step 0 consumed samples up to 11; its plan has 0 to 5"
    assert beyond in str(covers_once([whole, hurt], 1, 12, 0, 2, {"a": 6, "b": 6}))
