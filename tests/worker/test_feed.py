"""The content of a step: the sum of hashes of its samples, whoever fed them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_fx.data.dataset import Batch
from elaswave_fx.worker.feed import Content, content_of


def batch() -> Batch:
    generator = torch.Generator().manual_seed(3)
    return {
        "input_ids": torch.randint(0, 99, (6, 5), generator=generator),
        "image": torch.randn(6, 2, 3, generator=generator),
    }


def part(lo: int, hi: int, *names: str) -> Content:
    own = {name: tensor[lo:hi] for name, tensor in batch().items() if name in names}
    return content_of(own, [range(100 + lo, 100 + hi)])


def added(*contents: Content) -> Content:
    low, total = (1 << 64) - 1, sum(each.low | each.high << 64 for each in contents)
    return Content(total & low, total >> 64 & low, sum(each.places for each in contents) & low)


@settings(deadline=None)
@given(cut=st.integers(0, 6))
def test_ranks_add_up_to_the_step_however_it_is_cut(cut: int) -> None:
    both = ("input_ids", "image")
    whole = part(0, 6, *both)
    assert added(part(0, cut, *both), part(cut, 6, *both)) == whole
    assert added(part(0, 6, "image"), part(0, cut, "input_ids"), part(cut, 6, "input_ids")) == whole


def test_spans_that_do_not_adjoin_count_where_they_are() -> None:
    apart = {name: tensor[[0, 1, 4, 5]] for name, tensor in batch().items()}
    assert added(content_of(apart, [range(100, 102), range(104, 106)]), part(2, 4, *batch())) == part(0, 6, *batch())


def test_every_bit_and_every_place_counts() -> None:
    whole = content_of(batch(), [range(100, 106)])
    changed = batch()
    changed["image"][4, 1, 2] += 1e-6
    swapped = {name: tensor[[1, 0, 2, 3, 4, 5]] for name, tensor in batch().items()}
    renamed = {"labels": batch()["input_ids"], "image": batch()["image"]}
    others = [content_of(each, [range(100, 106)]) for each in (changed, swapped, renamed)]
    others.append(content_of(batch(), [range(101, 107)]))
    assert len({whole, *others}) == 5
