# SPDX-License-Identifier: Apache-2.0
"""Names of torch that are not public may go with any version: without each of them the package works as it does with it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import fused_topk

PACKAGE = Path(fused_topk.__file__).parent
TESTS = Path(__file__).parent
_NAME = re.compile(r"""(torch\._C|forward_ad)(?:\.|,\s*")([A-Za-z_]+)""")
NAMES = sorted(
    {
        (owner, name)
        for path in PACKAGE.rglob("*.py")
        for owner, name in _NAME.findall(path.read_text(encoding="utf-8"))
        if owner == "torch._C" or name.startswith("_")
    }
)

# Takes the names from the package, but not from torch, which calls many of them itself.
HIDE = """
import sys, torch, torch.autograd.forward_ad
def hide(real, names):
    class Hiding:
        def __getattribute__(self, asked):
            if asked in names and sys._getframe(1).f_globals.get("__name__", "").startswith("fused_topk"):
                raise AttributeError(asked)
            return getattr(real, asked)
        def __setattr__(self, asked, value):
            setattr(real, asked, value)
    return Hiding()
torch.autograd.forward_ad = hide(torch.autograd.forward_ad, {name for owner, name in NAMES if owner == "forward_ad"})
torch._C = hide(torch._C, {name for owner, name in NAMES if owner == "torch._C"})
"""

CALLS = """
import types
import fused_topk
from fused_topk.cuda_runtime import driver, tickets

logits, row = torch.randn(3, 50), torch.randn(50)
want = torch.softmax(logits, -1).topk(5)
def check(values, expected=want.values):
    torch.testing.assert_close(values, expected)
def loss(logits):
    return fused_topk.softmax_topk(logits, 5).values[..., 0].sum()
def stock(logits):
    return logits.softmax(-1).amax(-1).sum()

check(fused_topk.softmax_topk(logits, 5).values)
check(fused_topk.softmax_topk(logits, 5, mask=torch.ones(3, 50, dtype=torch.bool)).values)
out = fused_topk.TopK(torch.empty(3, 5), torch.empty(3, 5, dtype=torch.int64), torch.empty(3))
check(fused_topk.softmax_topk(logits, 5, out=out).values)
check(fused_topk.softmax(logits), logits.softmax(-1))
check(fused_topk.beam_topk(logits[None], torch.zeros(1, 3), 4).values, logits.log_softmax(-1).flatten().topk(4).values[None])
leaf, stock_leaf = logits.clone().requires_grad_(), logits.clone().requires_grad_()
loss(leaf).backward()
stock(stock_leaf).backward()
check(leaf.grad, stock_leaf.grad)
check(torch.func.grad(loss)(row), torch.func.grad(stock)(row))
check(torch.func.vmap(torch.func.grad(loss))(logits), stock_leaf.grad)
check(torch.func.vmap(lambda row: fused_topk.softmax_topk(row, 5).values)(logits))
try:
    torch.func.jvp(loss, (logits,), (logits,))
except RuntimeError as error:
    assert "forward-mode" in str(error)
else:
    raise AssertionError("a derivative of zero")

if torch.cuda.is_available():
    with torch.cuda.stream(torch.cuda.Stream()):
        check(fused_topk.softmax_topk(logits.cuda(), 5).values.cpu())
elif torch.version.cuda is None:
    torch.cuda.current_stream = lambda device: types.SimpleNamespace(cuda_stream=100 + device)
    assert tickets.raw_stream(1) == 101
    torch.cuda._lazy_init, torch._C._cuda_getDevice = lambda: None, lambda: 2
    assert driver._current_device() == 2
"""

GENERATE = """
import transformers
from fused_topk.generation import fused_decoding, stats
from fused_topk.generation.whole_step import reasons

reasons.FEW_LOGITS = 0

torch.manual_seed(0)
config = transformers.GPT2Config(
    vocab_size=60, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None, pad_token_id=0
)
model = transformers.GPT2LMHeadModel(config).eval()
ids = torch.randint(1, 60, (2, 4))
for options in ({}, {"num_beams": 3}, {"return_dict_in_generate": True, "output_scores": True}):
    want = model.generate(ids, max_new_tokens=6, do_sample=False, **options)
    with fused_decoding(model):
        got = model.generate(ids, max_new_tokens=6, do_sample=False, **options)
    assert torch.equal(getattr(got, "sequences", got), getattr(want, "sequences", want))
assert stats().whole > 0 and not stats().reasons, stats()
"""


def run_without(names: list[tuple[str, str]], code: str) -> None:
    source = f"NAMES = {names!r}\n{HIDE}\n{code}"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr


def test_the_search_finds_them():
    names = [name for _, name in NAMES]
    assert {"_dispatch_keys", "_current_level", "_cuda_getCurrentRawStream"} <= set(names)


def test_every_function_works_without_any_of_the_names():
    run_without(NAMES, CALLS)


@pytest.mark.exhaustive
def test_generate_works_without_any_of_the_names():
    pytest.importorskip("transformers")
    run_without(NAMES, GENERATE)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("owner", "name"), NAMES, ids=lambda value: value.strip("_"))
def test_every_function_works_without_the_name(owner, name):
    run_without([(owner, name)], CALLS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for _, name in NAMES if "torch_function" in name.lower()])
def test_generate_works_without_the_name(name):
    pytest.importorskip("transformers")
    run_without([("torch._C", name)], GENERATE)
