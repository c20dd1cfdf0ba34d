"""Datasets of the user that draw, count or keep: what is taken, and what is refused since it may differ later."""

import functools
import random
import re
import sqlite3
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from elaswave_fx.config.compose import load_config
from elaswave_fx.data import load_batch, open_source
from elaswave_fx.data.dataset import as_tensor
from elaswave_fx.data.source import Source
from elaswave_fx.errors import DataError


class Drawn:
    """Items with noise: of the key, of the index, or of nothing."""

    def __init__(self, by: str) -> None:
        self.by = by

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        seed = index if self.by == "index" else None
        return {"x": np.array([index], np.float32), "noise": np.random.default_rng(seed).random(3, np.float32)}


class Keyed(Drawn):
    def __getitem__(self, index: int, key: int) -> dict[str, np.ndarray]:  # type: ignore[override]
        return {"x": np.array([index], np.float32), "noise": np.random.default_rng(key).random(3, np.float32)}


def drawn(kind: str, *overrides: str, by: str = "index") -> Source:
    words = [f"data._target_={__name__}.{kind}", f"data.by={by}", "model._target_=torch.nn.Identity"]
    return open_source(load_config([*words, *overrides, "global_batch=4"]))


class IndexCalledKey(Drawn):
    def __getitem__(self, key: int) -> dict[str, np.ndarray]:  # type: ignore[override]
        return super().__getitem__(key)


class OtherKey(Drawn):
    def __getitem__(self, index: int, key: str = "x") -> dict[str, np.ndarray]:  # type: ignore[override]
        return {key: super().__getitem__(index)["x"]}


