# SPDX-License-Identifier: Apache-2.0
"""Only the decoding loop computes on stand-ins: whoever else asks the model for logits, or keeps them, has plain tensors."""

from __future__ import annotations

import copy
import io
import pickle
import textwrap
import weakref
from collections.abc import Callable
from inspect import getsource

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: pip install 'fused_topk[transformers]'")

import transformers
from transformers import LogitsProcessorList
from transformers.generation import utils as generation_utils

import fused_topk
from decoding import OPTIONS, Recorder, inputs_for, one_prompt, one_thread, own_model, run, tiny  # noqa: F401
from fused_topk.generation import enable, fused_decoding, generate, stats
from fused_topk.generation.choice.rows import Rows
from fused_topk.generation.interception.lazy_scores import LazyScores
from fused_topk.generation.interception.model_logits import ModelLogits

STEPS = OPTIONS["max_new_tokens"]


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


USES: dict[str, Callable[[Tensor], object]] = {
    "package": lambda x: fused_topk.softmax_topk(x, 3).values,
    "compile": lambda x: torch.compile(lambda y: y * 2 + 1, backend="eager", fullgraph=True)(x),
    "vmap": lambda x: torch.vmap(torch.sum)(x),
    "grad": lambda x: torch.func.grad(lambda y: y.square().sum())(x),
    "2 // x": lambda x: 2 // x,
    "+x": lambda x: +x,
    "copy": lambda x: copy.copy(x),
    "deepcopy": lambda x: copy.deepcopy(x),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "save": saved,
}


def check(logits):
    """Every use of the last logits gives what it gives on a plain tensor of the same values."""
    last = logits[:, -1]
    plain = torch.tensor(logits.tolist())[:, -1]
    for name, use in USES.items():
        for each, expected in ((last, plain), (logits[:, -1, :], plain)):
            assert type(each) is Tensor, name
            found = use(each)
            assert type(found) is Tensor, name
            assert torch.equal(found, use(expected)), name


class Asking(transformers.StoppingCriteria):
    """Asks the model while it generates; a processor and a streamer too."""

    def __init__(self, model):
        self.model = model
        self.outputs = []

    def ask(self):
        self.outputs.append(self.model(**inputs_for(self.model)))
        assert type(self.outputs[-1].logits) is Tensor
        check(self.outputs[-1].logits)

    def __call__(self, input_ids, scores, **kwargs):
        self.ask()
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def put(self, value):
        self.ask()

    def end(self):
        pass


@pytest.mark.parametrize("num_beams", [1, 3])
def test_criteria_get_plain_logits(model, num_beams):
    options = {"num_beams": num_beams, "max_new_tokens": 3}
    expected, _ = run(model, **options)
    asking = Asking(model)
    with fused_decoding(model, whole_step=False):
        found, steps = run(model, **options, stopping_criteria=[asking])
    assert torch.equal(found, expected)
    # Their calls of the model are no steps.
    assert steps == (3, 0, {})
    assert len(asking.outputs) == 3


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True}], ids=["greedy", "beams", "sampling"])
def test_criteria_get_plain_scores(model, options):
    num_scores = []

    def criterion(input_ids, scores):
        assert all(type(each) is Tensor for each in scores)
        num_scores.append(len(scores))
        return torch.zeros(len(input_ids), dtype=torch.bool)

    with fused_decoding(model, sampling=True, whole_step=False):
        kept = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
        found, steps = run(model, **options, **kept, stopping_criteria=[criterion])
    assert steps == (STEPS, 0, {})
    assert num_scores == list(range(1, STEPS + 1))
    assert all(type(each) is Tensor for each in (*found.scores, *found.logits))


def test_calls_of_the_model_are_not_counted_as_steps_of_a_call_that_is_not_fused(model):
    with fused_decoding(model, whole_step=False):
        _, steps = run(model, do_sample=True, max_new_tokens=3, stopping_criteria=[Asking(model)])
    assert steps == (0, 3, {"do_sample without sampling=True": 3})


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_loop_drops_the_models_outputs_as_it_does_without_us(model, num_beams):
    outputs, num_alive = [], []

    def count(*_):
        num_alive.append(sum(each() is not None for each in outputs))

    model.register_forward_pre_hook(count)
    model.register_forward_hook(lambda module, args, output: outputs.append(weakref.ref(output)))
    for custom in ({}, {"custom_generate": generate}):
        outputs.clear(), num_alive.clear()
        with fused_decoding(model, whole_step=False):
            assert run(model, num_beams=num_beams, **custom)[1] == (STEPS, 0, {})
        assert num_alive == [0] * STEPS


