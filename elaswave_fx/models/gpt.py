"""A GPT of our own: the model of the demo and of most tests.

Pre-norm blocks as in GPT-2 (Radford et al. 2019): `x + attention(norm(x))`, then `x + mlp(norm(x))`, learned positions,
one fused projection for queries, keys and values.

Input: `input_ids` and `labels`, both int64 (batch, tokens); `labels` are already shifted (the next token of each
position), -100 is ignored. Output: `(loss sum, count)`, see `losses.py`.

    GPT(vocab_size=256, seq_len=64, layers=4, width=128, heads=4)(input_ids, labels) -> (tensor(90701.2), tensor(16384))
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elaswave_fx.errors import ConfigError
from elaswave_fx.models.losses import token_loss_sum

_INITIAL_STD = 0.02
_RESIDUAL_PROJECTIONS = ("attention.out.weight", "mlp.2.weight")


class Attention(nn.Module):
    """Causal self-attention; (batch, tokens, width) to the same shape."""

    def __init__(self, width: int, heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        split = (batch, tokens, self.heads, width // self.heads)
        query, key, value = (part.view(split).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    """One pre-norm transformer block; (batch, tokens, width) to the same shape."""

    def __init__(self, width: int, heads: int, dropout: float, attention_dropout: float, bias: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=bias)
        self.attention = Attention(width, heads, attention_dropout, bias)
        self.mlp_norm = nn.LayerNorm(width, bias=bias)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=bias),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width, bias=bias),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """A decoder-only language model.

    `dropout` applies to the embedding and to the output of each half block, `attention_dropout` to the attention
    weights. `tied` shares the token embedding with the head. Raises `ConfigError` if `heads` does not divide `width`.
    """

    def __init__(
        self,
        vocab_size: int,
        seq_len: int,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        tied: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if width % heads != 0:
            raise ConfigError(f"model.heads={heads} does not divide model.width={width}; each head gets width / heads")
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.position_embedding = nn.Embedding(seq_len, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, attention_dropout, bias) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=bias)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.apply(_initialize)
        for name, parameter in self.named_parameters():
            if name.endswith(_RESIDUAL_PROJECTIONS):
                # The variance of the residual stream grows with each of its 2 * layers additions.
                nn.init.normal_(parameter, std=_INITIAL_STD / (2 * layers) ** 0.5)
        if tied:
            self.head.weight = self.token_embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, tokens) int64 each, to (loss sum fp32, count int64), both 0-dim."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.dropout(self.token_embedding(input_ids) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        return token_loss_sum(self.head(self.norm(x)), labels)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=_INITIAL_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
