"""`data.labels`: labels that stand at their own tokens become the next tokens, for models that predict these."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from elaswave_fx.build.make_model import make_model
from elaswave_fx.config.compose import load_config
from elaswave_fx.data import Source, load_batch, open_source
from elaswave_fx.data.labels import NextTokenLabels
from elaswave_fx.errors import ConfigError, DataError

VOCAB, TOKENS = 50, 12


class Prepared:
    """Samples as people prepare them for transformers: labels are the inputs, but -100 at the prompt and at padding.
    `what`: what is different. `labels`: an argument of the class."""

    def __init__(self, what: str = "same", labels: str = "none") -> None:
        self.kind, self.labels = what, labels

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        ids = np.random.default_rng(index).integers(1, VOCAB, TOKENS)
        labels = np.append(ids[1:], 0) if self.kind == "shifted" else ids.copy()
        labels[: index % 4] = -100
        labels[TOKENS - index % 3 :] = -100
        if self.kind == "seldom" and index == 17:
            labels[7] += 1
        if self.kind == "other" and index == 39:
            labels[5] += 1
        if self.kind == "noised":
            noise = np.random.default_rng((index, 2))
            ids = np.where(noise.random(TOKENS) < 0.15, noise.integers(1, VOCAB, TOKENS), ids)
        if self.kind == "bytes":
            labels = ids.astype(np.uint8)
        if self.kind == "few count" and index != 7:
            labels[:] = -100
        if self.kind == "nothing counts":
            labels[:] = -100
        return {"input_ids": ids, "labels": labels}


GPT2 = ("model=hf", "model.name=gpt2", "model.config.n_layer=1", "model.config.n_embd=16", "model.config.n_head=2",
        f"model.config.vocab_size={VOCAB}", "global_batch=4", f"seq_len={TOKENS}")  # fmt: skip
GPT = ("model=gpt", "global_batch=4")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prepared", sys.modules[__name__])


def opened(*words: str, kind: str = "same") -> Source:
    return open_source(load_config(["data._target_=prepared.Prepared", f"data.what={kind}", *words]))


def test_labels_of_bytes_have_ignored_ones_too() -> None:
    found = opened(*GPT2, kind="bytes").dataset.sample(7)["labels"]
    assert found.tolist() == [*Prepared("bytes")[7]["labels"][1:].tolist(), -100]


def shifts(found: Source) -> bool:
    """Whether labels are the next tokens: of the data, in a batch and in an evaluation."""
    raw = Prepared()[7]["labels"]
    wanted = np.append(raw[1:], -100)
    seen = [
        found.dataset.sample(7)["labels"].numpy(),
        found.dataset.batch(np.array([3, 7]))["labels"][1].numpy(),
        found.evaluation.sample(7)["labels"].numpy(),
    ]
    are = {np.array_equal(labels, wanted) for labels in seen}
    assert len(are) == 1
    return are.pop()


@pytest.mark.parametrize(
    ("words", "kind", "shifted"),
    [
        (GPT2, "same", True),
        (GPT, "same", True),
        ((*GPT2, "data.labels=same"), "other", True),
        ((*GPT2, "data.labels=shifted"), "same", False),
        (GPT2, "shifted", False),
        (GPT2, "noised", True),
        (GPT2, "other", True),
        (GPT2, "nothing counts", False),
        (GPT2, "few count", True),
        (("model=hf", "model.name=t5", "global_batch=4"), "same", False),
        (("model._target_=torch.nn.Identity", "global_batch=4"), "same", False),
        (("model._target_=torch.nn.Identity", "global_batch=4", "data.labels=same"), "same", True),
    ],
)
def test_labels_are_shifted_where_they_stand_at_their_own_tokens(
    words: tuple[str, ...], kind: str, shifted: bool
) -> None:
    found = opened(*words, kind=kind)
    if kind == "other":
        raw = Prepared("other")[39]["labels"]
        assert np.array_equal(found.dataset.sample(39)["labels"][:-1], raw[1:]) is shifted
    else:
        assert shifts(found) is shifted
    said = [line for line in found.lines if line.startswith("labels: ")]
    assert len(said) == shifted
    if shifted and "data.labels=same" not in words:
        assert re.match(r"labels: in \d+ examined samples they equal input_ids", said[0])


class Repetitive:
    """Tokens that mostly equal the next ones: padded to the length, with labels at the padding too, or in runs."""

    def __init__(self, what: str, next_tokens: bool) -> None:
        self.kind, self.next_tokens = what, next_tokens

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        ids = np.random.default_rng(index).integers(1, VOCAB, TOKENS + 1)
        if self.kind == "padded":
            ids[2 + index % 3 :] = 0
        elif self.kind == "runs":
            ids = np.repeat(ids, 6)[: TOKENS + 1]
        return {"input_ids": ids[:-1], "labels": ids[1:] if self.next_tokens else ids[:-1].copy()}


@pytest.mark.parametrize("next_tokens", [False, True])
@pytest.mark.parametrize("kind", ["padded", "runs"])
@pytest.mark.parametrize("words", [GPT, GPT2])
def test_tokens_that_are_followed_by_themselves_tell_nothing(
    words: tuple[str, ...], kind: str, next_tokens: bool
) -> None:
    data = ["data._target_=prepared.Repetitive", f"data.what={kind}", f"data.next_tokens={next_tokens}"]
    found = open_source(load_config([*data, *words]))
    raw = Repetitive(kind, next_tokens)[7]["labels"]
    assert np.array_equal(found.dataset.sample(7)["labels"], raw if next_tokens else np.append(raw[1:], -100))
    assert any("they equal input_ids wherever they count" in line for line in found.lines) is not next_tokens


class Answers:
    """A prompt, padded on the left, and one token of an answer, the only one that counts."""

    def __init__(self, next_tokens: bool) -> None:
        self.next_tokens = next_tokens

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        ids = np.random.default_rng(index).integers(1, VOCAB, TOKENS + 1)
        ids[: index % 5] = 0
        labels = np.full(TOKENS, -100)
        labels[-1] = ids[TOKENS] if self.next_tokens else ids[TOKENS - 1]
        return {"input_ids": ids[:-1], "labels": labels}


@pytest.mark.parametrize("next_tokens", [False, True])
def test_the_last_labels_tell_where_no_others_count(next_tokens: bool) -> None:
    words = ["data._target_=prepared.Answers", f"data.next_tokens={next_tokens}", *GPT2]
    labels = open_source(load_config(words)).dataset.sample(7)["labels"]
    assert (labels != -100).nonzero().flatten().tolist() == [TOKENS - 1 if next_tokens else TOKENS - 2]


class Bits:
    """Their parity as the token behind them, or which of them have been more so far: equal to tokens by chance."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        bits = np.random.default_rng(index).integers(0, 2, TOKENS)
        if self.what == "majority":
            return {"input_ids": bits, "labels": (2 * np.cumsum(bits) > np.arange(TOKENS)).astype(np.int64)}
        labels = np.full(TOKENS, -100)
        labels[-1] = bits.sum() % 2 if self.what == "parity" else bits[-1]
        return {"input_ids": bits, "labels": labels}


