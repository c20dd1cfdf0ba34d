"""Functional optimizers: equal to torch.optim, elementwise to the bit, traceable for any length."""

from dataclasses import replace

import pytest
import torch

from elaswave_fx.config.keys import OptimizerConfig
from elaswave_fx.errors import ConfigError
from elaswave_fx.optim.optimizer import (
    SGD,
    AdamW,
    check_elementwise,
    group_of,
    hyper_row,
    make_optimizer,
    trace_update,
    trace_users_update,
)

OURS = [
    AdamW(weight_decay=0.1),
    AdamW(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0),
    SGD(weight_decay=0.1),
    SGD(momentum=0.9, weight_decay=0.01),
    SGD(momentum=0.9, nesterov=True),
]
# Bits that do not depend on an element's position: the only operators an update may use.
POSITION_INDEPENDENT = {"add", "sub", "mul", "div", "sqrt", "lerp", "addcmul", "addcdiv"}


class RootMeanSquare:
    """Divides by the norm of the whole slice, which no rank knows."""

    def init(self, param):
        return ()

    def update(self, param, grad, state, hyper):
        return param - grad / grad.norm() * hyper[0], ()

    def hyper_values(self, step, lr, group):
        return [lr]


class Lion:
    """Chen et al. 2023; what a user might bring."""

    def __init__(self, beta=0.9, weight_decay=0.05):
        self.beta = beta
        self.weight_decay = weight_decay

    def init(self, param):
        return (torch.zeros_like(param),)

    def update(self, param, grad, state, hyper):
        keep, lr = hyper
        (momentum,) = state
        direction = torch.lerp(grad, momentum, self.beta).sign()
        return param * keep - direction * lr, (torch.lerp(momentum, grad, 0.01),)

    def hyper_values(self, step, lr, group):
        return [1.0 - lr * self.weight_decay if group == "decay" else 1.0, lr]


class ScalarState(RootMeanSquare):
    def init(self, param):
        return (torch.zeros(()),)


class Forgetful(RootMeanSquare):
    update = None


class GrowingHyper(RootMeanSquare):
    def hyper_values(self, step, lr, group):
        return [lr] * (step + 1)


class PositionDependent(RootMeanSquare):
    """Elementwise, but an element rounds by its position, as with operators whose vector body and tail differ."""

    def update(self, param, grad, state, hyper):
        tail = torch.arange(param.numel()) >= param.numel() // 8 * 8
        return param - grad * hyper[0] * torch.where(tail, 1.0 + 2.0**-20, 1.0), ()


class CountsInHyperValues(RootMeanSquare):
    """Notes the step where it is told it, and reads it where the update is traced."""

    count = 0

    def hyper_values(self, step, lr, group):
        self.count = step + 1
        return [lr]

    def update(self, param, grad, state, hyper):
        return param - grad * hyper[0] / (1.0 - 0.9**self.count), ()


class NotesSome(RootMeanSquare):
    """Averages at every 50th step, by a note of `hyper_values`."""

    averages = False

    def hyper_values(self, step, lr, group):
        self.averages = (step + 1) % 50 == 0
        return [lr]

    def update(self, param, grad, state, hyper):
        after = param - grad * hyper[0]
        return 0.5 * (param + after) if self.averages else after, ()


class CountsUpdates(CountsInHyperValues):
    def hyper_values(self, step, lr, group):
        return [lr]

    def update(self, param, grad, state, hyper):
        self.count += 1
        return param - grad * hyper[0] * (1.0 if self.count < 1000 else 0.1), ()


class CountsCalls(CountsInHyperValues):
    def hyper_values(self, step, lr, group):
        self.count += 1
        return [lr / self.count]


class Noisy(Lion):
    def update(self, param, grad, state, hyper):
        return param - hyper[0] * (grad + torch.randn_like(param)), state


class ClipsItself(RootMeanSquare):
    """No gradient of a trial has that norm."""

    def update(self, param, grad, state, hyper):
        return param - hyper[0] * grad * (1e6 / (grad.norm() + 1e-6)).clamp(max=1.0), ()


class SkipsSpikes(RootMeanSquare):
    def update(self, param, grad, state, hyper):
        return torch.where(grad.abs().max() < 1e6, param - hyper[0] * grad, param), ()


class DecaysMatrices(RootMeanSquare):
    def update(self, param, grad, state, hyper):
        return param * (0.9 if param.ndim >= 2 else 1.0) - hyper[0] * grad, ()


class Centralizes(RootMeanSquare):
    def update(self, param, grad, state, hyper):
        if grad.dim() > 1:
            grad = grad - grad.mean(dim=tuple(range(1, grad.dim())), keepdim=True)
        return param - hyper[0] * grad, ()


class KeepsRowsOfMatrices(RootMeanSquare):
    """As Adafactor."""

    def init(self, param):
        return (torch.zeros_like(param) if param.ndim < 2 else torch.zeros(param.shape[0]),)

    def update(self, param, grad, state, hyper):
        moment = state[0] + grad.square()
        return param - hyper[0] * grad / (moment.sqrt() + 1.0), (moment,)


