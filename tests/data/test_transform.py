"""`data.transform`: which samples it makes, what it draws, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from elaswave_fx.config.compose import load_config
from elaswave_fx.data import load_batch, open_data, open_source
from elaswave_fx.data.source import Source
from elaswave_fx.errors import ConfigError

HERE = "tests.data.transforms"


def source(name: str, *words: str, data: str = "data=digits") -> Source:
    transform = (f"data.transform._target_={HERE}.{name}",) if name else ()
    return open_source(load_config([data, *transform, "global_batch=16", "cache.enabled=false", *words]))


def test_what_is_drawn_is_of_the_position_and_of_the_seed() -> None:
    opened, plain = source("Noise"), source("")
    count = opened.train.num_samples
    epochs = [load_batch(opened.dataset, opened.train, first, count) for first in (0, count)]
    parts = [load_batch(opened.dataset, opened.train, first, 8)["image"] for first in (0, 8)]
    assert torch.equal(torch.cat(parts), epochs[0]["image"][:16]), "however it is divided"
    where = [np.argsort(opened.train.indices(first, count)) for first in (0, count)]
    first, second = (epoch["image"][torch.from_numpy(places)] for epoch, places in zip(epochs, where, strict=True))
    assert torch.equal(
        plain.dataset.batch(np.arange(count))["label"], epochs[0]["label"][torch.from_numpy(where[0])]
    ), "the same samples"
    assert (first != second).flatten(1).any(1).all(), "every sample is drawn anew in every epoch"
    other = source("Noise", "seed=1")
    again = load_batch(other.dataset, other.train, 0, count)["image"][np.argsort(other.train.indices(0, count))]
    assert not torch.equal(again, first)


def test_draws_of_a_file_and_of_a_constructor_follow_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mixing_transform.py").write_text(
        "import numpy as np, torch\nHERE = np.random.rand()\n\n\nclass Mix:\n    def __init__(self):\n"
        "        self.by = np.random.rand() + HERE + torch.rand(()).item()\n\n"
        "    def __call__(self, sample):\n        return {**sample, 'image': sample['image'] * self.by}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def image(seed: int, imported: bool = False) -> torch.Tensor:
        if not imported:
            sys.modules.pop("mixing_transform", None)
        words = ("data=digits", "data.transform._target_=mixing_transform.Mix", f"seed={seed}", "global_batch=16")
        return open_source(load_config([*words, "cache.enabled=false"])).dataset.sample(0)["image"]

    state = np.random.get_state()[1].tolist()
    assert torch.equal(image(1), image(1)) and not torch.equal(image(1), image(2))
    assert torch.equal(image(2, imported=True), image(2, imported=True)), "as a joiner opens it twice"
    assert np.random.get_state()[1].tolist() == state, "the caller's generators are as they were"


def test_all_kinds_of_data_are_transformed_and_keep_what_is_known_of_them() -> None:
    tokens = source("Noise", "data.samples=64", "seq_len=8", data="data=synthetic")
    plain = source("", "data.samples=64", "seq_len=8", data="data=synthetic")
    assert tokens.dataset.vocab_size == plain.dataset.vocab_size == 256
    batch = load_batch(tokens.dataset, tokens.train, 0, 16)
    assert torch.equal(batch["labels"], load_batch(plain.dataset, plain.train, 0, 16)["labels"])
    assert source("Noise").dataset.classes == 10
    text = source("Noise", "data.limit_mb=0.1", data="data=stdlib")
    assert text.dataset.tokenizer is not None and text.dataset.tokenizer.kind == "bytes" and len(text.dataset) > 100
    assert text.dataset.batch(np.array([], np.int64))["input_ids"].shape == (0, 64)


def test_held_out_samples_go_through_what_needs_no_generator() -> None:
    plain = source("").dataset.sample(3)["image"]
    noisy = source("Noise").dataset
    assert not torch.equal(noisy.sample(3)["image"], plain)
    assert torch.equal(noisy.for_evaluation().sample(3)["image"], plain), "not called without a generator"
    scaled = source("Scale", "data.transform.factor=3").dataset
    assert torch.equal(scaled.sample(3)["image"], 3 * plain)
    assert torch.equal(scaled.for_evaluation().sample(3)["image"], 3 * plain)
    assert torch.equal(scaled.sample(3)["image"], 3 * plain), "what it writes to is its own"
    cropped = source("Crop", "data.transform.size=4", "eval.every=1").dataset
    assert torch.equal(cropped.for_evaluation().sample(3)["image"], plain[:, 2:6, 2:6])
    assert cropped.sample(3)["image"].shape == (1, 4, 4)


def test_a_function_will_do_and_its_other_arguments_are_keys() -> None:
    plain = source("").dataset.batch(np.arange(50))["image"]
    always = source("flipped", "data.transform.share=1").dataset.batch(np.arange(50))["image"]
    assert torch.equal(always, plain.flip(-1))
    some = (source("flipped").dataset.batch(np.arange(50))["image"] != plain).flatten(1).any(1).sum()
    assert 10 < some < 40


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("careless", (), "image of sample 0 is another one when it is read again.*a way out is an argument rng"),
        ("careless_evaluation", ("eval.every=1",), "image of sample 0 is another one when it is read again"),
        ("raising", (), r"sample 0 cannot be read \(RuntimeError: no such crop\)"),
        ("hanging", ("data.deadline_s=0.2",), r"sample 0 has not been read after 0.2 s \(data.deadline_s\)"),
        ("nothing", (), "gives a NoneType for sample 0; it is called with a dict of tensors by name, and must"),
        ("words", (), "field image: a str is no tensor"),
        ("Uncallable", (), "gives a Uncallable, which cannot be called with a sample"),
        ("Nobody", (), "cannot be built: ImportError"),
        ("Crop", (), "cannot be built: TypeError: .*missing 1 required positional argument: 'size'"),
        (
            "BlindCrop",
            ("data.transform.size=4", "eval.every=1"),
            r"image is torch.float32 \[1, 4, 4\] in samples that train, and torch.float32 \[1, 8, 8\] in held-out "
            "ones; a transform with an argument rng is called for the former only, one with rng=None for both",
        ),
    ],
)
def test_a_transform_that_cannot_work_is_refused(name: str, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^data.transform._target_={HERE}.{name}: {message}"):
        source(name, *words)


def test_a_crop_without_evaluation_needs_no_other_form() -> None:
    assert source("BlindCrop", "data.transform.size=4").dataset.sample(0)["image"].shape == (1, 4, 4)


def pictures(transform: str) -> torch.Tensor:
    words = [f"data._target_={HERE}.Pictures", f"data.transform{transform}", "global_batch=8"]
    return open_data(load_config(words)).sample(3)["image"]


def test_data_that_is_evaluated_has_a_transform_of_its_own() -> None:
    words = ("data.transform.factor=3", "eval.every=1", "eval.data=digits")
    plain = source("Scale", *words)
    assert "eval.data: data.transform is not applied to it; eval.data.transform would be" in plain.lines
    own = source("Scale", *words, f"eval.data.transform._target_={HERE}.Scale", "eval.data.transform.factor=3")
    assert not any("is not applied" in line for line in own.lines)
    first = np.arange(1)
    assert torch.equal(own.evaluation.batch(first)["image"], 3 * plain.evaluation.batch(first)["image"])


def test_a_dataset_that_takes_a_transform_gets_it_unless_that_draws() -> None:
    plain = torch.full((1, 8, 8), 3.0)
    assert torch.equal(pictures(f"._target_={HERE}.doubled"), 2 * plain), "called with the image"
    noisy = pictures(f"._target_={HERE}.Noise")
    assert noisy.shape == plain.shape and not torch.equal(noisy, plain), "called with the sample"
    assert torch.equal(pictures("=flip"), plain), "any argument by that name is the dataset's"
    assert torch.equal(pictures("={size: 4}"), plain)


@pytest.mark.parametrize("data", ["data=digits", "data=stdlib"])
def test_a_transform_needs_an_import_path(data: str) -> None:
    for word, message in (
        ("data.transform=flip", "data.transform=flip: needs an import path, such as data.transform._target_=package."),
        ("data.transform.size=3", "data.transform={size:3}: needs an import path"),
        ("data.transform._target_=Crop", "data.transform._target_=Crop: must be an import path"),
        ("data.transfrom._target_=a.B", "data.transfrom._target_: unknown key; "),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config([data, word])
        assert str(caught.value).startswith(message)


def test_that_what_a_transform_makes_is_rounded_is_said() -> None:
    assert [line for line in source("finer").lines if "float64 is read as float32, in image" in line]
    assert not [line for line in source("Noise").lines if "float64" in line]


def test_a_transform_may_write_into_a_field() -> None:
    words = ("data.samples=64", "seq_len=8")
    written = source("masks_inputs", *words, data="data=synthetic").dataset.sample(3)
    plain = source("", *words, data="data=synthetic").dataset.sample(3)
    assert torch.equal(written["labels"], plain["labels"])
    assert written["input_ids"][1::2].tolist() == [255] * 4
