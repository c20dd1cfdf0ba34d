"""Recurrent modules called layer by layer compute and draw what torch's operator of all layers does."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from elaswave_fx.program.recurrent_layers import layers_apart

WIDTH = 6


@pytest.mark.parametrize(
    "module",
    [
        nn.LSTM(WIDTH, WIDTH, 3, dropout=0.4),
        nn.LSTM(WIDTH, WIDTH, 2, dropout=0.4, batch_first=True, bidirectional=True, bias=False),
        nn.LSTM(WIDTH, WIDTH, 2, dropout=0.4, proj_size=3, bidirectional=True),
        nn.GRU(WIDTH, WIDTH, 2, dropout=0.4, batch_first=True),
        nn.RNN(WIDTH, WIDTH, 2, dropout=0.4),
        nn.RNN(WIDTH, WIDTH, 2, dropout=0.4, nonlinearity="relu", bidirectional=True),
    ],
    ids=repr,
)
def test_a_layer_at_a_time_is_all_layers(module: nn.RNNBase) -> None:
    for shape in ((4, 3, WIDTH), (4, WIDTH)):  # without a batch, too
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(5))
        torch.manual_seed(3)
        whole = module(x)
        torch.manual_seed(3)
        with layers_apart():
            apart = module(x)
        torch.testing.assert_close(apart, whole)
        torch.manual_seed(4)
        assert not torch.allclose(module(x)[0], whole[0]), "values are dropped"


def test_packed_sequences_and_evaluation_stay_as_they_are() -> None:
    module = nn.GRU(WIDTH, WIDTH, 2, dropout=0.4)
    packed = pack_padded_sequence(torch.randn(4, 3, WIDTH), torch.tensor([4, 2, 1]))
    torch.manual_seed(3)
    whole = module(packed)[0].data
    torch.manual_seed(3)
    with layers_apart():
        assert torch.equal(module(packed)[0].data, whole)
        module.eval()
        assert torch.equal(module(packed)[0].data, module(packed)[0].data)
