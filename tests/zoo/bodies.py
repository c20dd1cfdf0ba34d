"""Modules that people put between two layers, for kinds.py: each takes and gives one tensor, samples first."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16


class Do(nn.Module):
    """A function of a tensor as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


STEPS = 4
"""Number of steps of recurrent layers."""


class First(nn.Module):
    """The first result of a recurrent layer. Every step of it is captured: a few are enough."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x[:, :STEPS])[0]


# --- Of features


class Maxout(nn.Module):
    """The largest of some linear pieces (Goodfellow et al. 2013)."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.pieces(x).unflatten(-1, (3, WIDTH)).amax(-2)


class Highway(nn.Module):
    """A gate between a layer and its input (Srivastava et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.lerp(x, self.layer(x).relu(), self.gate(x).sigmoid())


class LowRank(nn.Module):
    """A frozen layer and a trained update of rank 2 (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Hyper(nn.Module):
    """A network whose weights another one makes for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        w = self.weights(x).unflatten(-1, (4, WIDTH))
        return torch.einsum("bkw,bk->bw", w, torch.einsum("bkw,bw->bk", w, x).tanh())


class Ode(nn.Module):
    """A layer that is followed in small steps, as a differential equation."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            middle = x + 0.05 * self.field(x).tanh()
            x = x + 0.1 * self.field(middle).tanh()
        return x


class Kernels(nn.Module):
    """Distances to learned centres (radial basis functions)."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(-0.1 * torch.cdist(x, self.centres).square())


class Codebook(nn.Module):
    """The nearest of learned codes, its gradient passed through (van den Oord et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        nearest = (x[:, None] - self.codes.weight).square().sum(-1).argmin(-1)
        code = self.codes(nearest)
        return x + (code - x).detach() + 0.1 * (code - x.detach())


class Experts(nn.Module):
    """Each sample goes to its best of four layers, all of which run (dense routing)."""

    def __init__(self, top: int = 1) -> None:
        super().__init__()
        self.router, self.top = nn.Linear(WIDTH, 4), top
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.top, dim=-1)
        gates = torch.zeros_like(self.router(x)).scatter(-1, chosen, weights)
        return torch.stack([each(x) for each in self.experts], -1).mul(gates[:, None]).sum(-1)


class Solved(nn.Module):
    """The solution of a linear system per sample; `checked`: torch raises where there is none."""

    def __init__(self, checked: bool = False) -> None:
        super().__init__()
        self.matrix, self.checked = nn.Linear(WIDTH, 16), checked

    def forward(self, x: Tensor) -> Tensor:
        a = self.matrix(x).unflatten(-1, (4, 4))
        system = a @ a.mT + torch.eye(4)
        x = x.unflatten(-1, (4, 4))
        solved = torch.linalg.solve(system, x) if self.checked else torch.linalg.solve_ex(system, x)[0]
        return solved.flatten(1) + torch.logdet(system)[:, None]


class Complex(nn.Module):
    """A filter of frequencies, with a complex parameter, or two real ones in its place."""

    def __init__(self, pairs: bool = True) -> None:
        super().__init__()
        filter = torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat)
        self.filter, self.pairs = nn.Parameter(torch.view_as_real(filter) if pairs else filter), pairs

    def forward(self, x: Tensor) -> Tensor:
        filter = torch.view_as_complex(self.filter) if self.pairs else self.filter
        return torch.fft.irfft(torch.fft.rfft(x) * filter, n=WIDTH)


class Modes(nn.Module):
    """The lowest frequencies of a Fourier neural operator, written into zeros; the first one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft(x)
        kept = torch.zeros_like(modes)
        kept[..., :3] = modes[..., :3] * torch.view_as_complex(self.weight)
        kept[..., 0] = torch.complex(modes[..., 0].real, modes[..., 1].imag).conj()
        return torch.fft.irfft(kept, n=WIDTH)


class Neighbours(nn.Module):
    """Sums over the neighbours in a fixed graph, kept as a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(WIDTH).roll(1, 0).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.adjacency, x.mT).mT


