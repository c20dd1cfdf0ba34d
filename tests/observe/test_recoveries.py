"""Events become recoveries: one per loss until a step is committed again."""

from __future__ import annotations

from typing import Any

from elaswave_fx.observe.narrative import describe
from elaswave_fx.observe.recoveries import Recoveries
from tests.observe.events import event as made

AGREED = {
    "members": [0, 1, 3],
    "lost": [2],
    "step": 12,
    "steps_redone": 1,
    "how": "done again",
    "why": "step 12 is done again",
}
PLANNED = {"reason": "rows of two", "plan_ms": 4.5, "lines": ["rank 1 gains units"]}


def tell(book: Recoveries, *events: tuple[str, float, dict[str, Any]], epoch: int = 1) -> None:
    """`epoch`: the one that begins. Who was lost was lost in the one before."""
    for kind, at_s, fields in events:
        book.event(made(kind, **fields), epoch - 1 if kind in ("fault", "detected") else epoch, at_s)


def after_steps(*ms: float) -> Recoveries:
    book = Recoveries()
    for each in ms:
        book.step(each, 9.0)
    return book


def test_a_fault_from_its_signal_to_the_next_commit() -> None:
    book = after_steps(500.0, 20.0, 20.0, 20.0)
    # The coordinator's word came before the victim's, which tells of an earlier time, exactly.
    tell(
        book,
        ("detected", 10.004, {"rank": 2, "ranks": [2], "cause": "rank 0 left the step, accusing 2", "silent_ms": 91}),
        ("fault", 10.0, {"rank": 2, "step": 12, "fault": "kill", "phase": "backward"}),
        ("left", 10.01, {"rank": 2, "cause": "rank 2: killed by SIGKILL"}),
        ("stopped", 10.006, {"members": [0, 1, 3]}),
        ("agreed", 10.02, AGREED),
        ("planned", 10.02, PLANNED),
        ("edited", 10.03, {"ms": 3.0}),
        ("transferred", 10.03, {"ms": 6.0, "bytes": 4096, "bytes_behind": 0}),
    )
    book.step(300.0)
    tell(book, ("resumed", 10.1, {"step": 12}))
    (entry,) = book.entries()
    assert entry == {
        "cause": "kill in step 12, phase backward", "rank": 2, "ranks": [2], "step": 12, "epoch": 1,
        "detect_ms": 4.0, "abort_ms": 2.0, "agree_ms": 9.5, "plan_ms": 4.5, "edit_ms": 3.0, "transfer_ms": 6.0,
        "mttr_ms": 80.0, "steps_redone": 1,
        "bytes_moved": 4096, "members": 3,
    }  # fmt: skip


def test_a_cut_that_ends_is_a_loss_only_if_the_others_take_it_for_one() -> None:
    cut = {"rank": 2, "step": 12, "fault": "cut", "phase": "any"}
    for_a_while = {**cut, "seconds": 0.5}
    book = after_steps(20.0)
    tell(book, ("fault", 10.0, for_a_while))
    book.step(300.0)
    assert not book.entries()
    assert describe(made("fault", **for_a_while), 0) == "injected fault: cut of rank 2 in step 12, phase any, for 0.5 s"
    tell(book, ("fault", 11.0, cut))
    assert [entry["ranks"] for entry in book.entries()] == [[2]]


def test_a_stop_from_outside_counts_from_the_last_sign_of_life() -> None:
    """Nobody tells when it was struck; its heartbeats ended 21.5 s before it was given up, the commits 22 s before."""
    book = Recoveries()
    book.step(1000.0, 78.0)
    told = {"rank": 2, "ranks": [2], "cause": "ranks [2] are silent", "silent_ms": 21_500.0}
    tell(book, ("detected", 100.0, told), ("stopped", 100.2, {"members": [0, 1, 3]}), ("agreed", 100.2, AGREED))
    tell(book, ("resumed", 102.0, {"step": 12}))
    (entry,) = book.entries()
    assert entry["detect_ms"] == 21_500.0 and entry["mttr_ms"] == 22_500.0
    assert entry["plan_ms"] is None and entry["bytes_moved"] is None, "nobody told of them"