class FirstRate(RootMeanSquare):
    """Keeps the learning rate that it was asked with first."""

    first = None

    def hyper_values(self, step, lr, group):
        if self.first is None:
            self.first = lr
        return [self.first]


class Changes(RootMeanSquare):
    def update(self, param, grad, state, hyper):
        return param.sub_(grad * hyper[0]), ()


class ChangesState(Lion):
    def update(self, param, grad, state, hyper):
        return param - state[0].mul_(0.9).add_(grad) * hyper[1], state


class Branches(RootMeanSquare):
    def update(self, param, grad, state, hyper):
        return (param - grad * hyper[0] if hyper[0] > 1e-5 else param), ()


class Scales(RootMeanSquare):
    """A number of hyper as a number: it stays one of the step."""

    def update(self, param, grad, state, hyper):
        return param.sub(grad, alpha=hyper[0].item()), ()


def torch_counterpart(ours, parameters, lr):
    if isinstance(ours, AdamW):
        return torch.optim.AdamW(parameters, lr=lr, betas=ours.betas, eps=ours.eps, weight_decay=ours.weight_decay)
    return torch.optim.SGD(
        parameters, lr=lr, momentum=ours.momentum, weight_decay=ours.weight_decay, nesterov=ours.nesterov
    )


def test_adamw_has_the_form_that_the_native_library_has_compiled():
    """Another form is right too, but slower: then `native/exec/program/compiled.cc` and its test have to follow."""
    graph = trace_update(AdamW()).graph
    calls = [node.target._schema.name.removeprefix("aten::") for node in graph.nodes if node.op == "call_function"]
    assert calls == ["mul", "lerp", "mul", "addcmul", "sqrt", "div", "add", "mul", "div", "mul", "sub"]


@pytest.mark.parametrize("ours", OURS, ids=repr)
def test_equals_torch(ours):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(301))
    theirs = torch_counterpart(ours, [parameter], lr=0.01)
    update = trace_update(ours)
    master, state = parameter.detach().clone(), ours.init(parameter.detach())
    for step in range(20):
        lr = 0.01 * (1 + step % 3)
        grad = torch.randn(301)
        parameter.grad = grad.clone()
        theirs.param_groups[0]["lr"] = lr
        theirs.step()
        row = hyper_row(ours, step, lr, "decay")
        # Gradients come as sums; the engine gives the scale (clipping over count).
        row[0] = 1.0 / 4.0
        master, *state = update(master, grad * 4.0, *state, *(torch.tensor(value) for value in row))
    torch.testing.assert_close(master, parameter.detach(), rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("ours", OURS, ids=repr)
def test_bits_do_not_depend_on_the_slice(ours):
    check_elementwise(ours, "ours")


@pytest.mark.parametrize("ours", OURS, ids=repr)
def test_trace_is_small_and_symbolic(ours):
    graph = trace_update(ours)
    used = {node.target._overloadpacket.__name__ for node in graph.graph.nodes if node.op == "call_function"}
    assert used <= POSITION_INDEPENDENT
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    state = len(ours.init(torch.zeros(2)))
    hyper = hyper_row(ours, 0, 0.1, "decay")
    assert len(inputs) == 2 + state + len(hyper)
    for length in (1, 5, 4096):
        outputs = graph(*(torch.rand(length) for _ in range(2 + state)), *(torch.tensor(value) for value in hyper))
        assert [each.shape for each in outputs] == [(length,)] * (1 + state)


class Shared(Lion):
    """A state of one tensor three times, whose copies part."""

    def init(self, param):
        return (torch.zeros_like(param),) * 3

    def update(self, param, grad, state, hyper):
        first, second, most = state
        first, second = torch.lerp(first, grad, 0.1), second * 0.9 + grad * grad
        most = torch.maximum(most, second)
        return param * hyper[0] - first / (most.sqrt() + 1e-8) * hyper[1], (first, second, most)


def test_a_state_may_be_one_tensor_several_times():
    graph = trace_users_update(Shared(), "Shared")
    assert sum(node.op == "placeholder" for node in graph.graph.nodes) == 2 + 3 + 3


def test_no_decay_group_does_not_decay():
    for ours in (AdamW(weight_decay=0.5), SGD(weight_decay=0.5)):
        param, grad = torch.ones(3), torch.zeros(3)
        for group, expected in (("decay", 0.95), ("no_decay", 1.0)):
            hyper = tuple(torch.tensor(value) for value in ours.hyper_values(0, 0.1, group))
            after, _ = ours.update(param, grad, ours.init(param), hyper)
            torch.testing.assert_close(after, torch.full((3,), expected))


def test_groups():
    assert [group_of(ndim) for ndim in (0, 1, 2, 4)] == ["no_decay", "no_decay", "decay", "decay"]
    assert group_of(1, no_decay="none") == "decay"


def test_make_optimizer_reads_the_configuration():
    adamw = OptimizerConfig(name="adamw", lr=0.1, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.3)
    assert make_optimizer(adamw) == AdamW((0.8, 0.9), 1e-5, 0.3)
    assert make_optimizer(OptimizerConfig(name="sgd", lr=0.1, momentum=0.5, weight_decay=0.0)) == SGD(0.5)
    with pytest.raises(ConfigError, match="optimizer=adamv: is unknown; nearest valid: adamw"):
        make_optimizer(OptimizerConfig(name="adamv", lr=0.1))
    with pytest.raises(ConfigError, match=r"optimizer.weight_decay=null: must be a number of at least 0"):
        make_optimizer(replace(adamw, weight_decay=None))
    with pytest.raises(ConfigError, match=r"nesterov=true: needs optimizer.momentum > 0"):
        SGD(nesterov=True)


def user_optimizer(name, **options):
    return OptimizerConfig(name="target", lr=0.1, weight_decay=None, target=f"{__name__}.{name}", options=options)


def test_a_users_optimizer_is_built_and_traced():
    lion = make_optimizer(replace(user_optimizer("Lion", beta=0.8), weight_decay=0.2))
    assert (lion.beta, lion.weight_decay) == (0.8, 0.2)
    assert make_optimizer(user_optimizer("Lion")).weight_decay == 0.05
    outputs = trace_update(lion)(torch.ones(3), torch.ones(3), torch.zeros(3), *map(torch.tensor, (1.0, 1.0, 0.1)))
    torch.testing.assert_close(outputs[0], torch.full((3,), 0.9))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("RootMeanSquare", r"is not elementwise: aten\..*norm.* looks at several elements, and updates get slices"),
        ("ScalarState", r"is not elementwise, its state has shape \[\]"),
        ("PositionDependent", "rounds an element differently by its position"),
        ("Forgetful", "has no update"),
        ("Noisy", "update draws random numbers, and the ranks that hold a parameter would draw others; a way out is "),
        ("ClipsItself", r"update is not elementwise: aten\..*norm.* looks at several elements, and updates get slices"),
        ("SkipsSpikes", r"update is not elementwise: aten\.max.* looks at several elements"),
        ("DecaysMatrices", r"init or update does something else with a parameter of shape \[32, 32\] than with its"),
        ("Centralizes", "init or update does something else with a parameter of shape"),
        ("KeepsRowsOfMatrices", "init or update does something else with a parameter of shape"),
        ("FirstRate", r"hyper_values of step 0, lr 0.001, .* is .*, and .* when later ones were asked for before"),
        ("GrowingHyper", r"hyper_values gives \[1, 2, 3, 1001\] values, not always as many"),
        ("Nowhere", "cannot be built"),
        ("CountsUpdates", "update changes CountsUpdates.count, but it is traced once; keep what changes in the state"),
        ("CountsCalls", "hyper_values of step 0, lr 0.001, decay is .*, and .* when it is asked for again"),
        ("Changes", "update changes param in place; return new tensors"),
        ("ChangesState", r"update changes state\[0\] in place; return new tensors"),
    ],
)
def test_a_users_optimizer_is_refused_by_name(name, message):
    with pytest.raises(ConfigError, match=f"optimizer._target_=.*{name}: .*{message}"):
        make_optimizer(user_optimizer(name))


