"""The data of a configuration, opened and split into training and held-out samples. All errors of data are raised here
or below, before a worker starts.

    open_source(config)   ->  Source(dataset, train order, evaluation, held-out order, eval batches, lines)
"""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elaswave_fx.config.keys import Config, DataConfig
from elaswave_fx.config.targets import completed, import_target, instantiate, takes_argument
from elaswave_fx.data import hf
from elaswave_fx.data.cached import cached_array, digest
from elaswave_fx.data.corpus import file_documents, first_table, matching_files, stdlib_documents
from elaswave_fx.data.dataset import Dataset, MapDataset, Sample, UserDataset
from elaswave_fx.data.digits import open_digits
from elaswave_fx.data.global_draws import seeded
from elaswave_fx.data.labels import NextTokenLabels, has_own_labels, with_labels_of_model
from elaswave_fx.data.order import HeldOutOrder, SampleOrder, Shuffle
from elaswave_fx.data.own_counters import refuse_counters
from elaswave_fx.data.split_files import splits_in
from elaswave_fx.data.synthetic import SyntheticTokens, synthetic_images
from elaswave_fx.data.token_files import open_token_files
from elaswave_fx.data.tokenizer import ByteTokenizer, Tokenizer, make_tokenizer
from elaswave_fx.data.tokens import ArrayTokens, TokenDataset, TokenStream
from elaswave_fx.data.transform import Transform, TransformedDataset, open_transform
from elaswave_fx.data.user_code import UserCode
from elaswave_fx.errors import ConfigError, DataError


@dataclass(frozen=True)
class Source:
    """The data of a run. Training reads `train` of `dataset`, evaluation the first `eval_batches` global batches of
    `held_out` from `evaluation`: the dataset in its form for evaluation, or another one. `lines`: for the user."""

    dataset: Dataset
    train: SampleOrder
    evaluation: Dataset
    held_out: HeldOutOrder
    eval_batches: int  # 0 without evaluation
    lines: tuple[str, ...]
    has_eval_data: bool = False
    """Whether `evaluation` is `eval.data`, opened separately."""


def open_source(config: Config, tokenizer: Tokenizer | None = None, code: UserCode | None = None) -> Source:
    """Open the data and split it; raises `DataError` if a batch needs more samples than there are. What the user's
    modules and constructors draw follows from the seed, so that all ranks have the same."""
    with seeded(config.seed):
        return _open_source(config, tokenizer, code)