class Computed(Drawn):
    """Tensors that a model has made, gradients and all."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"x": torch.ones(2, requires_grad=True) * index}


class LargeItems(Drawn):
    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        return {"x": [1, 2**63]}


class SparseItems(Drawn):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"x": torch.eye(3).to_sparse()}


class Times(Drawn):
    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        plain = {"s": 1.7e9 + index, "r": [0.5, 2.5e4], "y": 0.5}
        return {"x": torch.ones(2), "t": np.float64(1.7e9 + index), "u": torch.ones(1).double(), **plain}


def test_that_numbers_are_rounded_is_said() -> None:
    said = "data: float64 is read as float32, in t, u, s, r: times and the like want an origin nearby"
    assert said in drawn("Times").lines
    assert not any("float64" in line for line in drawn("Drawn").lines)


class Curriculum(Keyed):
    def set_epoch(self, epoch: int) -> None:
        raise AssertionError("never called")


class Sized(Keyed):
    vocab_size = np.int64(300)


class Tokens(Drawn):
    vocab_size = 100

    def __getitem__(self, index: int) -> dict[str, Any]:
        odd = {"large": 120, "negative": -5, "ignored": -100}.get(self.by, 0) if index == 5 else 0
        return {"input_ids": [1, 2, 3], "labels": [2, 3, odd]}


def test_ids_beyond_the_vocabulary_of_a_dataset_are_named() -> None:
    for by, said in (("large", "token 120"), ("negative", "token -5")):
        with pytest.raises(DataError, match=f"labels of sample 5 holds {said}, and the dataset's vocab_size is 100"):
            drawn("Tokens", by=by).dataset.sample(5)
    assert drawn("Tokens", by="ignored").dataset.sample(5)["labels"].tolist() == [2, 3, -100]


class Broken(Drawn):
    def __getitem__(self, index: int) -> dict[str, Any] | None:  # type: ignore[override]
        return None if index == 5 else {"x": [index]}


def test_a_sample_that_is_none_is_named() -> None:
    assert drawn("Broken").dataset.sample(4)["x"].tolist() == [4]
    with pytest.raises(DataError, match="sample 5 is None; leave such samples out of its length"):
        drawn("Broken").dataset.sample(5)


class NarrowTokens(Drawn):
    vocab_size = 50_257

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": np.array([1, 2, 127], self.by), "labels": np.array([2, 127, 3], self.by)}


@pytest.mark.parametrize("kind", ["uint8", "int8", "int16", "uint16", "int32", "uint32"])
def test_ids_of_any_width_are_compared_with_the_vocabulary(kind: str) -> None:
    assert drawn("NarrowTokens", by=kind).dataset.sample(5)["input_ids"].tolist() == [1, 2, 127]


def test_a_dataset_may_say_how_many_tokens_there_are() -> None:
    assert drawn("Sized").dataset.vocab_size == 300
    assert drawn("Keyed").dataset.vocab_size is None


class KeyedByDefault(Drawn):
    def __getitem__(self, index: int, key: int | None = None) -> dict[str, np.ndarray]:  # type: ignore[override]
        return {"x": np.random.default_rng(index if key is None else key).random(3, np.float32)}


def subset(by: str) -> torch.utils.data.Subset[Any]:
    return torch.utils.data.Subset(KeyedByDefault(by) if by == "key" else Drawn("index"), range(4))


class OfOneThread(Drawn):
    """As a connection of SQLite, which only the thread may use that has opened it."""

    def __init__(self, by: str) -> None:
        super().__init__(by)
        self.connection = sqlite3.connect(":memory:")

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.connection.execute("select ?", (index,)).fetchone()}


def test_one_thread_makes_and_reads_a_dataset() -> None:
    assert drawn("OfOneThread").dataset.sample(5)["x"].tolist() == [5]


def joined(by: str) -> torch.utils.data.ConcatDataset[Any]:
    return torch.utils.data.ConcatDataset([Drawn("index"), KeyedByDefault("key")])


def nested(by: str) -> torch.utils.data.Subset[Any]:
    return torch.utils.data.Subset(subset("key"), range(4))


@pytest.mark.parametrize(("name", "outer"), [("subset", "Subset"), ("joined", "ConcatDataset"), ("nested", "Subset")])
def test_that_keys_are_not_passed_on_is_said(name: str, outer: str) -> None:
    said = f"data: {outer} passes no key on to KeyedByDefault, whose draws are the same in every epoch"
    assert said in drawn(name, by="key").lines
    assert not any("passes no key" in line for line in drawn("subset").lines)


class TooLarge(Drawn):
    def __getitem__(self, index: int) -> dict[str, Any]:
        value = [0.0, 0.5, 0.5, float("inf"), 0.5, 1e300, 0.5, 0.5][index]
        return {"x": np.full(3, value) if self.by == "array" else [0.5, value]}


@pytest.mark.parametrize("by", ["array", "list"])
def test_numbers_beyond_float32_are_refused(by: str) -> None:
    dataset = drawn("TooLarge", by=by).dataset
    assert dataset.sample(3)["x"].isinf().any()
    with pytest.raises(DataError, match=r"field x: holds 1e\+300, which is beyond float32; scale the values"):
        dataset.sample(5)


class MadeOfDraws(Drawn):
    """Noise that is drawn when it is made: by a generator of its own, or by one of the process, seeded or not."""

    def __init__(self, by: str) -> None:
        super().__init__(by)
        if by == "seeded":
            torch.manual_seed(3)
        generator = torch.Generator().manual_seed(3) if by == "own" else None
        self.order = torch.randperm(8, generator=generator)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.order[index]}


@pytest.mark.parametrize("by", ["own", "seeded", "unseeded"])
def test_datasets_are_made_of_numbers_that_everybody_draws(by: str) -> None:
    before = torch.get_rng_state()
    opened = [drawn("MadeOfDraws", by=by).dataset for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    batches = [dataset.batch(np.arange(8))["x"] for dataset in opened]
    assert torch.equal(*batches) and sorted(batches[0].tolist()) == list(range(8))


class Numbered(Drawn):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": index}


def part(number: int) -> Any:
    return torch.utils.data.random_split(Numbered("index"), [4, 4])[int(number)]


def test_parts_of_a_random_split_have_nothing_in_common() -> None:
    words = [f"data._target_={__name__}.part", "data.number=0", "model._target_=torch.nn.Identity", "global_batch=2"]
    evaluated = ["eval.every=1", "eval.data=target", f"eval.data._target_={__name__}.part", "eval.data.number=1"]
    source = open_source(load_config([*words, *evaluated]))
    parts = [{int(each.sample(row)["x"]) for row in range(4)} for each in (source.dataset, source.evaluation)]
    assert parts[0] | parts[1] == set(range(8))


class Masked(Drawn):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.ma.masked_array([1.0, -9999.0], [False, self.by == "masked"])}


def test_masked_values_are_refused() -> None:
    assert drawn("Masked").dataset.sample(0)["x"].tolist() == [1, -9999]
    with pytest.raises(DataError, match="field x: .*a masked array has no values where it is masked"):
        drawn("Masked", by="masked")


class OddTensors(Drawn):
    def __getitem__(self, index: int) -> dict[str, Any]:
        made = {
            "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            "meta": lambda: torch.ones(2, device="meta"),
        }
        return {"x": made[self.by]()}


@pytest.mark.parametrize("by", ["nested", "quantized", "meta"])
def test_tensors_without_plain_values_are_refused(by: str) -> None:
    with pytest.raises(DataError, match=f"field x: is a {by} tensor"):
        drawn("OddTensors", by=by)


def test_that_methods_of_loops_are_not_called_is_said() -> None:
    assert "data: set_epoch of test_user_datasets.Curriculum is not called" in [
        line.replace("tests.data.", "") for line in drawn("Curriculum").lines
    ]
    assert not any("not called" in line for line in drawn("Keyed").lines)


def test_a_key_is_the_second_argument_of_items_that_have_no_other_use_for_it() -> None:
    assert float(drawn("IndexCalledKey").dataset.sample(3)["x"]) == 3
    assert float(drawn("OtherKey").dataset.sample(3)["x"]) == 3


def test_items_that_carry_gradients_are_numbers_and_sparse_ones_are_refused() -> None:
    assert not drawn("Computed").dataset.sample(3)["x"].requires_grad
    with pytest.raises(DataError, match=r"field x: a tensor of layout torch.sparse_coo; give it as .to_dense\(\)"):
        drawn("SparseItems")
    with pytest.raises(DataError, match=r"field x: a list is no tensor \(whole numbers of 2\*\*63 and more"):
        drawn("LargeItems")


def test_a_dataset_that_reads_otherwise_the_next_time_is_refused() -> None:
    cures = r"__getitem__\(self, index, key\).*data.transform, with an argument rng"
    with pytest.raises(DataError, match=f"noise of sample 0 is another one when it is read again.*{cures}"):
        drawn("Drawn", by="nothing")
    drawn("Drawn")


class Seldom(Drawn):
    """Items that hardly ever come otherwise: `by` draws by torch, Python or NumPy, or seeds what it draws from."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if self.by.startswith("seeded"):
            torch.manual_seed(index)
            np.random.seed(index)
        draw = {"torch": lambda: float(torch.rand(1)), "python": random.random, "numpy": np.random.rand}
        flipped = self.by != "index" and draw[self.by.split()[-1]]() < 1e-9
        return {"x": np.array([index, 0] if not flipped else [0, index], np.float32)}


