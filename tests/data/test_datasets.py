"""Datasets that are not streams of tokens, the split, and what is refused."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from elaswave_fx.config.compose import load_config
from elaswave_fx.data import Dataset, check_evaluation, load_batch, open_data, open_source
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


class Named(NamedTuple):
    x: np.ndarray
    y: int


@dataclass
class Item:
    x: np.ndarray
    y: int


class Items(Pairs):
    def __init__(self, count: int, of: str) -> None:
        super().__init__(count)
        self.kind = {"data class": Item, "named tuple": Named}[of]

    def __getitem__(self, index: int) -> object:
        return self.kind(np.full(2, index / 2), index)


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


@pytest.mark.parametrize("kind", ["data class", "named tuple"])
def test_users_samples_with_named_parts(kind: str) -> None:
    target = ("data._target_=user_data.Items", "data.count=8", f"+data.of={kind}")
    sample = opened(*target).sample(3)
    assert sample["x"].tolist() == [1.5, 1.5] and sample["y"].item() == 3
    assert list(opened(*target, "data.fields=[y]").sample(1)) == ["y"]
    if kind == "named tuple":
        assert list(opened(*target, "data.fields=[a,b]").sample(1)) == ["a", "b"]


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