@pytest.mark.parametrize("what", ["parity", "majority", "own"])
def test_labels_that_equal_tokens_by_chance_are_not_shifted(what: str) -> None:
    words = ["data._target_=prepared.Bits", f"data.what={what}", *GPT2, "model.config.vocab_size=2"]
    assert isinstance(open_source(load_config(words)).dataset, NextTokenLabels) == (what == "own")


def test_labels_of_other_data_for_evaluation_are_of_the_same_kind() -> None:
    words = [*GPT2, "data._target_=prepared.Prepared", "eval.every=1", "eval.data._target_=prepared.Prepared"]
    assert isinstance(open_source(load_config([*words, "eval.data.what=same"])).evaluation, NextTokenLabels)
    message = (
        "eval.data=target: its labels are the next tokens, .* data=target stand at their own tokens; nearest valid: "
        "eval.data.labels=shifted, if"
    )
    with pytest.raises(DataError, match=message):
        open_source(load_config([*words, "eval.data.what=shifted"]))
    with pytest.raises(DataError, match="eval.data=target: its labels stand at .*: eval.data.labels=same, if"):
        open_source(load_config([*words, "data.what=shifted", "eval.data.what=same"]))
    assert open_source(load_config([*words, "data.what=shifted", "eval.data.labels=same"])).eval_batches