class Filled(nn.Module):
    """Halves that change places in memory which holds nothing before."""

    def forward(self, x: Tensor) -> Tensor:
        swapped = torch.empty_like(x)
        swapped[:, : WIDTH // 2], swapped[:, WIDTH // 2 :] = x[:, WIDTH // 2 :], x[:, : WIDTH // 2]
        return swapped


class AdaptiveSoftmax(nn.Module):
    """Logarithms of probabilities of classes, the frequent ones apart."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, WIDTH, [4, 8])

    def forward(self, x: Tensor) -> Tensor:
        return self.softmax.log_prob(x)


class Capsules(nn.Module):
    """Routing by agreement (Sabour et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.votes = nn.Parameter(0.3 * torch.randn(4, 4, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.einsum("bid,ijde->bije", x.unflatten(-1, (4, 4)), self.votes)
        logits = torch.zeros(votes.shape[:3])
        for _ in range(2):
            out = torch.einsum("bij,bije->bje", logits.softmax(-1), votes)
            out = out / (1 + out.square().sum(-1, keepdim=True))
            logits = logits + torch.einsum("bije,bje->bij", votes, out)
        return out.flatten(1)


class Keyed(nn.Module):
    """Layers in a dictionary whose keys are words of Python and of torch.fx, and not ASCII."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("lambda", "code", "größe")})
        self.graph = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = x + layer(x).tanh() * self.graph
        return x


class OwnGenerator(nn.Module):
    """Draws from a generator that a module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=self.generator)


class Turned(nn.Module):
    """Python's complex numbers among tensors that are real and complex."""

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.fft.fft(x) * (0.6 + 0.8j) - 1j * x
        return turned.real + torch.exp(0.5j * x).imag + (x + 2j).abs()


class Kronecker(nn.Module):
    """A product of two tensors that takes the batch for a dimension like another."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.randn(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.kron(x, self.factor).reshape(len(x), 2, WIDTH, 2).sum((1, 3))


Energy = Callable[[Tensor], Tensor]


class Forces(nn.Module):
    """Derivatives of an energy with respect to its input, as force fields and equation solvers have them."""

    def __init__(self, forces: Callable[[Energy, Tensor], Tensor], dropout: float = 0.0) -> None:
        super().__init__()
        self.forces = forces
        self.energy = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.Dropout(dropout) if dropout else nn.Identity(),
            nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x - self.forces(lambda at: self.energy(at).sum(), x)


def by_engine(energy: Energy, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        return torch.autograd.grad(energy(x), x, create_graph=True)[0]


def as_constants(energy: Energy, x: Tensor) -> Tensor:
    """Nothing goes back through what was asked for without a graph, nor through what is detached."""
    at = x.detach().requires_grad_()
    return torch.autograd.grad(energy(at), at)[0] * x.sin() + x.cos().detach() * x


def with_no_grad(energy: Energy, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.sin()
    return scale * by_engine(energy, x)


def masked(energy: Energy, x: Tensor) -> Tensor:
    return by_engine(lambda at: energy(at * (torch.rand_like(at) > 0.3) / 0.7), x)


def laplacian(energy: Energy, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda at: torch.func.jacrev(torch.func.jacrev(energy))(at).diagonal())(x)


def of_samples(energy: Energy, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda at: 0.5 * energy(at) / 3))(x)


def hessian(energy: Energy, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.hessian(energy))(x).sum(1)


def along(energy: Energy, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda at: torch.func.jvp(energy, (at,), (torch.ones_like(at),))[1])(x)[:, None]


def backwards(energy: Energy, x: Tensor) -> Tensor:
    at = x.detach().requires_grad_()
    energy(at).backward()
    assert at.grad is not None
    return at.grad


class Checkpointed(nn.Module):
    """Activations that are made again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = nn.Linear(WIDTH, WIDTH), reentrant

    def forward(self, x: Tensor) -> Tensor:
        made = checkpoint(lambda h: self.layer(h).tanh(), x, use_reentrant=self.reentrant)
        assert isinstance(made, Tensor)
        return made


class Swish(torch.autograd.Function):
    """x * sigmoid(x) with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = x.sigmoid()
        return grads[0] * (gate + x * gate * (1 - gate))


# --- Of sequences


class Attention(nn.Module):
    """Attention over a sequence; `how` says what is added to it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.qkv, self.out, self.how = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), how
        self.bias = nn.Parameter(torch.zeros(4, 31))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        places = torch.arange(x.shape[1])
        if self.how == "causal":
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.how == "relative":
            bias = self.bias[:, places[:, None] - places + 15]
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        elif self.how == "linear":
            q, k = F.elu(q) + 1, F.elu(k) + 1
            mixed = q @ (k.mT @ v) / (q * k.sum(-2, keepdim=True)).sum(-1, keepdim=True)
        else:
            angles = places[:, None] * 0.5 ** torch.arange(2)
            q, k = (self._rotated(each, angles) for each in (q, k))
            mixed = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(1, 2).flatten(2))

    @staticmethod
    def _rotated(x: Tensor, angles: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)


class Encoder(nn.Module):
    """torch's own encoder, with the mask that torch makes."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x, mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]))


class Decoder(nn.Module):
    """torch's own decoder, over a memory of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x.flip(1))


class Cells(nn.Module):
    """A cell called step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, states = torch.zeros(len(x), WIDTH), []
        for at in range(STEPS):
            state = self.cell(x[:, at], state)
            states.append(state)
        return torch.stack(states, 1)


class StateSpace(nn.Module):
    """A diagonal state space model, by cumulative sums of logarithms."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.gate = nn.Parameter(torch.zeros(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        log_a = -F.softplus(self.decay) * torch.ones_like(x)
        weights = log_a.cumsum(1)
        return torch.exp(weights) * torch.cumsum(torch.exp(-weights) * self.gate(x), 1)


class Packed(nn.Module):
    """Sequences of different lengths, packed by lengths that are data."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x[:, 0, 0] > 0).long() + x.shape[1] - 1
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        padded, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return padded


class Pooled(nn.Module):
    """A set: every element sees what all together are."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.together = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.each(x).relu() + self.together(x.mean(1, keepdim=True))


class Graph(nn.Module):
    """Messages along the edges of one graph, summed at their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]]))

    def forward(self, x: Tensor) -> Tensor:
        edges = self.get_buffer("edges")
        return x.index_add(1, edges[1], self.message(x[:, edges[0]]))


# --- Of images


class UNet(nn.Module):
    """Down, up, and a way across."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        low = F.relu(self.down(x))
        high = F.interpolate(low, size=x.shape[-2:], mode="bilinear", align_corners=False)
        return F.relu(self.up(torch.cat((high, x), 1)))


class Resized(nn.Module):
    """A picture that is doubled, by one of torch's modes."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.conv, self.mode = nn.Conv2d(8, 8, 3, padding=1), mode

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2, mode=self.mode))


class Warped(nn.Module):
    """A spatial transformer: where to look is learned (Jaderberg et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.where = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        theta = 0.1 * self.where(x.mean((2, 3))) + torch.tensor([1.0, 0, 0, 0, 1, 0])
        grid = F.affine_grid(theta.unflatten(-1, (2, 3)), list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, align_corners=False)


class Patches(nn.Module):
    """Unfolded, mixed, folded."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        columns = F.unfold(x, 2, stride=2)
        return F.fold(self.mix(columns.mT).mT, x.shape[-2:], 2, stride=2)


class Unpooled(nn.Module):
    """Pooled, and put back where the largest were."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        pooled, places = F.max_pool2d(self.conv(x), 2, return_indices=True)
        return F.max_unpool2d(pooled, places, 2)


class Deep(nn.Module):
    """Images as volumes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(self.conv(x[:, None]), scale_factor=2.0, mode="trilinear")[:, 0, ::2]


# --- Draws


class Noise(nn.Module):
    """A draw on the way, as variational models have it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "normal":
            return x + 0.1 * torch.randn_like(x)
        if self.how == "gumbel":
            return F.gumbel_softmax(x, tau=0.7)
        if self.how == "path":
            return x * (torch.rand(len(x), 1) < 0.8) / 0.8
        if self.how == "alpha":
            return F.alpha_dropout(x, 0.2, training=self.training)
        if self.how == "feature alpha":
            return F.feature_alpha_dropout(x[..., None], 0.2, training=self.training)[..., 0]
        if self.how == "poisson":
            return x + 0.1 * torch.poisson(x.exp())
        return x + 0.1 * torch.multinomial(x.softmax(-1), WIDTH, replacement=True)


# --- What forward takes from Python


class Compiled(nn.Module):
    """A bound that a compiled module has not."""

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.compiler.is_compiling() else x.clamp(-1, 1)


class Tried(nn.Module):
    """A branch on data, left out where that is not possible."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            if x.sum().item() > 1e6:
                x = x / 2
        except RuntimeError:
            return x
        return x


class Counted(nn.Module):
    """A weight that rises with the number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * min(1.0, self.calls / 60)


class Seldom(nn.Module):
    """A branch that Python's generator takes now and then."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() if random.random() < 0.05 else x


class NumpyMask(nn.Module):
    """A mask that NumPy draws."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.from_numpy(np.random.rand(WIDTH) < 0.9)


class Warmed(nn.Module):
    """A schedule that a list holds."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = [0.1, 0.2, 0.5, 1.0]

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.schedule.pop(0) if len(self.schedule) > 1 else self.schedule[0])


# --- State and coupling


class Gate(nn.Module):
    """A buffer counts steps and opens a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        opened = ((self.steps + 1).float() / 4).clamp(max=1.0)
        self.steps += 1
        return x * opened


class Averages(nn.Module):
    """A codebook that moves with what it sees, by a moving average of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out = x - self.mean
        with torch.no_grad():
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return out


class Quantized(nn.Module):
    """Activations and weights on grids of 8 bits, with straight-through derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.tensor(0.02))
        self.register_buffer("zero", torch.tensor(3, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.fake_quantize_per_tensor_affine(x, 0.01, 0, -100, 100)
        x = F.linear(x, torch.fake_quantize_per_tensor_affine(self.layer.weight, self.scale, self.zero, -128, 127))
        scales, zeros = self.scale.expand(WIDTH), self.zero.expand(WIDTH)
        return torch.fake_quantize_per_channel_affine(x, scales, zeros, x.dim() - 1, -128, 127)


class StateOfSamples(nn.Module):
    """A recurrent layer whose first state is a buffer with a row for each sample of a batch."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.register_buffer("first", torch.linspace(-1, 1, samples * WIDTH).reshape(1, samples, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.first)[0]


class Clamped(nn.Module):
    """A temperature that forward keeps below a bound, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.data.clamp_(max=2.0)
        return x * self.scale.exp()


class Shared(nn.Module):
    """Two parameters with one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two.weight.data = self.one.weight.data

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).tanh())


class Twin(nn.Module):
    """One module for two views of a sample."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x) - self.module(x.flip(1)).tanh()


class Tied(nn.Module):
    """One parameter, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).tanh())


class Contrast(nn.Module):
    """What a sample is worth among those of its batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (x @ x.T).softmax(-1).diagonal()[:, None]


class BatchScaled(torch.autograd.Function):
    """A backward that knows how many samples came together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / len(grads[0])


# --- What is refused


class Hooked(nn.Module):
    """A hook on a tensor changes gradients."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and not torch.compiler.is_compiling():
            x.register_hook(lambda grad: grad / math.pi)
        return x.relu()


class HookedParameter(nn.Module):
    """A hook that runs when a gradient has been accumulated."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.layer.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Branching(nn.Module):
    """The way through the model depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() if x.sum() > 0 else x.cos()


class Numbered(nn.Module):
    """A tensor becomes a Python number."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.detach().abs().max().item()