def _open_source(config: Config, tokenizer: Tokenizer | None, code: UserCode | None) -> Source:
    dataset = open_data(config, tokenizer, code)
    split = config.eval if config.eval.every and config.eval.data is None else None
    total, batch = len(dataset), config.global_batch
    held = int(total * split.fraction) if split is not None else 0
    train = total - held
    if train < batch:
        lost = f" ({held} of {total} are held out, eval.fraction={config.eval.fraction})" if held else ""
        raise DataError(
            f"global_batch={batch}: data={config.data.kind} has {train} samples to train on{lost}; "
            f"{_largest_batch(train, config.parallel.granule)}"
        )
    if split is not None and held < batch:
        raise DataError(
            f"eval.fraction={split.fraction}: holds out {held} of {total} samples, fewer than "
            f"global_batch={batch}; {_smallest_fraction(total, batch)}"
        )
    shuffle = Shuffle(config.seed, total) if split is not None and split.split == "shuffled" else None
    evaluation, held_out = dataset.for_evaluation(), HeldOutOrder(train, held, shuffle)
    if config.eval.every and config.eval.data is not None:
        evaluation = open_evaluation(config, config.eval.data, dataset, code)
        held_out = HeldOutOrder(0, len(evaluation))
    batches = min(config.eval.batches, held_out.num_samples // batch) if config.eval.every else 0
    noted, notes = dataset.notes, evaluation.notes  # which samples, or whole columns, are examined for
    lines = (_split_line(config, train, held_out.num_samples, batches), *_length_line(config, dataset), *noted)
    if config.eval.every and config.eval.data is not None and config.data.transform and not config.eval.data.transform:
        lines = (*lines, "eval.data: data.transform is not applied to it; eval.data.transform would be")
    if config.data.kind in ("files", "memmap") and (splits := splits_in(config.data.paths)):
        lines = (*lines, f"data: reads files of several splits ({', '.join(splits)}), as their names tell; name those "
                 "that train in data.paths, and others in eval.data")  # fmt: skip
    if config.data.kind == "files" and (table := first_table(config.data.paths)):
        lines = (*lines, f"data: {table} is trained on as it is written, names and quotes included; data=hf reads its "
                 "columns")  # fmt: skip
    if config.data.kind == "hf" and (line := hf.split_line(config.data)):
        lines = (*lines, line)
    if config.eval.data is not None and config.eval.data.kind == "hf" and (line := hf.split_line(config.eval.data)):
        lines = (*lines, f"eval.{line}")
    if config.eval.every and config.eval.data is not None and _read_by_both(config.data, config.eval.data):
        lines = (*lines, "eval.data: reads what data reads, so that samples that are evaluated are trained on")
    if notes != noted:
        lines = (*lines, *(f"eval.data: {note}" for note in notes))
    order, is_other = SampleOrder(config.seed, train, shuffle), bool(config.eval.every) and config.eval.data is not None
    return Source(dataset, order, evaluation, held_out, batches, lines, is_other)


def _read_by_both(data: DataConfig, other: DataConfig) -> bool:
    """Whether both read some of the same samples, as far as their keys and files show."""
    if data.paths and other.paths:
        return not _files(data).isdisjoint(_files(other))
    return (data.kind, data.name, data.options) == (other.kind, other.name, other.options)


def _files(data: DataConfig) -> set[str]:
    """The files to read; for save_to_disk, its folder and the split."""
    if data.kind == "hf":
        return hf.files_read(data)
    return {os.path.realpath(path) for path in matching_files(data.paths)}


def _split_line(config: Config, train: int, evaluated: int, batches: int) -> str:
    """The numbers of training and held-out samples."""
    evaluation = config.eval
    if not evaluation.every:
        return f"data: all {train:,} samples train, none is held out (eval.every=0)"
    used = f"every {evaluation.every} steps the first {batches * config.global_batch:,} of them are evaluated"
    if evaluation.data is not None:
        return f"data: all {train:,} samples train; eval.data={evaluation.data.kind} has {evaluated:,}, and {used}"
    which = "the last ones" if evaluation.split == "last" else "drawn by the seed"
    return (
        f"data: {train:,} samples train, {evaluated:,} are held out ({which}, eval.fraction={evaluation.fraction}), "
        f"and {used}"
    )


def _length_line(config: Config, dataset: Dataset) -> tuple[str, ...]:
    """A note that samples differ in length from `seq_len`, where rows are samples."""
    ids = dataset.sample(0).get("input_ids")
    if ids is None or ids.dim() != 1 or len(ids) == config.seq_len:
        return ()
    return (f"data: samples have {len(ids)} tokens, as the data has them; seq_len={config.seq_len} cuts none of them",)


def open_evaluation(config: Config, data: DataConfig, dataset: Dataset, code: UserCode | None) -> Dataset:
    """The data of `eval.data` in the form for evaluation. Raises `DataError` if the model that trains on `dataset`
    could not read it."""
    within = code.within(data.deadline_s) if code is not None else None
    if data.kind == "hf" and data.fields and data.vocab_size is None:
        data = dataclasses.replace(data, vocab_size=dataset.vocab_size)  # properties of the model
    try:
        opened = open_data(dataclasses.replace(config, data=data), dataset.tokenizer, within).for_evaluation()
    except ConfigError as error:
        words = str(error)
        raise type(error)(f"eval.{words}" if words.startswith("data") else f"eval.data: {words}") from error
    kinds = [each.tokenizer.kind if each.tokenizer is not None else None for each in (dataset, opened)]
    if kinds[0] != kinds[1]:
        words = [f"text (tokenizer={kind})" if kind is not None else "no text" for kind in kinds]
        raise DataError(f"eval.data={data.kind}: is {words[1]}, and data={config.data.kind} is {words[0]}")
    train, held_out = _form(dataset.sample(0)), _form(opened.sample(0))
    for field in sorted({*train, *held_out}):
        if train.get(field) != held_out.get(field):
            cure = "; nearest valid: eval.data.transform as data.transform" if config.data.transform else ""
            raise DataError(
                f"eval.data={data.kind}: {field} is {held_out.get(field, 'missing')}, and "
                f"{train.get(field, 'missing')} in the samples that train{'' if data.transform else cure}"
            )
    for field, names in dataset.class_names.items():
        if opened.class_names.get(field, names) != names:
            raise DataError(
                f"eval.data={data.kind}: {field} has other classes ({', '.join(opened.class_names[field])}) than the "
                f"samples that train have ({', '.join(names)}), or in another order"
            )
    if opened.masked != dataset.masked:
        words = ["masked already (its labels are other tokens than input_ids)" if each.masked else "to be masked here"
                 for each in (opened, dataset)]  # fmt: skip
        raise DataError(f"eval.data={data.kind}: is {words[0]}, and data={config.data.kind} is {words[1]}")
    shifted = [isinstance(each, NextTokenLabels) for each in (dataset, opened)]
    if shifted[0] != shifted[1] and data.labels == "auto" and has_own_labels(data) and has_own_labels(config.data):
        words = ["stand at their own tokens" if each else "are the next tokens" for each in shifted]
        raise DataError(
            f"eval.data={data.kind}: its labels {words[1]}, and those of data={config.data.kind} {words[0]}; nearest "
            f"valid: eval.data.labels={'same' if shifted[1] else 'shifted'}, if that is so"
        )
    if len(opened) < config.global_batch:
        raise DataError(
            f"eval.data={data.kind}: has {len(opened)} samples, fewer than global_batch={config.global_batch}; give "
            "more of them"
        )
    return opened


def check_evaluation(source: Source) -> None:
    """Refuse evaluation data with tokens or classes that training does not know. Raises `DataError`."""
    for key, words in (("vocab_size", "tokens"), ("classes", "classes")):
        known, evaluated = getattr(source.dataset, key), getattr(source.evaluation, key)
        if known is not None and evaluated is not None and evaluated > known:
            raise DataError(
                f"eval.data: has {evaluated} {words}, and the data that trains {known}; give the data that trains a "
                f"vocabulary for both, such as data.vocab_size={evaluated}"
                if key == "vocab_size"
                else f"eval.data: has {evaluated} {words}, and the data that trains {known}"
            )


def open_data(config: Config, tokenizer: Tokenizer | None = None, code: UserCode | None = None) -> Dataset:
    """The dataset that `config.data` names. Text goes through `tokenizer`, by default the configured one, trained on
    that text. `code` runs user code; by default a runner whose errors are the user's to fix. Raises `DataError` for
    data that is missing, empty, too short or of the wrong kind."""
    code = code or UserCode(config.data.deadline_s, DataError)
    return with_labels_of_model(config, _open(config, tokenizer, code))


def _open(config: Config, tokenizer: Tokenizer | None, code: UserCode) -> Dataset:
    """The dataset with its own labels."""
    data = config.data
    for name in data.fields:
        if data.fields.count(name) > 1:
            raise DataError(f"data.fields=[{','.join(data.fields)}]: names {name} more than once")
    if data.transform is None:
        return _untransformed(config, tokenizer, code)
    transform = open_transform(data.transform, config.seed)
    if data.kind == "target" and not transform.draws and takes_argument(data.name, "transform"):
        return _user_dataset(config, {**data.spec, "transform": completed(data.transform)}, code)
    return _transformed(config, _untransformed(config, tokenizer, code), transform, code)


def _untransformed(config: Config, tokenizer: Tokenizer | None, code: UserCode) -> Dataset:
    if config.data.kind == "target":
        return _user_dataset(config, config.data.spec, code)
    return _own_dataset(config, tokenizer)


def _own_dataset(config: Config, tokenizer: Tokenizer | None) -> Dataset:
    data, cache = config.data, config.cache.path
    if data.kind == "stdlib":
        return _text_dataset(config, stdlib_documents(data.limit_mb), tokenizer)
    if data.kind == "files":
        return _text_dataset(config, file_documents(data.paths, data.limit_mb), tokenizer)
    if data.kind == "memmap":
        return _token_dataset(config, open_token_files(data.paths, data.dtype, data.vocab_size))
    if data.kind == "hf":
        return _hf_dataset(config, cache, tokenizer)
    if data.kind == "digits":
        return open_digits(data.layout, cache)
    if data.layout == "tokens":
        return SyntheticTokens(data.samples, config.seq_len, data.vocab_size or config.tokenizer.vocab_size)
    return synthetic_images(data.samples, data.classes, data.layout)


def _text_dataset(config: Config, documents: list[bytes], tokenizer: Tokenizer | None) -> TokenDataset:
    cache = config.cache.path
    tokenizer = tokenizer or make_tokenizer(config.tokenizer, documents, cache)
    chosen = tokenizer
    if isinstance(chosen, ByteTokenizer):
        tokens = chosen.encode(documents)  # joining bytes is faster than a lookup in the cache
    else:
        key = digest(chosen.key, *documents)
        tokens = cached_array(cache and cache / "tokens", "tokens", key, lambda: chosen.encode(documents))
    return TokenDataset(ArrayTokens(tokens), config.seq_len, chosen.vocab_size, f"data={config.data.kind}", chosen)


def _hf_dataset(config: Config, cache: Path | None, tokenizer: Tokenizer | None) -> Dataset:
    table = hf.read_table(config.data, cache)
    if config.data.fields:
        columns = hf.ColumnsDataset(table, config.data.fields, config.data.vocab_size)
        if config.data.transform is None:  # which may pad them
            columns.refuse_ragged()
        return columns
    documents, tokens = hf.read_column(table, hf.choose_column(config.data, table.column_names))
    if documents is not None and config.data.vocab_size is not None:
        raise DataError(
            f"data.vocab_size={config.data.vocab_size}: is of token ids, and the column holds text, whose tokens "
            "follow from tokenizer; leave it out"
        )
    if documents is not None:
        return _text_dataset(config, documents, tokenizer)
    assert tokens is not None
    return _token_dataset(config, ArrayTokens(tokens))


def _token_dataset(config: Config, stream: TokenStream) -> TokenDataset:
    """A dataset of ids that were tokenized elsewhere."""
    dataset = TokenDataset(stream, config.seq_len, config.data.vocab_size, f"data={config.data.kind}")
    dataset.refuse_foreign()
    return dataset


def _user_dataset(config: Config, spec: Mapping[str, object], code: UserCode) -> Dataset:
    """The user's dataset. Wrong fields are refused here, not by a worker."""
    name = config.data.name

    def make() -> Any:
        import_target("data", spec)
        with seeded(config.seed):  # random_split, for example, then gives every rank the same parts
            return instantiate("data", spec)

    made = code.run(make)
    dataset = UserDataset(
        MapDataset(made, config.data.fields, name, code), code, f"data._target_={name}",
        "__getitem__(self, index, key), drawing from np.random.default_rng(key): the key is another one whenever the "
        "sample comes; or data.transform, with an argument rng to draw from; or a copy, where rows change in place",
        owner=made,
    )  # fmt: skip
    if len(dataset) == 0:
        raise DataError(f"data._target_={name}: is empty")
    _refuse_unsteady(dataset)
    refuse_counters(dataset.sample, len(dataset), made, dataset.place, dataset.cure)
    return dataset


def _transformed(config: Config, dataset: Dataset, transform: Transform, code: UserCode) -> Dataset:
    transformed = UserDataset(
        TransformedDataset(dataset, transform, code), code, transform.name,
        "an argument rng of its call, a numpy Generator to draw from: it is another one whenever the sample comes",
        owner=(transform.call, dataset.owner if isinstance(dataset, UserDataset) else None),
    )  # fmt: skip
    _refuse_unsteady(transformed)
    refuse_counters(transformed.sample, len(transformed), transform.call, transformed.place, transformed.cure)
    if config.eval.every:
        _refuse_unsteady(transformed.for_evaluation())
        _refuse_other_held_out(transformed, transform.name)
    return transformed


def _refuse_unsteady(dataset: UserDataset) -> None:
    """Refuse samples that differ, or may differ, between reads: a replayed step must see the same samples."""
    count = len(dataset)
    for index in sorted({0, count // 2, count - 1}):
        dataset.refuse_change(index, dataset.sample(index), dataset.sample(index))
        dataset.refuse_draws(index)


def _refuse_other_held_out(dataset: Dataset, place: str) -> None:
    """Refuse held-out samples of another form: one program computes with both."""
    last = len(dataset) - 1
    train, held_out = (_form(each.sample(last)) for each in (dataset, dataset.for_evaluation()))
    for field in sorted({*train, *held_out}):
        if train.get(field) != held_out.get(field):
            raise DataError(
                f"{place}: {field} is {train.get(field, 'missing')} in samples that train, and "
                f"{held_out.get(field, 'missing')} in held-out ones; a transform with an argument rng is called for "
                "the former only, one with rng=None for both, without a generator for the latter"
            )


def _form(sample: Sample) -> dict[str, str]:
    return {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in sample.items()}


def _largest_batch(samples: int, granule: int) -> str:
    largest = samples - samples % granule
    return f"nearest valid: global_batch={largest}" if largest else "give more data"


def _smallest_fraction(total: int, batch: int) -> str:
    """The smallest fraction that holds out one batch, rounded up to three digits, if it leaves one to train on."""
    fraction = -(-1000 * batch // total) / 1000
    if fraction < 1 and total - int(total * fraction) >= batch:
        return f"nearest valid: eval.fraction={fraction}"
    return "nearest valid: eval.every=0"