def test_processors_get_plain_logits(model):
    asking = Asking(model)

    def processor(input_ids, scores):
        asking.ask()
        assert type(scores) is Tensor
        return scores

    expected, _ = run(model, max_new_tokens=3)
    with fused_decoding(model, whole_step=False):
        found, steps = run(model, max_new_tokens=3, logits_processor=LogitsProcessorList([processor]))
    assert torch.equal(found, expected)
    assert steps == (0, 3, {f"logits processor {__name__}.{processor.__qualname__}": 3})


def test_streamers_get_plain_logits(model):
    with fused_decoding(model, whole_step=False):
        stats(reset=True)
        model.generate(**one_prompt(model), **{**OPTIONS, "max_new_tokens": 3}, streamer=Asking(model))
        assert stats(reset=True) == (3, 0, {})


@pytest.mark.parametrize(
    ("when", "custom"),
    # A hook that a criterion adds is called where transformers' own loop runs: custom_generate has no whole_step=False.
    [
        ("before", {}),
        ("after", {}),
        ("within", {}),
        ("before", {"custom_generate": generate}),
        ("after", {"custom_generate": generate}),
    ],
)
def test_forward_hooks_get_plain_logits_and_may_keep_them(model, when, custom):
    outputs, logits, handles = [], [], []

    def hook(module, args, output):
        outputs.append(output)
        logits.append(output.logits)
        pickle.dumps(output)
        if when != "within":
            assert type(output.logits) is Tensor
        check(output.logits)

    def add(*_):
        if not handles:
            handles.append(model.register_forward_hook(hook))
        return torch.zeros(2, dtype=torch.bool)

    if when == "before":
        add()
    enable(model, whole_step=False)
    if when == "after":
        add()
    criteria = [add] if when == "within" else []
    _, steps = run(model, max_new_tokens=3, stopping_criteria=criteria, **custom)
    assert steps == (3, 0, {})
    assert len(outputs) == (2 if when == "within" else 3)
    for each in [*logits, *(output.logits for output in outputs)]:
        assert type(each) is Tensor
        assert each.__dict__ == {}
        assert torch.equal(saved(each), each)


def test_logits_that_no_loop_has_taken_are_copied_as_plain_tensors(model):
    logits = torch.randn(2, 3, 211)
    marked = ModelLogits.of(logits, None)
    for duplicate in (copy.copy, copy.deepcopy, saved, lambda each: pickle.loads(pickle.dumps(each))):
        found = duplicate(marked)
        assert type(found) is Tensor
        assert torch.equal(found, logits)


