# SPDX-License-Identifier: Apache-2.0
"""fuse_routers(): every class of its table against the class itself, and models whose routers it serves or leaves alone."""

import importlib
import pkgutil
import re
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from decoding import VERSION, one_thread  # noqa: F401
from fused_topk.generation import fuse_routers, routers

CONFIG = SimpleNamespace(
    hidden_size=32, num_experts=16, num_local_experts=16, n_routed_experts=16, num_experts_per_tok=4, moe_topk=4,
    n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5, topk_method="group_limited_greedy",
    moe_norm_min=1e-12, scoring_func="sigmoid", moe_num_experts=16, moe_k=4,
)  # fmt: skip


# One of each form. The others are of the same code.
PLAIN = (
    "MixtralTopKRouter", "Qwen3MoeTopKRouter", "HunYuanMoEV1Gate", "GptOssTopKRouter", "DeepseekV2TopkRouter",
    "DeepseekV3TopkRouter", "MiniMaxM2TopKRouter", "Ernie4_5_MoeTopKRouter",
)  # fmt: skip


def classes() -> dict[str, type]:
    """The classes of the table that this version of transformers has, by their names."""
    found = {}
    for name in routers._ROUTERS:
        stem = re.sub(r"(TopKRouter|TopkRouter|MoEV1Gate)$", "", name).lower().replace("_", "")
        for module in pkgutil.iter_modules(transformers.models.__path__):
            family = module.name.replace("_", "")
            if stem.startswith(family) or family.startswith(stem):
                try:
                    file = importlib.import_module(f"transformers.models.{module.name}.modeling_{module.name}")
                except ImportError:
                    continue
                if hasattr(file, name):
                    found[name] = getattr(file, name)
    return found


CLASSES = classes()


def made(name: str, dtype: torch.dtype = torch.float32, **changed) -> nn.Module:
    """A router with random weights and biases."""
    config = SimpleNamespace(**{**vars(CONFIG), **changed})
    generator = torch.Generator().manual_seed(0)
    arguments = (config, 0) if name == "HunYuanMoEV1Gate" else (config,)
    router = CLASSES[name](*arguments).to(dtype)
    with torch.no_grad():
        for tensor in (*router.parameters(), *router.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / 4)
    return router


def experts_of(routed: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits, and the weight of each expert, 0 for those that are not chosen."""
    logits, weights, experts = routed
    return logits, torch.zeros(logits.shape, dtype=weights.dtype).scatter(1, experts, weights)


@pytest.mark.skipif(VERSION < (5, 24), reason="this version of transformers has fewer of them")
def test_all_classes_are_there():
    assert set(CLASSES) == set(routers._ROUTERS)


@pytest.mark.parametrize(
    "name", [name if name in PLAIN else pytest.param(name, marks=pytest.mark.exhaustive) for name in CLASSES]
)
def test_router_computes_what_its_class_does(name):
    for changed in ({}, {"topk_method": "greedy", "norm_topk_prob": False, "n_group": 1, "topk_group": 1}):
        for dtype in (torch.float32, torch.bfloat16):
            router = made(name, dtype, **changed)
            given = [torch.randn(50, 32, generator=torch.Generator().manual_seed(1)).to(dtype)]
            if name == "MiniMaxM2TopKRouter":
                given.append(torch.randn(16, generator=torch.Generator().manual_seed(2)) / 4)
            with torch.no_grad(), fuse_routers(nn.ModuleList([router])) as done:
                if VERSION < (5, 17) and name in done.stock:
                    # Most routers of such versions return other things.
                    assert not done.fused
                    continue
                got = router(*given)
            assert "forward" not in router.__dict__
            with torch.no_grad():
                expected = router(*given)
            assert done.fused == {name: 1} and not done.stock, done
            assert [x.dtype for x in got] == [x.dtype for x in expected]
            bound = 3e-6 if dtype is torch.float32 else 8e-3
            for mine, own in zip(experts_of(got), experts_of(expected), strict=True):
                torch.testing.assert_close(mine.float(), own.float(), rtol=bound, atol=1e-6)


@pytest.mark.skipif(VERSION < (5, 17), reason="routers of this version of transformers stay stock")
def test_trial_sees_another_class():
    """A class of a known name that computes otherwise, in any of these ways, stays as it is."""
    own = CLASSES.get("Qwen3MoeTopKRouter")
    if own is None:
        pytest.skip("this version of transformers has none")
    for change, said in (
        (lambda x: x[:2], "other things"),
        (lambda x: (x[0], x[1].double(), x[2]), "other shapes or dtypes"),
        (lambda x: (x[0], x[1] * 1.1, x[2]), "other weights"),
        (lambda x: 1 / 0, "ZeroDivisionError"),
    ):

        class Qwen3MoeTopKRouter(own):
            def forward(self, hidden, change=change):
                return change(super().forward(hidden))

        Qwen3MoeTopKRouter.__module__ = own.__module__
        router = Qwen3MoeTopKRouter(CONFIG)
        nn.init.normal_(router.weight)
        with fuse_routers(nn.ModuleList([router])) as done:
            assert "forward" not in router.__dict__
        assert said in done.stock["Qwen3MoeTopKRouter"] and not done.fused
    Qwen3MoeTopKRouter.__module__ = "elsewhere"
    with fuse_routers(nn.ModuleList([Qwen3MoeTopKRouter(CONFIG)])) as done:
        assert done.stock["Qwen3MoeTopKRouter"] == "it is of elsewhere, not of transformers"


def test_what_is_left_alone():
    class OtherRouter(nn.Module):
        def forward(self, hidden):
            return hidden

    replaced, unloaded = (made(next(iter(CLASSES))) for _ in range(2)) if CLASSES else (None, None)
    if replaced is None:
        pytest.skip("this version of transformers has none")
    replaced.forward = replaced.forward
    model = nn.ModuleList([OtherRouter(), nn.Linear(2, 2), replaced])
    with fuse_routers(model) as done:
        assert not done.fused
    assert done.stock == {
        "OtherRouter": "its class is not known",
        type(replaced).__name__: "its forward() is replaced already",
    }
    assert "forward" in replaced.__dict__
    with fuse_routers(nn.ModuleList([unloaded.to("meta")])) as done:
        assert done.stock[type(unloaded).__name__] == "its weight has no memory yet"
    with pytest.raises(TypeError, match=r"`model` must be a torch.nn.Module, got str"), fuse_routers("model"):
        pass


MODELS = {
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
    "DeepseekV3": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 0, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}  # fmt: skip


@pytest.mark.skipif(VERSION < (5, 17), reason="routers of this version of transformers stay stock")
@pytest.mark.parametrize("family", [pytest.param("DeepseekV3", marks=pytest.mark.exhaustive), "Qwen3Moe"])
def test_model(family):
    """Its logits and its gradients, in nested blocks and behind an error; afterwards there is no trace."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=60, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, **MODELS[family],
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    ids = torch.randint(0, 60, (2, 7))

    def step():
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        return loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)

    expected = step()
    with pytest.raises(ZeroDivisionError), fuse_routers(model) as done:
        with fuse_routers(model) as inner:
            assert inner == done
        assert sum(done.fused.values()) == 2 and not done.stock
        for mine, own in zip(step(), expected, strict=True):
            torch.testing.assert_close(mine, own, rtol=1e-4, atol=1e-6)
        1 / 0  # noqa: B018
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(step(), expected, strict=True))
