# SPDX-License-Identifier: Apache-2.0
"""Which norms of a twin are computed by one operation: those that are equal to it to rounding, and no others."""

import copy

import pytest
import torch
from torch import nn

from decoding import also, assert_whole
from fused_topk.generation import disable
from fused_topk.generation.whole_step import entry, norms, trial
from whole_steps import family

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZE = 48
# Norms of a layer of the models of whole_steps.py, which have two layers, and one norm behind them.
NORMS_OF_LAYERS = {"Llama": 2, "Mistral": 2, "Qwen3": 4, "Gemma2": 4}


class Norm(nn.Module):
    """A user's own norm. It computes what Llama's does."""

    def __init__(self, size=SIZE, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, generator=torch.Generator().manual_seed(1)))
        self.eps = eps

    def forward(self, x, gate=None):
        normed = (x.float() * self.root(x)).to(x.dtype) * self.weight
        return normed if gate is None else normed * gate

    def root(self, x):
        return (mean_of_squares(x) + self.eps).rsqrt()


def variant(name, **attributes):
    """A class of norms with other methods."""
    return type(name, (Norm,), attributes)


def mean_of_squares(x):
    return x.float().pow(2).mean(-1, keepdim=True)


EpsilonOutside = variant("EpsilonOutside", root=lambda self, x: 1 / (mean_of_squares(x).sqrt() + self.eps))
OverflowingInFloat16 = variant(
    "OverflowingInFloat16", root=lambda self, x: (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()
)
Cleaning = variant("Cleaning", forward=lambda self, x: Norm.forward(self, x.nan_to_num()))
Training = variant("Training", forward=lambda self, x: Norm.forward(self, x * 2 if self.training else x))
Wide = variant("Wide", forward=lambda self, x: Norm.forward(self, x).float())
Scaled = variant("Scaled", scale=1.0, forward=lambda self, x: Norm.forward(self, x) * self.scale)
OfOnePlus = variant(
    "OfOnePlus", forward=lambda self, x: (x.float() * self.root(x) * (1 + self.weight.float())).to(x.dtype)
)
# In 16 bits, farther from float64 than Gemma's.
RoundingOnePlus = variant(
    "RoundingOnePlus", forward=lambda self, x: (x.float() * self.root(x)).to(x.dtype) * (1 + self.weight)
)


class WithBias(Norm):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(SIZE))


class WithBuffer(Norm):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(SIZE))

    def forward(self, x):
        return super().forward(x) + self.shift


class Counting(Norm):
    seen = 0

    def forward(self, x):
        self.seen += 1
        return super().forward(x)


class Listing(Norm):
    def __init__(self):
        super().__init__()
        self.notes = []


class Writing(Norm):
    def forward(self, x):
        found = super().forward(x)
        x += 1
        return found


class Raising(Norm):
    def forward(self, x):
        raise NotImplementedError


def scaled():
    norm = Scaled()
    norm.scale = 2.0
    return norm


def of_zero():
    return Norm(eps=0.0)


LEFT = [WithBias, WithBuffer, EpsilonOutside, Counting, Listing, Writing, Raising, Cleaning, scaled, of_zero]


def taken(norm, dtype=torch.float32, device="cpu", training=False):
    """What takes the place of the norm in a twin."""
    norm = norm.to(device, dtype).requires_grad_(False).train(training)
    norms.take(nn.ModuleList([norm]))
    return norm


@pytest.mark.parametrize("make", LEFT, ids=lambda make: make.__name__)
def test_what_is_not_known_is_left_alone(make):
    norm = make()
    kind, state = type(norm), dict(vars(norm.eval()))
    assert type(taken(norm)) is kind and vars(norm) == state


def test_a_norm_is_tried_in_its_mode():
    assert [isinstance(taken(make()), norms._Norm) for make in (Norm, Training)] == [True, True]
    assert [isinstance(taken(make(), training=True), norms._Norm) for make in (Norm, Training)] == [True, False]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [Norm, Scaled, OfOnePlus, RoundingOnePlus], ids=lambda make: make.__name__)
