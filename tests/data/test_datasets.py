"""Datasets that are not streams of tokens, the split, and what is refused."""

import json
import random
import re
import sqlite3
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from elaswave_fx.config.compose import load_config
from elaswave_fx.data import Dataset, check_evaluation, load_batch, open_data, open_source
from elaswave_fx.data.dataset import as_tensor
from elaswave_fx.data.source import Source
from elaswave_fx.errors import ConfigError, DataError

datasets = pytest.importorskip("datasets")


def opened(*overrides: str) -> Dataset:
    return open_data(load_config([*overrides, "cache.enabled=false"]))


def assert_pure(dataset: Dataset) -> None:
    """The same index gives the same bits, alone, in a batch and from a second look."""
    indices = np.array([3, 0, 3, len(dataset) - 1])
    batch = dataset.batch(indices)
    for row, index in enumerate(indices):
        sample = dataset.sample(int(index))
        assert sample.keys() == batch.keys()
        for name, tensor in sample.items():
            assert torch.equal(tensor, batch[name][row])
            assert tensor.dtype == batch[name].dtype
    sample = dataset.sample(0)
    for tensor in sample.values():
        tensor.zero_()  # whoever gets a sample may write to it
    assert all(torch.equal(batch[name][1], tensor) for name, tensor in dataset.sample(0).items())


@pytest.mark.parametrize("kind", ["digits", "synthetic"])
@pytest.mark.parametrize(("layout", "shapes"), [
    ("image", {"image": (1, 8, 8), "label": ()}),
    ("flat", {"image": (64,), "label": ()}),
    ("halves", {"left": (32,), "right": (32,), "label": ()}),
])  # fmt: skip
def test_images(kind: str, layout: str, shapes: dict[str, tuple[int, ...]]) -> None:
    dataset = opened(f"data={kind}", f"data.layout={layout}")
    sample = dataset.sample(5)
    assert {name: tuple(tensor.shape) for name, tensor in sample.items()} == shapes
    assert dataset.classes == 10
    assert sample["label"].dtype == torch.int64
    batch = dataset.batch(np.arange(200))
    assert set(batch["label"].tolist()) == set(range(10))
    for name in shapes.keys() - {"label"}:
        assert batch[name].dtype == torch.float32
        assert 0 <= batch[name].min() < batch[name].max() <= 1
    assert_pure(dataset)


def test_halves_are_left_and_right() -> None:
    image = opened("data=digits").sample(1)["image"][0]
    halves = opened("data=digits", "data.layout=halves").sample(1)
    assert torch.equal(torch.cat([halves["left"].view(8, 4), halves["right"].view(8, 4)], dim=1), image)


def test_digits_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(["data=digits", f"cache.dir={tmp_path}"])
    first = open_data(config)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert torch.equal(open_data(config).sample(7)["image"], first.sample(7)["image"])
    with pytest.raises(DataError, match="needs scikit-learn"):
        opened("data=digits")


def test_synthetic_tokens() -> None:
    dataset = opened("data=synthetic", "data.vocab_size=50", "seq_len=200", "data.samples=30")
    assert (len(dataset), dataset.vocab_size) == (30, 50)
    assert_pure(dataset)
    batch = dataset.batch(np.arange(30))
    assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])
    assert 0 <= batch["labels"].min() < batch["labels"].max() < 50
    steps = (batch["labels"] - batch["input_ids"]) % 50
    assert 0.6 < ((steps >= 1) & (steps <= 3)).float().mean() < 0.95  # both ends are free of noise in 3 of 4


class Pairs:
    """A map-style dataset as users write them."""

    def __init__(self, count: int, ragged: bool = False) -> None:
        self.count, self.ragged = count, ragged

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> object:
        size = 4 + (self.ragged and index == 2)
        return np.full(size, index / 2, np.float64), index % 3


class Dicts(Pairs):
    def __getitem__(self, index: int) -> object:
        return {"x": torch.full((2,), index, dtype=torch.int32), "y": [0.5, index], "name": torch.tensor(True)}


class Rows:
    def __init__(self, rows: list[list[int]]) -> None:
        assert type(rows) is type(rows[0]) is list
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> object:
        return {"row": self.rows[index]}


class Words(Pairs):
    def __getitem__(self, index: int) -> object:
        return {"x": "text"}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "user_data", sys.modules[__name__])


