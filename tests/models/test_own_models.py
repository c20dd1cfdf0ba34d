"""GPT, ResNet, two towers, a user's class: what they return, and that they are built the same way twice."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elaswave_fx.config.keys import ModelConfig
from elaswave_fx.errors import CaptureError, ConfigError
from elaswave_fx.models import build_model, check_output
from elaswave_fx.models.gpt import GPT
from elaswave_fx.models.losses import token_loss_sum

GPT_OPTIONS = {"layers": 2, "width": 16, "heads": 2}


class Bigram(nn.Module):
    """A user's model."""

    def __init__(self, vocab_size, hidden=8):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden)
        self.head = nn.Linear(hidden, vocab_size)

    def forward(self, input_ids, labels):
        return token_loss_sum(self.head(self.embed(input_ids)), labels)


def built(kind, options=(), name=None, seed=0, **sizes):
    model = ModelConfig(kind=kind, name=name or kind, task=None, options=dict(options))
    return build_model(model, **{"vocab_size": 17, "seq_len": 6, "seed": seed, **sizes})


def inputs_of(kind, batch):
    torch.manual_seed(1)
    if kind == "resnet":
        return {"image": torch.rand(batch, 1, 8, 8), "label": torch.randint(10, (batch,))}
    if kind == "two_tower":
        return {"left": torch.rand(batch, 32), "right": torch.rand(batch, 32), "label": torch.randint(10, (batch,))}
    return {"input_ids": torch.randint(17, (batch, 6)), "labels": torch.randint(17, (batch, 6))}


@pytest.mark.parametrize(("kind", "options"), [("gpt", GPT_OPTIONS), ("resnet", {}), ("two_tower", {})])
def test_loss_sum_and_count(kind, options):
    model = built(kind, options)
    loss, count = check_output(model(**inputs_of(kind, 4)))
    assert model.training and loss.dtype == torch.float32
    assert int(count) == (24 if kind == "gpt" else 4)
    classes = 17 if kind == "gpt" else 10
    assert float(loss.detach() / count) == pytest.approx(torch.tensor(float(classes)).log().item(), rel=0.25)
    loss.backward()
    assert all(each.grad is not None for each in model.parameters())


@pytest.mark.parametrize(("kind", "options"), [("gpt", GPT_OPTIONS), ("resnet", {}), ("two_tower", {})])
def test_exports_with_a_dynamic_batch(kind, options):
    model, example = built(kind, options), inputs_of(kind, 3)
    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = {name: {0: batch} for name in example}
    exported = torch.export.export(model, (), example, dynamic_shapes=shapes, strict=False).module()
    fresh = inputs_of(kind, 5)
    torch.testing.assert_close(exported(**fresh), model(**fresh))