def test_a_commit_that_needed_the_rank_is_a_sign_of_life_too() -> None:
    book = Recoveries()
    book.step(20.0, 9.99)
    tell(book, ("detected", 10.0, {"rank": 2, "ranks": [2], "cause": "rank 2 exited", "silent_ms": 180.0}))
    tell(book, ("agreed", 10.01, AGREED), ("resumed", 10.05, {"step": 12}))
    (entry,) = book.entries()
    assert entry["detect_ms"] == 10.0 and entry["mttr_ms"] == 40.0


def test_a_fault_that_was_read_of_too_late_is_not_taken_for_the_last_sign_of_life() -> None:
    book = after_steps(10.0)
    tell(book, ("fault", 10.02, {"rank": 2, "step": 12, "fault": "kill", "phase": "any"}))
    tell(book, ("detected", 10.0, {"rank": 2, "ranks": [2], "cause": "rank 2 exited", "silent_ms": 120.0}))
    assert book.entries()[0]["detect_ms"] == 120.0


def test_a_loss_after_a_step_that_had_failed_anyway_counts_from_that_failure() -> None:
    book = after_steps(10.0)
    tell(book, ("detected", 10.0, {"rank": None, "ranks": [], "cause": "a replica differs", "silent_ms": None}))
    tell(book, ("fault", 10.5, {"rank": 2, "step": 12, "fault": "kill", "phase": "any"}), ("agreed", 10.6, AGREED))
    assert book.entries()[0]["detect_ms"] == 1000.0, "all were last known to be alive a second before"


def test_what_nobody_saw_is_none() -> None:
    book = Recoveries()
    tell(book, ("left", 1.0, {"rank": 2, "cause": "killed"}), ("agreed", 1.1, {**AGREED, "steps_redone": None}))
    tell(book, ("resumed", 1.5, {"step": 13}))
    (entry,) = book.entries()
    assert [entry[key] for key in ("detect_ms", "abort_ms", "agree_ms", "mttr_ms", "steps_redone")] == [None] * 5


def test_before_any_step_the_start_is_the_last_sign_of_life() -> None:
    book = Recoveries()
    tell(book, ("started", 9.0, {"pids": {"2": 4711}}), ("detected", 9.1, {"rank": 2, "ranks": [2], "cause": "exited"}))
    tell(book, ("resumed", 9.25, {"step": 0}))
    (entry,) = book.entries()
    assert (entry["detect_ms"], entry["mttr_ms"]) == (100.0, 250.0)


def test_the_fault_itself_is_the_best_cause() -> None:
    book = after_steps(20.0)
    tell(
        book,
        ("detected", 1.0, {"rank": 2, "ranks": [2], "cause": "ranks [2] are silent or gone"}),
        ("left", 1.1, {"rank": 2, "cause": "rank 2: killed by SIGKILL"}),
    )
    assert book.entries()[0]["cause"] == "rank 2: killed by SIGKILL"
    tell(book, ("fault", 0.9, {"rank": 2, "step": 12, "fault": "kill", "phase": "any"}))
    assert book.entries()[0]["cause"] == "kill in step 12, phase any"
    assert book.entries()[0]["mttr_ms"] is None, "it never came to a committed step"


def test_a_loss_during_a_recovery_belongs_to_it() -> None:
    book = Recoveries()
    book.step(10.0, 0.9)
    agreed = {**AGREED, "members": [0, 2, 3], "lost": [1]}
    tell(book, ("left", 1.0, {"rank": 1, "cause": "killed"}), ("agreed", 1.1, agreed), ("planned", 1.1, PLANNED))
    tell(book, ("left", 1.2, {"rank": 3, "cause": "killed too"}), epoch=2)
    again = {**AGREED, "members": [0, 2], "lost": [3], "steps_redone": 0}
    tell(book, ("agreed", 1.3, again), ("planned", 1.3, PLANNED), ("resumed", 1.5, {"step": 12}), epoch=2)
    tell(book, ("left", 2.0, {"rank": 0, "cause": "killed as well"}), epoch=3)
    first, second = book.entries()
    assert first["ranks"] == [1, 3] and first["cause"] == "killed; killed too" and first["epoch"] == 2
    assert first["plan_ms"] == 9.0 and first["mttr_ms"] == 590.0 and first["steps_redone"] == 1
    assert second["ranks"] == [0]