def test_users_tuples() -> None:
    dataset = opened("data._target_=user_data.Pairs", "data.count=8", "data.fields=[image,label]")
    sample = dataset.sample(5)
    assert torch.equal(sample["image"], torch.full((4,), 2.5))
    assert (sample["image"].dtype, sample["label"].dtype, sample["label"].item()) == (torch.float32, torch.int64, 2)
    assert dataset.batch(np.array([1, 2]))["image"].shape == (2, 4)
    assert dataset.batch(np.array([], np.int64))["image"].shape == (0, 4)


def test_users_lists_arrive_as_lists() -> None:
    dataset = opened("data._target_=user_data.Rows", "data.rows=[[1,2],[3,4]]")
    assert dataset.sample(1)["row"].tolist() == [3, 4]


def test_users_dicts() -> None:
    dataset = opened("data._target_=user_data.Dicts", "data.count=8")
    assert {name: tensor.dtype for name, tensor in dataset.sample(1).items()} == {
        "x": torch.int64,
        "y": torch.float32,
        "name": torch.bool,
    }
    chosen = opened("data._target_=user_data.Dicts", "data.count=8", "data.fields=[y]")
    assert list(chosen.sample(1)) == ["y"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data._target_=user_data.Pairs", "data.count=8"], r"data.fields=\[\]: must name the 2 parts of a user_data"),
        (["data._target_=user_data.Pairs"], r"data._target_=user_data.Pairs: .*missing 1 required positional argument"),
        (["data._target_=user_data.Nobody"], "data._target_=user_data.Nobody: .*Nobody"),
        (["data._target_=builtins.object"], "data._target_=builtins.object: has no __len__"),
        (["data._target_=user_data.Pairs", "data.count=0"], "data._target_=user_data.Pairs: is empty"),
        (["data._target_=user_data.Words", "data.count=2"], "field x: a str is no tensor"),
        (["data._target_=user_data.Dicts", "data.count=2", "data.fields=[z]"], "data.fields: z is not in the samples"),
    ],
)
def test_users_dataset_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(*overrides)


def test_samples_of_different_shapes() -> None:
    dataset = opened("data._target_=user_data.Pairs", "data.count=8", "+data.ragged=true", "data.fields=[a,b]")
    with pytest.raises(DataError, match=r"a of sample 2 is torch.float32 \[5\], of sample 0 torch.float32 \[4\]"):
        dataset.batch(np.array([1, 2]))


def hf(*overrides: str) -> Dataset:
    return opened("data=hf", "seq_len=4", *overrides)


def test_hf_text_from_json_lines(tmp_path: Path) -> None:
    rows = [{"text": "abc", "id": 1}, {"text": "defgh", "id": 2}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dataset = hf(f"data.paths={tmp_path}/rows.jsonl")
    assert dataset.vocab_size == 256
    assert bytes(dataset.sample(0)["input_ids"].tolist()) == b"abc\0"
    assert bytes(dataset.sample(1)["input_ids"].tolist()) == b"defg"
    with pytest.raises(DataError, match=r"data.column=txt: no such column; nearest valid value: text"):
        hf(f"data.paths={tmp_path}/rows.jsonl", "data.column=txt")
    with pytest.raises(DataError, match=r"data.column=id: holds int64, neither text nor lists"):
        hf(f"data.paths={tmp_path}/rows.jsonl", "data.column=id")


def test_hf_columns_from_csv(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("width,kind\n1.5,0\n2.5,1\n3.5,0\n4.5,1\n")
    dataset = hf(f"data.paths={tmp_path}/rows.csv", "data.fields=[width,kind]")
    assert {name: tensor.item() for name, tensor in dataset.sample(1).items()} == {"width": 2.5, "kind": 1}
    assert_pure(dataset)
    with pytest.raises(DataError, match=r"data.column: is missing, the data has several columns: width, kind"):
        hf(f"data.paths={tmp_path}/rows.csv")


def test_hf_saved_with_splits(tmp_path: Path) -> None:
    ids = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9]] * 2})
    datasets.DatasetDict({"train": ids, "test": ids.select([0])}).save_to_disk(str(tmp_path / "saved"))
    dataset = hf(f"data.paths={tmp_path}/saved")
    assert (len(dataset), dataset.vocab_size) == (2, 10)
    assert dataset.sample(0)["labels"].tolist() == [6, 7, 8, 9]
    with pytest.raises(DataError, match=r"data.split=trian: no such split; nearest valid value: train"):
        hf(f"data.paths={tmp_path}/saved", "data.split=trian")
    with pytest.raises(DataError, match=r"holds 3 tokens, one sample needs 5; nearest valid: seq_len=2"):
        hf(f"data.paths={tmp_path}/saved", "data.split=test")