def test_the_loss_is_that_of_transformers_itself() -> None:
    config = load_config(["data._target_=prepared.Prepared", *GPT2])
    found = open_source(config)
    model = make_model(config, found.dataset).eval()
    batch = load_batch(found.dataset, found.train, 0, 4)
    raw = [Prepared()[index] for index in found.train.indices(0, 4)]
    given = {name: torch.from_numpy(np.stack([row[name] for row in raw])) for name in ("input_ids", "labels")}
    with torch.no_grad():
        loss, count = model(**batch)
        theirs = model.model(**given).loss
    assert float(loss / count) == pytest.approx(float(theirs), rel=1e-6)


BERT = ("model=hf", "model.name=bert", "model.task=masked_lm", "model.config.hidden_size=16",
        "model.config.num_hidden_layers=1", "model.config.num_attention_heads=2", "model.config.intermediate_size=16",
        f"model.config.vocab_size={VOCAB + 2}", "global_batch=4")  # fmt: skip
MASK = VOCAB + 1


class Collated(Prepared):
    """As transformers' collator masks: most of the chosen tokens are the mask, some are others, some stay."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        ids = super().__getitem__(index)["input_ids"]
        rng = np.random.default_rng((index, 1))
        chosen = rng.random(TOKENS) < 0.4
        how = rng.random(TOKENS)
        shown = np.where(chosen & (how < 0.8), MASK, np.where(chosen & (how > 0.9), 1 + (ids + 7) % VOCAB, ids))
        return {"input_ids": shown, "labels": np.where(chosen, ids, -100)}


def test_labels_of_masked_tokens_are_predicted_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["prepared"], "Prepared", Collated)
    config = load_config(["data._target_=prepared.Prepared", *BERT])
    found = open_source(config)
    assert [line for line in found.lines if line.startswith("labels: they are other tokens than input_ids")]
    torch.manual_seed(3)
    model = make_model(config, found.dataset).eval()
    batch = load_batch(found.dataset, found.train, 0, 8)
    with torch.no_grad():
        loss, count = model(**batch)
        theirs = model.model(**batch).loss
    assert int(count) == int((batch["labels"] != -100).sum())
    assert float(loss / count) == pytest.approx(float(theirs), rel=1e-6)


@pytest.mark.parametrize("words", [(), ("data.labels=same",), ("data.labels=shifted",)])
def test_tokens_with_labels_of_their_own_are_masked_here(words: tuple[str, ...]) -> None:
    config = load_config(["data._target_=prepared.Prepared", *BERT, f"model.mask_token={MASK}", "eval.every=5", *words,
                          "eval.fraction=0.2"])  # fmt: skip
    found = open_source(config)
    assert [line for line in found.lines if line.startswith("labels: they are the tokens of input_ids, of which 15 %")]
    model = make_model(config, found.dataset)
    assert model.mask_token == MASK
    batch = load_batch(found.evaluation, found.held_out, 0, 2)
    assert torch.equal(batch["labels"], torch.where(batch["labels"] == -100, -100, batch["input_ids"]))


class Masking:
    """Masks tokens of samples that train; `both`: of held-out ones, too."""

    def __call__(self, sample: dict[str, torch.Tensor], rng: np.random.Generator) -> dict[str, torch.Tensor]:
        hit = torch.from_numpy(rng.random(len(sample["labels"])) < 0.5) & (sample["labels"] != -100)
        inputs = sample["input_ids"].masked_fill(hit, MASK)
        return {"input_ids": inputs, "labels": sample["labels"].masked_fill(~hit, -100)}


class MaskingBoth(Masking):
    def __call__(
        self, sample: dict[str, torch.Tensor], rng: np.random.Generator | None = None
    ) -> dict[str, torch.Tensor]:
        return super().__call__(sample, np.random.default_rng(int(sample["input_ids"].sum())) if rng is None else rng)


def test_held_out_samples_are_masked_as_those_that_train() -> None:
    words = ["data._target_=prepared.Prepared", *BERT, "eval.every=5", "eval.fraction=0.2"]
    masks = "data.transform._target_=tests.data.test_labels"
    with pytest.raises(DataError, match="labels of held-out samples are their input_ids, and those of samples that tr"):
        open_source(load_config([*words, f"{masks}.Masking"]))
    assert open_source(load_config([*words, f"{masks}.MaskingBoth"])).evaluation.masked
    assert open_source(load_config([*words[:-2], f"{masks}.Masking"])).dataset.masked


def test_labels_of_both_kinds_are_refused_when_they_come() -> None:
    with pytest.raises(DataError, match="eval.data=target: is masked already .* and data=target is to be masked here"):
        open_source(load_config(["data._target_=prepared.Prepared", *BERT, "eval.every=5",
                                 "eval.data._target_=tests.data.test_labels.Collated"]))  # fmt: skip
    found = opened(*BERT, kind="seldom")
    assert not found.dataset.masked
    with pytest.raises(DataError, match="the labels of sample 17 are other tokens than its input_ids"):
        found.dataset.batch(np.array([16, 17]))
    with pytest.raises(DataError, match="the labels of sample 17 are other tokens than its input_ids"):
        found.dataset.sample(17)


def test_columns_of_a_table_are_shifted_as_well(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [Prepared()[index] for index in range(40)]
    table = datasets.Dataset.from_dict({name: [row[name].tolist() for row in rows] for name in ("input_ids", "labels")})
    table.to_parquet(str(tmp_path / "rows.parquet"))
    words = ("data=hf", f"data.paths={tmp_path}/rows.parquet", "cache.enabled=false", *GPT2)
    assert shifts(open_source(load_config([*words, "data.fields=[input_ids,labels]"])))
    with pytest.raises(DataError, match="data.column=input_ids: some of its tokens .* as -100 in labels tells"):
        open_source(load_config([*words, "data.column=input_ids"]))
    table.remove_columns("labels").to_parquet(str(tmp_path / "rows.parquet"))
    stream = open_source(load_config([*words, "data.column=input_ids"]))
    sample = stream.dataset.sample(0)
    assert torch.equal(sample["input_ids"][1:], sample["labels"][:-1]) and int(sample["labels"][-1]) != -100
    with pytest.raises(DataError, match="data.labels=same: the labels of a column .* are the next tokens, made here"):
        open_source(load_config([*words, "data.column=input_ids", "data.labels=same"]))


def test_words_that_make_no_sense() -> None:
    with pytest.raises(DataError, match="data.labels=same: samples have no labels; they hold left, right, label"):
        found = ["data._target_=tests.data.test_labels.Halves", "data.labels=same", "model._target_=torch.nn.Identity"]
        open_source(load_config([*found, "global_batch=4"]))
    with pytest.raises(ConfigError, match="data.labels=smae: must be one of auto, shifted, same; nearest valid: same"):
        load_config(["data=hf", "data.paths=[x]", "data.labels=smae"])
    with pytest.raises(ConfigError, match="data.labels: unknown key for this data; nearest valid: data=hf"):
        load_config(["data=digits", "data.labels=same"])


class Halves:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, float]:
        return {"left": 1.0, "right": 2.0, "label": 3.0}


def test_a_class_may_have_an_argument_of_that_name() -> None:
    config = load_config(["data._target_=prepared.Prepared", "data.labels=labels.npy", *GPT2])
    assert (config.data.labels, config.data.options) == ("auto", {"labels": "labels.npy"})