def test_who_was_accused_and_stayed_was_not_lost() -> None:
    book = after_steps(10.0)
    tell(
        book,
        ("detected", 1.0, {"rank": 0, "ranks": [0, 1], "cause": "rank 2 left the step, accusing 0"}),
        ("agreed", 1.1, AGREED),
    )
    assert book.entries()[0]["ranks"] == [2] and book.entries()[0]["cause"] == "the others went on without rank 2"


def test_a_planned_epoch_is_no_recovery() -> None:
    book = after_steps(10.0)
    tell(book, ("stopping", 1.0, {"cause": "owners move"}), ("agreed", 1.1, AGREED), ("planned", 1.1, PLANNED))
    tell(book, ("resumed", 1.2, {"step": 13}))
    assert book.entries() == ()


def test_events_in_words() -> None:
    assert describe(made("agreed", **AGREED), 5) == ("epoch 5: ranks 0, 1, 3 resume at step 12, 1 step replayed")
    assert "ROLLED BACK to step 3" in describe(made("agreed", **AGREED, rolled_back_to=3), 5)
    assert describe(made("agreed", **{**AGREED, "steps_redone": None}), 5) == "epoch 5: ranks 0, 1, 3 resume at step 12"
    assert describe(made("planned", **PLANNED), 5) == "epoch 5: planned in 4.5 ms: rows of two\n    rank 1 gains units"
    assert (
        describe(made("skipped_update", rank=0, step=3, grad_norm=0.5), 0)
        == "rank 0: skipped update: step 3, grad_norm 0.5"
    )
    assert (
        describe(made("detected", rank=None, ranks=[], cause="a replica differs"), 0)
        == "epoch 0: failure detected: a replica differs"
    )


def test_a_rank_that_ends_after_it_was_left_out_is_no_second_loss() -> None:
    book = after_steps(20.0)
    tell(
        book,
        ("detected", 5.0, {"rank": 1, "ranks": [1], "cause": "rank 1 is silent"}),
        ("agreed", 5.1, {**AGREED, "members": [0, 2, 3], "lost": [1]}),
        ("planned", 5.1, PLANNED),
        ("resumed", 5.2, {"step": 12}),
        ("left", 9.0, {"rank": 1, "cause": "rank 1: Excluded: the job went on without rank 1"}),
    )
    assert [entry["ranks"] for entry in book.entries()] == [[1]]


def test_how_a_process_ended_may_be_known_after_the_run_has_gone_on() -> None:
    book = after_steps(20.0)
    exited = {"rank": 2, "ranks": [2], "cause": "rank 2 exited", "silent_ms": 1.0, "exited": True}
    tell(book, ("detected", 10.0, exited), ("agreed", 10.01, AGREED))
    first = book.event(made("resumed", step=12), 1, 10.02)
    assert first is not None and first["cause"] == "rank 2 exited"
    again = book.event(made("left", rank=2, cause="rank 2: killed by SIGKILL"), 1, 10.03)
    assert again == {**first, "cause": "rank 2: killed by SIGKILL"}
    assert book.entries() == (again,) == Recoveries([first, again]).entries()
    assert book.event(made("left", rank=2, cause="again"), 1, 10.04) is None


def test_what_ranks_did_may_be_read_before_the_loss() -> None:
    """Whatever the order in which the launcher reads of it, the entry is the same."""
    signs = [
        ("detected", 10.004, {"rank": 2, "ranks": [2], "cause": "rank 2 exited", "silent_ms": 5.0, "exited": True}),
        ("stopped", 10.006, {"members": [0, 1, 3]}),
        ("agreed", 10.02, AGREED),
        ("planned", 10.02, PLANNED),
    ]
    of_a_rank = [
        ("edited", 10.03, {"ms": 3.0}),
        ("transferred", 10.03, {"ms": 6.0, "bytes": 4096, "bytes_behind": 0}),
        ("resumed", 10.1, {"step": 12}),
    ]
    entries = []
    for order in ([*signs, *of_a_rank], [*of_a_rank, *signs], [of_a_rank[0], *signs[:2], *of_a_rank[1:], *signs[2:]]):
        book = after_steps(20.0, 20.0)
        tell(book, *order)
        entries += book.entries()
        assert book.unfinished() is None
    assert entries[0]["edit_ms"] == 3.0 and entries == 3 * entries[:1]