def test_hf_parquet_and_text_with_a_cache(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"body": ["hello", "world"]}).to_parquet(str(tmp_path / "rows.parquet"))
    (tmp_path / "rows.txt").write_text("hello\nworld\n")
    cached = ["data=hf", "seq_len=4", f"cache.dir={tmp_path}/cache"]
    for name in ("rows.parquet", "rows.txt"):
        dataset = open_data(load_config([*cached, f"data.paths={tmp_path}/{name}"]))
        assert bytes(dataset.sample(0)["input_ids"].tolist()) == b"hell"
    with pytest.raises(DataError, match="mixes files of parquet and text"):
        open_data(load_config([*cached, f"data.paths=[{tmp_path}/rows.txt,{tmp_path}/rows.parquet]"]))


def test_hf_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text("{ not json")
    with pytest.raises(DataError, match="is neither JSON Lines nor a list"):
        hf(f"data.paths={tmp_path}/rows.json")
    (tmp_path / "rows.xml").write_text("<a/>")
    with pytest.raises(DataError, match=r"rows.xml: is none of .json, .jsonl, .csv, .parquet, .arrow, .txt"):
        hf(f"data.paths={tmp_path}/rows.xml")


SYNTHETIC = ["data=synthetic", "data.samples=100", "seq_len=8", "global_batch=10"]


def split(*words: str) -> tuple[list[int], list[int], Source]:
    """The samples of an epoch of training, those that are held out, and the source."""
    source = open_source(load_config([*SYNTHETIC, *words]))
    train = source.train.indices(0, source.train.num_samples).tolist()
    return train, source.held_out.indices(0, source.held_out.num_samples).tolist(), source


@pytest.mark.parametrize("which", ["shuffled", "last"])
def test_training_and_held_out_samples_are_disjoint_and_all(which: str) -> None:
    words = ("eval.fraction=0.25", "eval.every=5", "eval.batches=9", f"eval.split={which}")
    train, held, source = split(*words)
    assert (len(train), len(held), source.eval_batches) == (75, 25, 2)
    assert sorted(train + held) == list(range(100))
    assert (sorted(held) == list(range(75, 100))) is (which == "last")
    assert split(*words)[:2] == (train, held), "everybody holds out the same"
    other = split(*words, "seed=1")[1]
    assert (other == held) is (which == "last")
    how = {"shuffled": "drawn by the seed", "last": "the last ones"}[which]
    assert source.lines == (
        f"data: 75 samples train, 25 are held out ({how}, eval.fraction=0.25), and every 5 steps the first 20 of them "
        "are evaluated",
    )


def test_nothing_is_held_out_that_nobody_evaluates() -> None:
    train, held, source = split("eval.fraction=0.25")
    assert (sorted(train), held, source.eval_batches) == (list(range(100)), [], 0)
    assert source.lines == ("data: all 100 samples train, none is held out (eval.every=0)",)


def test_how_often_one_evaluates_does_not_change_the_samples() -> None:
    often, seldom = (split(f"eval.every={n}", "eval.fraction=0.2")[2] for n in (2, 5))
    assert often.train == seldom.train


def test_other_data_may_be_evaluated() -> None:
    words = ("data=digits", "global_batch=10", "eval.every=5", "cache.enabled=false")
    source = open_source(load_config([*words, "eval.data=synthetic", "eval.data.layout=image", "eval.data.samples=35"]))
    assert (source.train.num_samples, source.held_out.num_samples, source.eval_batches) == (1797, 35, 3)
    evaluated = load_batch(source.evaluation, source.held_out, 0, 35)
    assert torch.equal(evaluated["image"], opened("data=synthetic", "data.layout=image").batch(np.arange(35))["image"])
    assert source.lines[0] == (
        "data: all 1,797 samples train; eval.data=synthetic has 35, and every 5 steps the first 30 of them are "
        "evaluated"
    )


