"""Samples: their sources, their order, and the batches of a rank.

A sample is a pure function of (seed, data epoch, index): there is no cursor to save or lose.

    source = open_source(load_config(["recipe=gpt_stdlib"]))
    load_batch(source.dataset, source.train, first=0, count=16)["input_ids"].shape   ->  (16, 128)
"""

from elaswave_fx.data.batches import Prefetcher, load_batch, load_ranges
from elaswave_fx.data.dataset import Batch, Dataset, Sample
from elaswave_fx.data.order import HeldOutOrder, Order, SampleOrder
from elaswave_fx.data.source import Source, check_evaluation, open_data, open_source
from elaswave_fx.data.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer
from elaswave_fx.data.user_code import UserCode

__all__ = [
    "Batch",
    "BpeTokenizer",
    "ByteTokenizer",
    "Dataset",
    "HeldOutOrder",
    "Order",
    "Prefetcher",
    "Sample",
    "SampleOrder",
    "Source",
    "Tokenizer",
    "UserCode",
    "check_evaluation",
    "load_batch",
    "load_ranges",
    "open_data",
    "open_source",
]