def test_the_seed_decides_the_weights():
    first, again, other = (built("gpt", GPT_OPTIONS, seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["token_embedding.weight"], other["token_embedding.weight"])


def test_gpt_is_causal_and_tied_on_request():
    tied, untied = built("gpt", GPT_OPTIONS), built("gpt", {**GPT_OPTIONS, "tied": False, "bias": False})
    assert tied.head.weight is tied.token_embedding.weight
    assert untied.head.weight is not untied.token_embedding.weight
    assert not [name for name, _ in untied.named_parameters() if name.endswith("bias")]
    ids = torch.randint(17, (2, 6))
    changed = ids.clone()
    changed[:, 3:] = (changed[:, 3:] + 1) % 17
    first_half = torch.full((2, 6), -100)
    first_half[:, :3] = 5
    torch.testing.assert_close(tied(ids, first_half), tied(changed, first_half))
    assert not torch.allclose(tied(ids, ids)[0], tied(changed, ids)[0])


def test_gpt_dropout_acts_in_training_only():
    model = built("gpt", {**GPT_OPTIONS, "dropout": 0.5})
    batch = inputs_of("gpt", 2)
    assert not torch.equal(model(**batch)[0], model(**batch)[0])
    model.eval()
    assert torch.equal(model(**batch)[0], model(**batch)[0])


def test_ignored_labels_count_nowhere():
    logits, labels = torch.randn(2, 3, 5), torch.tensor([[1, -100, 2], [-100, -100, 0]])
    loss, count = token_loss_sum(logits, labels)
    kept = labels != -100
    torch.testing.assert_close(loss, F.cross_entropy(logits[kept], labels[kept], reduction="sum"))
    assert int(count) == 3
    half, _ = token_loss_sum(logits.bfloat16(), labels)
    assert half.dtype == torch.float32


def test_a_users_class_gets_the_sizes_it_asks_for():
    model = built("target", {"hidden": 4}, name=f"{__name__}.Bigram")
    assert model.embed.weight.shape == (17, 4)
    assert built("target", {"vocab_size": 30}, name=f"{__name__}.Bigram").embed.weight.shape == (30, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("target", {"hiden": 4}, f"{__name__}.Bigram"),
            "model._target_=.*Bigram: cannot be built: TypeError: .*hiden",
        ),
        (("target", {}, "collections.OrderedDict"), "gives a OrderedDict, not a torch.nn.Module"),
        (("target", {}, "no_such_module.Net"), "model._target_=no_such_module.Net: cannot be built"),
        (("gpt", {"width": 15, "heads": 2}), "model.heads=2 does not divide model.width=15"),
        (("rnn", {}), "model=rnn: is none of gpt"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ConfigError, match=message):
        built(*arguments)


def test_sizes_of_the_data_must_fit():
    with pytest.raises(ConfigError, match=r"model\.channels=1: the images of the data have 3 channels"):
        built("resnet", {"channels": 1}, image_shape=(3, 8, 8))
    for channels in (3, 16):
        with pytest.raises(ConfigError, match=r"model\.channels: images of \[16, 16, 3\] look like height x width x"):
            built("resnet", {"channels": channels}, image_shape=(16, 16, 3))
    with pytest.raises(ConfigError, match=r"model\.classes=10: the data has 12 classes"):
        built("two_tower", {"classes": 10}, classes=12)
    with pytest.raises(ConfigError, match="model=gpt: needs data of tokens"):
        built("gpt", GPT_OPTIONS, vocab_size=None, seq_len=None)
    with pytest.raises(
        ConfigError, match=r"model=gpt: the data does not say how many tokens there are; data\.vocab_size"
    ):
        built("gpt", GPT_OPTIONS, vocab_size=None)
    with pytest.raises(ConfigError, match="init_from=x: needs model=hf"):
        built("gpt", GPT_OPTIONS, init_from="x")


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            torch.tensor(1.0),
            r"returns one 0-dim float32 tensor, as a mean loss does; a model returns \(loss sum, count\)",
        ),
        ({"loss": torch.tensor(1.0), "logits": torch.ones(2)}, "returns dict with loss, logits; a model returns"),
        (None, "returns NoneType"),
        ((torch.tensor(1.0),), "returns 1 values"),
        ((torch.ones(2), torch.tensor(2)), "returns one 1-dim float32 tensor as the loss sum"),
        ((torch.tensor(1.0), 2), "returns int as the count"),
        ((torch.tensor(1.0), torch.tensor(1.0, requires_grad=True)), "a count with a gradient"),
    ],
)
def test_other_outputs_are_refused(output, message):
    with pytest.raises(CaptureError, match=message):
        check_output(output)


def test_gpt_takes_the_arguments_of_its_group():
    assert len(GPT(vocab_size=5, seq_len=4, layers=3, width=8, heads=2).blocks) == 3


def test_what_a_file_seeds_when_it_is_imported_does_not_decide(tmp_path, monkeypatch):
    (tmp_path / "seeding_net.py").write_text("import torch\ntorch.manual_seed(42)\nNet = torch.nn.Linear\n")
    monkeypatch.syspath_prepend(tmp_path)
    options = {"in_features": 2, "out_features": 2}
    seen = []
    for seed in (1, 2):
        sys.modules.pop("seeding_net", None)
        seen.append(built("target", options, "seeding_net.Net", seed))
    assert not torch.equal(seen[0].weight, seen[1].weight)
    torch.manual_seed(2)
    assert torch.equal(seen[1].weight, nn.Linear(2, 2).weight)


def test_draws_of_python_and_numpy_in_a_constructor_follow_the_seed(tmp_path, monkeypatch):
    (tmp_path / "word_net.py").write_text(
        "import random, torch\nimport numpy as np\n\n\nclass Net(torch.nn.Linear):\n    def __init__(self):\n"
        "        super().__init__(3, 2)\n        self.weight.data = torch.from_numpy(np.random.rand(2, 3)).float()\n"
        "        self.bias.data.fill_(random.random())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    one, again, other = (built("target", {}, "word_net.Net", seed) for seed in (1, 1, 2))
    for name in ("weight", "bias"):
        assert torch.equal(getattr(one, name), getattr(again, name))
        assert not torch.equal(getattr(one, name), getattr(other, name))


def test_a_file_that_parses_the_command_line_is_refused(tmp_path, monkeypatch):
    (tmp_path / "script_net.py").write_text("import argparse\nargparse.ArgumentParser().parse_args(['--what'])\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"its module ends the process when it is imported \(SystemExit: 2\); keep"):
        built("target", {}, "script_net.Net")


def test_a_file_that_sets_the_default_dtype_is_refused(tmp_path, monkeypatch):
    (tmp_path / "double_net.py").write_text(
        "import torch\ntorch.set_default_dtype(torch.float64)\nNet = torch.nn.Linear\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with pytest.raises(ConfigError, match=r"calls torch.set_default_dtype\(torch.float64\) when it is imported"):
            built("target", {"in_features": 2, "out_features": 2}, "double_net.Net")
    finally:
        torch.set_default_dtype(torch.float32)