def test_a_loss_may_be_read_after_the_steps_that_followed_it() -> None:
    """The launcher had no processor while the others went on: the recovery has ended, and is one."""
    detected = ("detected", 10.004, {"rank": 2, "ranks": [2], "cause": "rank 0 left the step, accusing 2"})
    left = ("left", 10.3, {"rank": 2, "cause": "rank 2: killed by SIGKILL"})
    agreed = ("agreed", 10.02, AGREED)
    for order in ((detected, agreed, left), (left, detected, agreed), (agreed, left, detected)):
        book = after_steps(20.0, 20.0)
        tell(book, ("edited", 10.03, {"ms": 3.0}), ("resumed", 10.1, {"step": 12}))
        for alive_s in (10.12, 10.14):
            book.step(20.0, alive_s)
        tell(book, *order)
        (entry,) = book.entries()
        assert book.unfinished() is None
        assert (entry["detect_ms"], entry["mttr_ms"], entry["edit_ms"]) == (1004.0, 1080.0, 3.0)


def test_a_fault_that_is_read_after_the_others_have_gone_on_is_the_cause_of_that_recovery() -> None:
    book = after_steps(20.0)
    tell(book, ("detected", 10.0, {"rank": 2, "ranks": [2], "cause": "rank 2 is silent"}), ("agreed", 10.01, AGREED))
    first = book.event(made("resumed", step=12), 1, 10.02)
    fault = {"rank": 2, "step": 12, "fault": "stop", "phase": "reduce"}
    again = book.event(made("fault", **fault), 0, 10.03)
    assert first is not None and again == {**first, "cause": "stop in step 12, phase reduce"}
    assert book.entries() == (again,) == Recoveries([first, again]).entries()


def test_parts_of_a_planned_epoch_are_not_those_of_a_later_loss() -> None:
    book = after_steps(20.0)
    tell(book, ("agreed", 8.0, {**AGREED, "lost": []}), ("edited", 8.1, {"ms": 9.0}), ("resumed", 8.2, {"step": 9}))
    tell(
        book, ("detected", 10.0, {"rank": 2, "ranks": [2], "cause": "rank 2 exited"}), ("agreed", 10.1, AGREED), epoch=2
    )
    tell(book, ("edited", 10.2, {"ms": 1.0}), ("resumed", 10.3, {"step": 12}), epoch=2)
    (entry,) = book.entries()
    assert (entry["edit_ms"], entry["epoch"]) == (1.0, 2)


def test_the_start_of_the_epoch_in_which_a_rank_is_lost_does_not_end_the_recovery() -> None:
    """A planned epoch has begun, and a rank dies in its second step, before the launcher reads of the first."""
    fault = ("fault", 10.0, {"rank": 1, "step": 15, "fault": "kill", "phase": "backward"})
    planned = [("edited", 9.97, {"ms": 9.0}), ("resumed", 9.99, {"step": 14})]
    recovery = [
        ("detected", 10.001, {"rank": 1, "ranks": [1], "cause": "rank 1 exited"}),
        ("agreed", 10.01, {**AGREED, "members": [0, 2, 3], "lost": [1]}),
        ("planned", 10.01, PLANNED),
        ("edited", 10.02, {"ms": 1.0}),
        ("resumed", 10.05, {"step": 15}),
    ]
    for before in ([*planned, fault], [planned[0], fault, planned[1]], [fault, *planned]):
        book = after_steps(20.0)
        for event in before:
            tell(book, event, epoch=3 if event is fault else 2)
        assert book.unfinished() is not None
        tell(book, *recovery, epoch=3)
        (entry,) = book.entries()
        assert (entry["detect_ms"], entry["edit_ms"], entry["epoch"]) == (1.0, 1.0, 3)
