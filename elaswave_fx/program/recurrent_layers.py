"""Recurrent modules called layer by layer during a capture, with the dropout between their layers.

    nn.LSTM(…, num_layers=2, dropout=0.5)  ->  lstm of layer 0, aten.dropout, lstm of layer 1

torch decomposes the operator of all layers into steps of a sequence, and loses the dropout between layers
(torch/_decomp/decompositions.py, `_rnn_helper`, of 2.13). Draws have the operator's shape: `[time, batch, width]`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import _VF, Tensor

_NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@contextlib.contextmanager
def layers_apart() -> Iterator[None]:
    """Call recurrent operators with dropout between layers once for each layer."""
    with contextlib.ExitStack() as stack:
        for name in _NAMES:
            stack.enter_context(mock.patch.object(_VF, name, _apart(getattr(_VF, name))))
        yield


def _apart(operator: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        # For packed sequences, the second argument is the sizes of the batches.
        if isinstance(args[3], bool) and args[4] > 1 and args[5] > 0.0 and args[6]:
            return _layer_by_layer(operator, *args)
        return operator(*args)

    return call


def _layer_by_layer(
    operator: Callable[..., Any], x: Tensor, hidden: Tensor | Sequence[Tensor], weights: Sequence[Tensor],
    has_biases: bool, layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The operator's outputs: the values of the last layer, then the last states of all layers."""
    of_layer, directions = len(weights) // layers, 2 if bidirectional else 1
    x = x.transpose(0, 1) if batch_first else x
    last: list[Sequence[Tensor]] = []
    for layer in range(layers):
        first = layer * directions
        own = _part(hidden, first, directions)
        part = weights[layer * of_layer : (layer + 1) * of_layer]
        x, *states = operator(x, own, part, has_biases, 1, 0.0, train, bidirectional, False)
        last.append(states)
        if layer < layers - 1:
            x = torch.dropout(x, dropout, True)
    x = x.transpose(0, 1) if batch_first else x
    return x, *(torch.cat(each) for each in zip(*last, strict=True))


def _part(hidden: Tensor | Sequence[Tensor], first: int, count: int) -> Any:
    if isinstance(hidden, Tensor):
        return hidden.narrow(0, first, count)
    return tuple(each.narrow(0, first, count) for each in hidden)
