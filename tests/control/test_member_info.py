"""Who is taken into a job, and who is refused, with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaswave_fx.control.protocol.member_info import OWN_CODE, Conditions, MemberInfo, refusal
from elaswave_fx.plan.work.topology import Rank
from tests.control.member_infos import info_of

CODE = {"mine.py": "aa", "numpy": "2.4.6"}
JOB = Conditions({OWN_CODE: "c" * 16, "elaswave_fx": "0.1.0", "torch": "2.13.0"}, "a" * 64, CODE)
CARD = replace(info_of(2), versions=dict(JOB.versions), data_digest=JOB.data_digest, code=CODE)
NUMBERS = 4


def test_a_rank_of_the_job_is_taken_and_taken_again() -> None:
    assert refusal(CARD, JOB, NUMBERS, None) is None
    assert refusal(CARD, JOB, NUMBERS, CARD) is None


@pytest.mark.parametrize(
    ("info", "why"),
    [
        (replace(CARD, number=Rank(4)), "no rank of the job has the number 4, they go from 0 to 3"),
        (replace(CARD, number=Rank(-1)), "no rank of the job has the number -1, they go from 0 to 3"),
        (replace(CARD, versions={**JOB.versions, "torch": "2.12.0"}), "it has torch 2.12.0, the job torch 2.13.0"),
        (
            replace(CARD, versions={**JOB.versions, OWN_CODE: "d" * 16}),
            f"it has other code of elaswave_fx: {'d' * 16}, the job {'c' * 16}",
        ),
        (replace(CARD, code={**CODE, "mine.py": "bb"}), "its mine.py differs: it is bb, the job's aa"),
        (replace(CARD, code={**CODE, "numpy": "2.4.5"}), "its numpy differs: it is 2.4.5, the job's 2.4.6"),
        (replace(CARD, code={"numpy": "2.4.6"}), "it has no mine.py, which the job has"),
        (replace(CARD, code={**CODE, "more.py": "cc"}), "it has more.py, which the job has not"),
        (
            replace(CARD, versions={OWN_CODE: "c" * 16, "torch": "2.13.0"}),
            "it has elaswave_fx of no version, the job elaswave_fx 0.1.0",
        ),
        (
            replace(CARD, versions={**JOB.versions, "mine": "1"}),
            "it has mine 1, the job mine of no version",
        ),
        (
            replace(CARD, data_digest="b" * 64),
            f"it reads other data: the digest of its samples is {'b' * 16}, the job's {'a' * 16}",
        ),
        (
            replace(CARD, data_digest=""),
            f"it reads other data: the digest of its samples is not known, the job's {'a' * 16}",
        ),
    ],
)  # fmt: skip
def test_who_is_none_of_the_jobs_is_refused(info: MemberInfo, why: str) -> None:
    assert refusal(info, JOB, NUMBERS, None) == why


def test_a_number_that_another_process_has_is_refused() -> None:
    """Also when that process is gone: its number is in votes, ledger lines and boxes."""
    twin = replace(CARD, port=9999)
    assert refusal(twin, JOB, NUMBERS, CARD) == "rank 2 is another process already, that of 127.0.0.1 port 9002"
