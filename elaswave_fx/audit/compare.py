"""Two runs side by side: the first step in which they differ, in what, and in which tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from elaswave_fx.audit.finding import Finding, holds, unchecked, wrong
from elaswave_fx.audit.record import Line, Record, Summary, sum_of_keys
from elaswave_fx.checkpoint.manifest import leaves, plain_config
from elaswave_fx.config.keys import Config
from elaswave_fx.devices.fingerprint import difference
from elaswave_fx.program.artifact import Artifact

_MAY_DIFFER = (
    "parallel.dp", "parallel.pp", "parallel.ranks_per_host", "parallel.micro_batch", "copies.count", "lab",
    "checkpoint", "resume", "faults", "launch", "recovery", "cache", "steps", "planner",
    "data.deadline_s", "optimizer.max_skipped", "passes.dump",
)  # fmt: skip
"""Keys that cost an exact run no bit. (`steps` does where the learning rate follows from it; the ledger shows that.)"""

_MOST_TENSORS = 4


def compare(record: Record, other: Record, artifact: Artifact | None) -> Iterator[Finding]:
    """Findings of what both have. `artifact`: for the names of buckets and their tensors."""
    yield from _recipes(record, other)
    theirs = {line.step: line for line in other.lines}
    common = [(line, theirs[line.step]) for line in record.lines if line.step in theirs]
    if not common:
        yield unchecked("compared", f"{record.folder} and {other.folder} have no step in common")
        return
    for own, their in common:
        found = _first_difference(own, their, artifact)
        if found is not None:
            yield wrong("compared", f"step {own.step} (lines {own.number} and {their.number}): {found}")
            return
    words = f"steps {common[0][0].step} to {common[-1][0].step} have equal samples, keys, counts, losses, norms, states"
    if record.lines[-1].step == other.lines[-1].step and record.summary is not None and other.summary is not None:
        found = _differing_ends(record.summary, other.summary, artifact)
        if found is not None:
            yield wrong("compared", f"after the last step, {record.lines[-1].step}: {found}")
            return
        words += ", and so has the end"
    yield holds("compared", words)


def _recipes(record: Record, other: Record) -> Iterator[Finding]:
    """Why equal bits are not to be expected, if they are not."""
    if not (record.exact and other.exact):
        which = " and ".join(str(each.folder) for each in (record, other) if not each.exact)
        yield unchecked("recipes", f"{which}: without exact=true, layouts and losses of ranks change bits")
        return
    here, there = (_keys_of(each.last.config) for each in (record, other))
    differing = [
        f"{key}={here.get(key)} against {there.get(key)}"
        for key in sorted({*here, *there})
        if here.get(key) != there.get(key)
        and not any(key == each or key.startswith(f"{each}.") for each in _MAY_DIFFER)
    ]
    machine = difference(record.last.fingerprint, other.last.fingerprint)
    if differing:
        yield unchecked("recipes", f"they are of other recipes: {', '.join(differing)}")
    elif machine is not None:
        yield unchecked("recipes", f"they are of other machines: {machine}")
    else:
        yield holds("recipes", "their keys differ in nothing that changes bits")


def _keys_of(config: Config) -> dict[str, object]:
    """Dotted key -> value; of the evaluation only what takes samples from training."""
    plain = plain_config(config)
    evaluation = config.eval
    kept = {"fraction": evaluation.fraction, "split": evaluation.split}
    return leaves({**plain, "eval": kept if evaluation.every and evaluation.data is None else {}})


def _first_difference(own: Line, their: Line, artifact: Artifact | None) -> str | None:
    """The state comes first: it was there when the step began."""
    bucket = _differing_bucket(own.buckets, their.buckets, artifact)
    if bucket is not None:
        return f"it began from other states: {bucket} is another one"
    values = {
        "other samples were fed": (own.content_hash, their.content_hash),
        "random draws had other keys": (sum_of_keys(own), sum_of_keys(their)),
        "other targets counted": (own.count, their.count),
        "the loss is another one": (own.loss, their.loss),
        "the gradient is another one": (own.squares, their.squares),
    }
    return next((f"{words} ({a} and {b})" for words, (a, b) in values.items() if a != b), None)


def _differing_ends(own: Summary, their: Summary, artifact: Artifact | None) -> str | None:
    bucket = _differing_bucket(own.buckets or {}, their.buckets or {}, artifact)
    if bucket is not None:
        return f"{bucket} is another one"
    return "the models are other ones (params_digest)" if own.params_digest != their.params_digest else None


def _differing_bucket(own: Mapping[str, str], their: Mapping[str, str], artifact: Artifact | None) -> str | None:
    for number in sorted({*own, *their}, key=int):
        if own.get(number) != their.get(number):
            return bucket_name(int(number), artifact)
    return None


def bucket_name(number: int, artifact: Artifact | None) -> str:
    """A bucket with its tensors, in words."""
    if artifact is None or not number < len(artifact.buckets):
        return f"bucket {number}"
    bucket = artifact.buckets[number]
    names = [each.name for each in (*bucket.params, *bucket.buffers)]
    more = f" and {len(names) - _MOST_TENSORS} more" if len(names) > _MOST_TENSORS else ""
    return f"bucket {number}, {bucket.name} ({', '.join(names[:_MOST_TENSORS])}{more})"