def test_text_that_is_evaluated_goes_through_the_tokenizer_of_the_text_that_trains(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("the cat sat on the mat\n" * 90)
    (tmp_path / "val.txt").write_text("a dog and the hat\n" * 90)
    words = ("data=files", f"data.paths={tmp_path}/train.txt", "tokenizer=bpe", "tokenizer.vocab_size=265",
             "seq_len=4", "eval.every=5", "eval.data=files", f"eval.data.paths={tmp_path}/val.txt",
             "cache.enabled=false")  # fmt: skip
    source = open_source(load_config(words))
    assert source.dataset.tokenizer is not None
    tokens = source.evaluation.batch(np.arange(4))["input_ids"].flatten().tolist()
    assert source.dataset.tokenizer.decode(tokens).startswith("a dog")
    with pytest.raises(DataError, match=r"eval.data=synthetic: is no text, and data=files is text \(tokenizer=bpe\)"):
        open_source(load_config([*words[:6], "eval.data=synthetic", "cache.enabled=false"]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("eval.data=files", "eval.data.paths=[/nowhere/x]"), "eval.data.paths=/nowhere/x: no such file"),
        (("eval.data=digits",), r"eval.data=digits: image is torch.float32 \[1, 8, 8\], and missing in the samples"),
        (("eval.data=synthetic", "eval.data.samples=9"), "has 9 samples, fewer than global_batch=10"),
        (
            ("eval.data=synthetic", "eval.data.smaples=9"),
            "eval.data.smaples: .*valid key: eval.data.samples",
        ),
        (("eval.data=files",), "eval.data.paths: is missing, eval.data=files needs at least one path"),
        (("eval.data._target_=user_data.Pairs",), "eval.data._target_=user_data.Pairs: cannot be built"),
    ],
)
def test_other_data_that_cannot_be_evaluated(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_source(load_config([*SYNTHETIC, "eval.every=5", *words]))


def test_tokens_that_training_does_not_know_are_not_evaluated() -> None:
    words = ("eval.every=5", "data.vocab_size=50", "eval.data=synthetic", "eval.data.vocab_size=60")
    with pytest.raises(DataError, match="eval.data: has 60 tokens, and the data that trains 50; .*vocab_size=60"):
        check_evaluation(open_source(load_config([*SYNTHETIC, *words])))


def test_batches_are_functions_of_the_position() -> None:
    first, second = (open_source(load_config(SYNTHETIC)) for _ in range(2))
    whole = load_batch(first.dataset, first.train, 90, 10)  # crosses into the second epoch
    assert whole["input_ids"].shape == (10, 8)
    part = load_batch(second.dataset, second.train, 93, 4)
    assert torch.equal(part["labels"], whole["labels"][3:7])
    assert not torch.equal(whole["labels"], load_batch(first.dataset, first.train, 0, 10)["labels"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["global_batch=96", "eval.every=5"], r"global_batch=96: data=synthetic has 95 samples to train on \(5 of 100 "
         r"are held out, eval.fraction=0.05\); nearest valid: global_batch=95"),
        (["global_batch=110", "parallel.granule=10"], "has 100 samples to train on; nearest valid: global_batch=100"),
        (["eval.every=5"], r"eval.fraction=0.05: holds out 5 of 100 samples, fewer than global_batch=10; "
         "nearest valid: eval.fraction=0.1"),
        (["eval.every=5", "global_batch=60"], "holds out 5 of 100 .*; nearest valid: eval.every=0"),
    ],
)  # fmt: skip
def test_too_few_samples(overrides: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_source(load_config([*SYNTHETIC, *overrides]))


def test_stdlib_recipe_opens(tmp_path: Path) -> None:
    source = open_source(load_config(["recipe=gpt_stdlib", f"cache.dir={tmp_path}"]))
    assert source.dataset.vocab_size == 256
    assert source.eval_batches == 4
    batch = load_batch(source.dataset, source.train, 0, 16)
    assert batch["input_ids"].shape == (16, 128)


@pytest.mark.parametrize("recipe", ["resnet_digits", "two_tower", "hf_llama"])
def test_other_recipes_open(recipe: str, tmp_path: Path) -> None:
    source = open_source(load_config([f"recipe={recipe}", "data.limit_mb=0.3"] if recipe == "hf_llama"
                                     else [f"recipe={recipe}", "cache.enabled=false"]))  # fmt: skip
    assert len(source.dataset) > 64


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


def drawn(kind: str, by: str = "index") -> Source:
    words = [f"data._target_={__name__}.{kind}", f"data.by={by}", "model._target_=torch.nn.Identity"]
    return open_source(load_config([*words, "global_batch=4"]))


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
    assert "data: set_epoch of test_datasets.Curriculum is not called" in [
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


def test_items_that_depend_on_a_global_count_are_refused() -> None:
    with pytest.raises(DataError, match="its samples depend on READS, which reading them changes"):
        drawn("CountingOutside")


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