def test_norms_are_as_near_to_float64_as_before(make, dtype, device):
    own, norm = make().to(device, dtype), taken(make(), dtype, device)
    assert isinstance(norm, norms._Norm) and isinstance(norm, make)
    x = torch.randn(64, SIZE, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    weight = own.weight.double() + (make in (OfOnePlus, RoundingOnePlus))
    exact = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + own.eps).rsqrt() * weight
    of_own, of_ours = ((each(x).double() - exact).abs().mean() for each in (own, norm))
    assert norm(x).dtype is dtype and of_ours <= 1.02 * of_own
    if dtype is torch.float32:
        torch.testing.assert_close(norm(x), own(x), rtol=5e-7, atol=0)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [(Wide, torch.bfloat16), (OverflowingInFloat16, torch.float16)],
    ids=["Wide", "OverflowingInFloat16"],
)
def test_what_differs_in_16_bits_is_left_alone(make, dtype):
    assert isinstance(taken(make()), norms._Norm)
    assert type(taken(make(), dtype)) is make


def test_attributes_tell_norms_of_a_class_apart():
    layers = nn.ModuleList([Scaled(), scaled(), Scaled(), Scaled(eps=1e-2)]).eval()
    x = torch.randn(4, SIZE) * 0.1
    before = [layer(x) for layer in layers]
    norms.take(layers)
    assert [isinstance(layer, norms._Norm) for layer in layers] == [True, False, True, True]
    for layer, expected in zip(layers, before):
        torch.testing.assert_close(layer(x), expected)


def test_a_weight_is_read_at_each_call_and_unknown_inputs_go_to_the_norm_itself():
    own, norm = Norm(), taken(Norm())
    x = torch.randn(4, SIZE)
    norm(x)
    with torch.no_grad():
        for each in (own, norm):
            each.weight.mul_(3)
    for args in [(x,), (x, x), (x.double(),), (x.bfloat16(),), (x[:, :1],)]:
        torch.testing.assert_close(norm(*args), own(*args))
    torch.testing.assert_close(norm(x=x, gate=x), own(x, x))


def test_a_function_that_has_been_replaced_counts_in_the_next_twin(monkeypatch):
    assert isinstance(taken(Norm()), norms._Norm)
    monkeypatch.setattr(Norm, "root", EpsilonOutside.root)
    assert type(taken(Norm())) is Norm


@pytest.mark.parametrize("name", ["Llama", "Gemma2", *also("Mistral", "Qwen3")])
def test_texts_are_those_of_stock(name, monkeypatch):
    model = family(name)
    number = 2 * NORMS_OF_LAYERS[name] + 1
    compared = []
    reason_against = trial.reason_against

    def watched(twin, stock, *args, **kwargs):
        compared.append([sum(isinstance(each, norms._Norm) for each in of.modules()) for of in (twin, stock, model)])
        return reason_against(twin, stock, *args, **kwargs)

    disable(model)
    monkeypatch.setattr(trial, "reason_against", watched)
    assert_whole(model, num_beams=1)
    assert_whole(model, num_beams=3)
    # In a trial the twin has our norms. The one that it is compared with has the model's own, and so has the model.
    assert compared == [[number, 0, 0]]
    assert sum(isinstance(each, norms._Norm) for each in entry.ready_for(model).twin.modules()) == number


def test_a_trial_finds_another_norm(monkeypatch):
    model = family("Llama")
    disable(model)
    monkeypatch.setattr(norms._Norm, "forward", lambda norm, x: x * norm.weight)
    monkeypatch.setattr(norms, "_is_equal", lambda *args: True)
    try:
        assert "something else" in entry._made_ready(model).reason
    finally:
        disable(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Qwen3"])
def test_norms_are_taken_on_a_gpu(cuda, name, dtype):
    model = copy.deepcopy(family(name)).to("cuda", dtype)
    count = sum("RMSNorm" in type(each).__name__ for each in model.modules())
    norms.take(model)
    assert sum(isinstance(each, norms._Norm) for each in model.modules()) == count
