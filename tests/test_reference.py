"""The reference loop itself: keyed draws do not depend on how a step is cut, and its numbers are plain PyTorch's."""

import pytest
import torch
import torch.nn.functional as F

from elaswave_fx.config.keys import OptimizerConfig
from elaswave_fx.models.gpt import GPT
from tests.reference import KeyedDraws, RandomOp, reference_run, relative_difference

SGD = OptimizerConfig(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.0)
ADAMW = OptimizerConfig(name="adamw", lr=1e-3, weight_decay=0.1)
# Embedding, then attention weights, attention and mlp of each block.
DRAWS = [RandomOp(0, 0), *(RandomOp(unit, op) for unit in (1, 2) for op in range(3))]


def tiny_gpt():
    torch.manual_seed(0)
    return GPT(vocab_size=17, seq_len=6, layers=2, width=16, heads=2, dropout=0.2, attention_dropout=0.2)


def token_batches(steps, samples=6):
    torch.manual_seed(1)
    pairs = [torch.randint(17, (2, samples, 6)) for _ in range(steps)]
    return [{"input_ids": ids, "labels": labels} for ids, labels in pairs]


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=lambda each: each.name)
def test_cutting_the_step_changes_rounding_only(optimizer):
    settings = {"optimizer": optimizer, "global_batch": 6, "clip_norm": 1.0, "seed": 3, "random_ops": DRAWS}
    whole = reference_run(tiny_gpt, token_batches(4), **settings)
    pieces = reference_run(tiny_gpt, token_batches(4), spans=[(0, 1), (1, 5), (5, 6)], **settings)
    assert pieces.losses == pytest.approx(whole.losses, rel=1e-6)
    assert pieces.grad_norms == pytest.approx(whole.grad_norms, rel=1e-5)
    assert relative_difference(pieces.parameters, whole.parameters) < 1e-5
    other_seed = reference_run(tiny_gpt, token_batches(4), **{**settings, "seed": 4})
    assert other_seed.losses[0] != pytest.approx(whole.losses[0], rel=1e-4)


def test_without_draws_it_is_the_textbook_loop():
    batches = token_batches(3)
    run = reference_run(tiny_gpt_without_dropout, batches, optimizer=SGD, global_batch=6)
    model = tiny_gpt_without_dropout()
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch, expected in zip(batches, run.losses, strict=True):
        loss, count = model(**batch)
        optim.zero_grad()
        (loss / count).backward()
        optim.step()
        assert float(loss.detach() / count) == pytest.approx(expected, rel=1e-6)
    assert relative_difference(run.parameters, dict(model.named_parameters())) < 1e-6


def tiny_gpt_without_dropout():
    torch.manual_seed(0)
    return GPT(vocab_size=17, seq_len=6, layers=1, width=16, heads=2)


@pytest.mark.parametrize("causal", [True, False])
def test_expanded_attention_is_attention(causal):
    """With a dropout too small to hit any weight, the expanded form is the built-in one."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 5, 8)
    mask = None if causal else torch.randn(5, 5)
    with KeyedDraws([RandomOp(0, 0)], seed=0, step=0, first=0, samples=2) as draws:
        ours = F.scaled_dot_product_attention(query, key, value, mask, dropout_p=1e-9, is_causal=causal)
    draws.finish()
    theirs = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal)
    torch.testing.assert_close(ours, theirs)


def test_a_draw_without_samples_is_keyed_by_the_step():
    def drawn(step, first, samples):
        with KeyedDraws([RandomOp(2, 1, axis=-1)], seed=5, step=step, first=first, samples=samples):
            return torch.rand(3, 4)

    assert torch.equal(drawn(step=7, first=14, samples=1), drawn(step=7, first=15, samples=4))
    assert not torch.equal(drawn(step=7, first=14, samples=1), drawn(step=8, first=14, samples=1))
    with KeyedDraws([RandomOp(2, 1)], seed=5, step=7, first=7, samples=1):
        assert not torch.equal(torch.rand(1, 3, 4)[0], drawn(step=7, first=7, samples=1))


def test_draws_must_match_the_program():
    with pytest.raises(AssertionError, match="no draw left"):
        reference_run(tiny_gpt, token_batches(1), optimizer=SGD, global_batch=6, random_ops=DRAWS[:-1])
    with pytest.raises(AssertionError, match="are left"):
        reference_run(tiny_gpt, token_batches(1), optimizer=SGD, global_batch=6, random_ops=[*DRAWS, RandomOp(9, 9)])
    with (
        pytest.raises(AssertionError, match="draws by bernoulli"),
        KeyedDraws([], seed=0, step=0, first=0, samples=1),
    ):
        torch.bernoulli(torch.full((2,), 0.5))