class OwnRate(Lion):
    """Takes the keys lr and weight_decay, and computes with its own."""

    def __init__(self, lr=0.3, weight_decay=0.0):
        super().__init__(weight_decay=weight_decay)
        self.lr = lr


class TakesAll(OwnRate):
    def __init__(self, **options):
        super().__init__(**options)


def test_keys_of_all_optimizers_reach_a_users_constructor():
    config = replace(user_optimizer("OwnRate"), lr=0.05, weight_decay=0.1)
    assert (make_optimizer(config).lr, make_optimizer(config).weight_decay) == (0.05, 0.1)
    assert make_optimizer(replace(config, weight_decay=None)).weight_decay == 0.0
    assert make_optimizer(replace(user_optimizer("TakesAll"), weight_decay=0.1)).weight_decay == 0.1
    with pytest.raises(ConfigError, match="optimizer.weight_decay=0.1: .*RootMeanSquare has no such argument; .* null"):
        make_optimizer(replace(user_optimizer("RootMeanSquare"), weight_decay=0.1))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CountsInHyperValues", "update is traced once, and computes something else at step 1 with lr 0.001"),
        ("NotesSome", "update is traced once, and computes something else at step 49 with lr 0.001"),
        ("Branches", "update cannot be traced: .*; hyper are tensors, to compute with as they are: without if"),
    ],
)
def test_what_no_trace_can_follow_is_refused(name, message):
    optimizer = make_optimizer(user_optimizer(name))
    with pytest.raises(ConfigError, match=f"optimizer._target_={name}: {message}"):
        trace_users_update(optimizer, name)


@pytest.mark.parametrize("name", ["Lion", "Scales"])
def test_what_follows_from_the_arguments_is_traced(name):
    graph = trace_users_update(make_optimizer(user_optimizer(name)), name)
    assert any(node.op == "call_function" for node in graph.graph.nodes)