class Rescaled(Drawn):
    """Items that are changed where the dataset keeps them."""

    def __init__(self, by: str) -> None:
        super().__init__(by)
        self.kept = torch.ones(8, 2)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"x": self.kept[index].mul_(0.5)}


@pytest.mark.parametrize(
    ("by", "words"), [("torch", "torch's generator"), ("python", "module random"), ("numpy", "numpy.random")]
)
def test_a_dataset_that_may_read_otherwise_is_refused(by: str, words: str) -> None:
    with pytest.raises(DataError, match=f"sample 0 draws from .*{re.escape(words)}.*a way out is __getitem__"):
        drawn("Seldom", by=by)


@pytest.mark.parametrize("by", ["index", "'seeded torch'", "'seeded numpy'"])
def test_a_dataset_that_seeds_what_it_draws_from_is_taken(by: str) -> None:
    assert len(drawn("Seldom", by=by).dataset) == 8


class Counting(Drawn):
    """Items that are others after a thousand reads; or only counted, by "nothing"."""

    def __init__(self, by: str) -> None:
        super().__init__(by)
        self.reads = 0

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        self.reads += 1
        return {"x": np.array([index, self.reads // 1000 if self.by == "index" else 0], np.float32)}


def test_items_that_depend_on_how_often_they_were_read_are_refused() -> None:
    with pytest.raises(DataError, match="its samples depend on reads, which reading them changes, .*a way out is"):
        drawn("Counting")
    assert len(drawn("Counting", by="nothing").dataset) == 8


class Cached(Drawn):
    """Keeps what it read last: a shard, some of them, a memo, small integers that are filled again."""

    def __init__(self, by: str) -> None:
        super().__init__(by)
        self.kept: dict[int, Any] = {}
        self.chunk, self.shard = -1, np.zeros(4, np.uint8)

    def __getitem__(self, index: int) -> dict[str, Any]:
        chunk = index // (1 if self.by == "memo" else 4)
        if self.by == "several":
            if chunk not in self.kept:
                self.kept[chunk] = np.arange(chunk * 4, chunk * 4 + 4)
                while len(self.kept) > 2:
                    self.kept.pop(next(iter(self.kept)))
            return {"x": self.kept[chunk][index % 4]}
        if self.by == "filled":
            self.shard[:] = index
        elif chunk != self.chunk:
            self.chunk, self.shard = chunk, np.arange(chunk * 4, chunk * 4 + 4).astype(np.uint8)
        return {"x": self.shard[index % 4].copy()}


@pytest.mark.parametrize("by", ["one", "several", "memo", "filled"])
def test_items_may_be_kept_for_the_next_time(by: str) -> None:
    dataset = drawn("Cached", by=by).dataset
    assert dataset.sample(5)["x"] == {"memo": 21, "filled": 5}.get(by, 5)


class Turning(Drawn):
    """A number that is as before every second time."""

    def __init__(self, by: str) -> None:
        super().__init__(by)
        self.turn = np.uint8(0)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.turn = np.uint8(1) - self.turn if self.by == "turns" else self.turn + np.uint8(1)
        phase = self.turn if self.by == "turns" else self.turn // 64 % 2
        return {"x": np.float32(index + (100 if phase else 0))}


@pytest.mark.parametrize("by", ["turns", "small"])
def test_small_counters_and_those_that_turn_are_refused(by: str) -> None:
    with pytest.raises(DataError, match="another one when it is read again|its samples depend on turn"):
        drawn("Turning", by=by)


class Buffers(Drawn):
    """Fills the same memory for every second sample, as loaders of videos and of shared memory do."""

    def __init__(self, by: str) -> None:
        super().__init__(by)
        self.tensors, self.arrays, self.reads = torch.zeros(2, 2), [np.zeros(2, np.float32) for _ in range(2)], 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        held: Any = (self.tensors if self.by == "tensor" else self.arrays)[index % 2]
        held[:] = index
        return {"x": held}


@pytest.mark.parametrize("by", ["tensor", "array"])
def test_items_may_be_in_one_memory(by: str) -> None:
    batch = drawn("Buffers", by=by).dataset.batch(np.array([5, 0, 2, 4, 3]))
    assert batch["x"].tolist() == [[5, 5], [0, 0], [2, 2], [4, 4], [3, 3]]


class Epochs(Drawn):
    """Another epoch after as many reads as there are samples."""

    def __init__(self, by: str) -> None:
        super().__init__(by)
        self.reads, self.epoch = 0, 0

    def __len__(self) -> int:
        return 777

    def __getitem__(self, index: int) -> dict[str, Any]:
        made = {"x": np.float32((index + 1) * (1 + self.epoch * (self.by == "epoch")))}
        self.reads += 1
        if self.reads % 777 == 0:
            self.epoch += 1
        return made


def test_epochs_that_a_dataset_counts_are_refused() -> None:
    with pytest.raises(DataError, match="its samples depend on (reads|epoch)"):
        drawn("Epochs", by="epoch")
    drawn("Epochs", by="nothing")


class CountingInside(Drawn):
    """The number lies in a list, in a dictionary or in an object."""

    def __init__(self, by: str) -> None:
        super().__init__(by)
        self.stats: Any = {"list": [0], "dictionary": {"reads": [0]}, "object": SimpleNamespace(reads=[0])}[by]

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        reads = (
            self.stats if isinstance(self.stats, list) else getattr(self.stats, "reads", None) or self.stats["reads"]
        )
        reads[0] += 1
        return {"x": np.array([index, reads[0] // 1000 % 2], np.float32)}


READS = {"reads": 0}


class CountingOutside(Drawn):
    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        READS["reads"] += 1
        return {"x": np.array([index, READS["reads"] > 700], np.float32)}


READ = {"reads": 0}


def noted() -> int:
    READ["reads"] += 1
    return READ["reads"]


class CountingInHelper(Drawn):
    """By a function that its code names."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"x": np.array([index, noted() > 700], np.float32)}


@functools.cache
def cached_stats() -> dict[str, int]:
    return {"cached": 0}


class CountingInCache(Drawn):
    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        cached_stats()["cached"] += 1
        return {"x": np.array([index, cached_stats()["cached"] > 700], np.float32)}


class Jitter:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: int) -> float:
        self.calls += 1
        return x + (self.calls > 700)


class CountingInTransform(Drawn):
    jitter = Jitter()

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"x": np.array([index, self.jitter(index)], np.float32)}


class CountingInClass(Drawn):
    reads = 0

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        type(self).reads += 1
        return {"x": np.array([index, self.reads > 700], np.float32)}


@pytest.mark.parametrize(("name", "count"), [
    ("CountingOutside", "READS"), ("CountingInClass", "reads"), ("CountingInHelper", "READ"),
    ("CountingInCache", "cached"), ("CountingInTransform", "jitter"),
])  # fmt: skip
def test_items_that_depend_on_a_global_count_are_refused(name: str, count: str) -> None:
    with pytest.raises(DataError, match=f"its samples depend on {count}, which reading them changes"):
        drawn(name)


@pytest.mark.parametrize("by", ["list", "dictionary", "object"])
def test_items_that_depend_on_a_count_that_lies_deeper_are_refused(by: str) -> None:
    with pytest.raises(DataError, match="its samples depend on stats, which reading them changes"):
        drawn("CountingInside", by=by)


class SeldomDrawn(Drawn):
    """One item draws, which is none of those that are looked at before anything starts."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if self.by == "seeded":
            random.seed(index)
        return {"x": np.array([index, random.random() if index == 5 else 0], np.float32)}


def test_a_draw_for_some_items_alone_is_refused_when_they_come() -> None:
    dataset = drawn("SeldomDrawn", by="python").dataset
    assert dataset.batch(np.arange(4))["x"].shape == (4, 2)
    with pytest.raises(DataError, match=r"sample 5 draws from Python's generator .*a way out is __getitem__"):
        dataset.batch(np.arange(4, 8))
    seeded = drawn("SeldomDrawn", by="seeded").dataset
    for _ in range(20):
        assert torch.equal(seeded.batch(np.arange(4, 8))["x"], seeded.batch(np.arange(4, 8))["x"])


class SeldomChanged(Drawn):
    """One item draws from a generator of its own, or counts, which is none of those that are looked at before."""

    def __init__(self, by: str) -> None:
        super().__init__(by)
        self.numpys, self.pythons, self.torchs = np.random.default_rng(0), random.Random(0), torch.Generator()
        self.inside = SimpleNamespace(reads=0)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"x": np.array([index, self.seldom() if index == 5 else 0], np.float32)}

    def seldom(self) -> float:
        self.inside.reads += 1
        match self.by:
            case "numpy":
                return self.numpys.random()
            case "python":
                return self.pythons.random()
            case "torch":
                return torch.rand((), generator=self.torchs).item()
            case "seeded":
                self.pythons.seed(5)
                return self.pythons.random()
            case "count":
                return self.inside.reads
        return 1.0


@pytest.mark.parametrize("by", ["numpy", "python", "torch", "count"])
@pytest.mark.parametrize("wrap", [False, True], ids=["", "by a transform of another"])
def test_items_that_depend_on_what_they_change_are_refused_when_they_come(by: str, wrap: bool) -> None:
    transform = [f"data.transform._target_={__name__}.unchanged"] if wrap else []
    dataset = drawn("SeldomChanged", *transform, by=by).dataset
    assert dataset.batch(np.arange(4))["x"].shape == (4, 2)
    with pytest.raises(DataError, match="x of sample 5 is another one when it is read again, but a step that"):
        dataset.batch(np.arange(4, 8))


class Odd(dict):
    """What it is asked for, it takes for a key."""

    __getattr__ = dict.get


class HoldsOddObjects(Drawn):
    def __init__(self, by: str) -> None:
        super().__init__(by)
        self.odd, self.deep, self.here = Odd(), [[[Odd()] * 99] * 99] * 99, self


def test_objects_of_which_a_dataset_has_the_numbers_are_not_asked() -> None:
    assert drawn("HoldsOddObjects").dataset.batch(np.arange(4))["x"].shape == (4, 1)


@pytest.mark.parametrize("by", ["seeded", "counts alone"])
def test_items_may_change_what_they_do_not_depend_on(by: str) -> None:
    dataset = drawn("SeldomChanged", by=by).dataset
    for _ in range(20):
        assert torch.equal(dataset.batch(np.arange(4, 8))["x"], dataset.batch(np.arange(4, 8))["x"])


def unchanged(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


def test_whole_numbers_that_int64_does_not_hold_are_refused() -> None:
    assert as_tensor(np.uint64(7), "x").dtype == torch.int64
    with pytest.raises(DataError, match=r"x: whole numbers of 2\*\*63 and more are not supported"):
        as_tensor(np.array([1, 2**63], np.uint64), "x")


def test_a_dataset_that_changes_what_it_keeps_is_refused() -> None:
    with pytest.raises(DataError, match="x of sample 0 is another one when it is read again"):
        drawn("Rescaled")


def test_items_of_a_key_are_new_whenever_they_come_and_the_same_for_whoever_asks() -> None:
    source = drawn("Keyed")
    twice = load_batch(source.dataset, source.train, 0, 16)
    halves = [load_batch(source.dataset, source.train, first, 8) for first in (0, 8)]
    assert torch.equal(twice["noise"], torch.cat([half["noise"] for half in halves])), "however it is divided"
    order = [half["x"].flatten().argsort() for half in halves]
    first, second = (half["noise"][places] for half, places in zip(halves, order, strict=True))
    assert not torch.equal(first, second), "the second data epoch draws anew"
    other = open_source(
        load_config(
            [f"data._target_={__name__}.Keyed", "data.by=index", "model._target_=torch.nn.Identity",
             "global_batch=4", "seed=1"]
        )
    )  # fmt: skip
    again = load_batch(other.dataset, other.train, 0, 16)
    assert not torch.equal(again["noise"], twice["noise"]), "another seed"