class UsersLoop(transformers.LlamaForCausalLM):
    """A loop as transformers' one, but a user's, who may do anything in it."""

    def _sample(self, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        for _ in range(3):
            last = self(input_ids).logits[:, -1, :].to(copy=True, dtype=torch.float32, device=input_ids.device)
            assert type(last) is Tensor
            check(last.unsqueeze(1))
            scores = logits_processor(input_ids, last)
            input_ids = torch.cat([input_ids, scores.argmax(-1, keepdim=True)], 1)
        return input_ids


def test_a_users_loop_gets_plain_tensors_and_is_counted(model):
    own = UsersLoop(model.config).eval()
    own.load_state_dict(model.state_dict())
    expected, _ = run(own)
    with fused_decoding(own, whole_step=False):
        found, steps = run(own)
    assert torch.equal(found, expected)
    assert steps == (0, 3, {"the loop of UsersLoop does not take the last logits as transformers' loops do": 3})


def test_a_loop_with_other_processors_than_its_call_gets_plain_tensors(model, monkeypatch):
    # As if a version of transformers rearranged them within a loop.
    source = textwrap.dedent(getsource(transformers.GenerationMixin._sample))
    first = "# init values\n"
    assert source.count(first) == 1
    source = source.replace(first, "logits_processor = type(stopping_criteria[0]).rearranged(logits_processor)\n")
    namespace = dict(generation_utils.__dict__)
    exec(source, namespace)
    monkeypatch.setattr(type(model), "_sample", namespace["_sample"], raising=False)

    def processor(input_ids, scores):
        assert type(scores) is Tensor
        return scores

    monkeypatch.setattr(
        transformers.MaxLengthCriteria,
        "rearranged",
        lambda them: LogitsProcessorList([*them, processor]),
        raising=False,
    )
    expected, _ = run(model)
    with fused_decoding(model, whole_step=False):
        found, steps = run(model)
    assert torch.equal(found, expected)
    assert steps.fused == 0 and steps.fallback == STEPS


class SecondHalf(LogitsProcessorList):
    def __call__(self, input_ids, scores, **kwargs):
        scores = super().__call__(input_ids, scores, **kwargs).clone()
        scores[:, : scores.shape[1] // 2] = -torch.inf
        return scores


class UsersProcessors(transformers.LlamaForCausalLM):
    def _get_logits_processor(self, *args, **kwargs):
        return SecondHalf(super()._get_logits_processor(*args, **kwargs))


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_list_of_processors_that_is_called_in_its_own_way(model, num_beams):
    own = UsersProcessors(model.config).eval()
    own.load_state_dict(model.state_dict())
    expected, _ = run(own, num_beams=num_beams)
    for custom in ({}, {"custom_generate": generate}):
        with fused_decoding(own, whole_step=False):
            found, steps = run(own, num_beams=num_beams, **custom)
        assert torch.equal(found, expected)
        assert steps == (0, STEPS, {"logits processors in a SecondHalf": STEPS})


class UsersChoice(transformers.LlamaForCausalLM):
    """Chooses the continuations by scores of its own, through the hook of transformers' loop for that."""

    def _get_top_k_continuations(self, accumulated_log_probs, **options):
        assert type(accumulated_log_probs) is Tensor
        return super()._get_top_k_continuations(accumulated_log_probs=-(2 // accumulated_log_probs), **options)


def test_a_users_choice_of_continuations_gets_plain_scores(model):
    own = UsersChoice(model.config).eval()
    own.load_state_dict(model.state_dict())
    expected, _ = run(own, num_beams=3)
    with fused_decoding(own, whole_step=False):
        found, steps = run(own, num_beams=3)
        assert torch.equal(found, expected)
        assert steps == (0, STEPS, {"_get_top_k_continuations of UsersChoice": STEPS})
        assert run(own)[1] == (STEPS, 0, {})


# What the loop computes on, for loops to come.

LEFT_OUT = {
    # Of the class or of Python.
    *[
        "__annotations__",
        "__dict__",
        "__weakref__",
        "__module__",
        "__doc__",
        "__slots__",
        "__torch_dispatch__",
        "__setstate__",
    ],
    # Python 2's.
    *["__div__", "__rdiv__", "__idiv__", "__long__", "__nonzero__"],
}


def lazy_scores():
    logits = torch.randint(1, 9, (3, 211), generator=torch.Generator().manual_seed(0)).float()
    return LazyScores.of(Rows(logits, fused_topk.backends.cpu), of := logits.unsqueeze(1)), logits, of


def test_a_stand_in_has_all_that_a_tensor_has():
    scores, logits, _ = lazy_scores()
    names = {name for name in dir(Tensor) if name.startswith("__")} - set(dir(object)) - LEFT_OUT
    missing = {name for name in names if hasattr(logits, name) and not hasattr(scores, name)}
    assert not missing
    # Python looks operators up on the class.
    operators = {name for kind in (int, float, complex, list, dict, set) for name in dir(kind)} & names
    assert all(hasattr(LazyScores, name) for name in operators)
    assert all(hasattr(LazyScores, name) for name in names if name.startswith(("__i", "__r")))


@pytest.mark.parametrize(
    "use",
    [
        lambda x: 2 // x,
        lambda x: 2 % x,
        lambda x: np.float32(2) * x,
        lambda x: +x,
        lambda x: x.__ifloordiv__(2),
        lambda x: torch.eye(3) @ x,
        lambda x: torch.from_numpy(np.eye(3, dtype=np.float32) @ x.numpy()),
        lambda x: torch.stack(list(reversed(x))),
        copy.copy,
        copy.deepcopy,
        saved,
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: torch.from_dlpack(x),
        lambda x: torch.vmap(torch.neg)(x + 0),
    ],
)
def test_an_operation_on_a_stand_in_is_that_on_its_tensor(use):
    scores, logits, of = lazy_scores()
    found = use(scores)
    assert type(found) is Tensor
    assert torch.equal(found, use(logits.clone()))
