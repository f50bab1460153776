# SPDX-License-Identifier: Apache-2.0
"""Captured whole steps, with a stand-in for the CUDA graph: the same calls on tensors that stay where they are.

What the device does late is late here too. test_whole_step_cuda.py has the real thing.
"""

import copy
import itertools
import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from captured import StandIn, Waits, as_on_a_gpu
from decoding import (  # noqa: F401
    TOLERANCE,
    Recorder,
    also,
    assert_same,
    assert_whole,
    generate_both,
    inputs_for,
    one_thread,
    stats,
    stock_gap,
)
from fused_topk.generation import fused_decoding
from fused_topk.generation.whole_step import entry, graphs, room
from multimodal import images_for, multimodal
from whole_steps import compiling, family, own_model, swaps  # noqa: F401

OPTIONS = {"max_new_tokens": 12, "eos_token_id": [5, 6, 7, 8], "output_scores": False}


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(StandIn, "made", 0)
    monkeypatch.setattr(StandIn, "replays", 0)


def assert_captured(model, inputs, **options):
    return assert_whole(model, inputs, kinds=["captured"], **{**OPTIONS, **options})


@pytest.mark.parametrize("num_beams", [1, 3, 4])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "GPT2"])
def test_captured_steps_give_the_stock_sequences(name, num_beams):
    crossed = compared = 0
    model = copy.deepcopy(family(name, 1))
    for length, most in ((6, 12), (9, 16), (6, 3), (7, 12), (4, 15), (8, 14), (1, 1)):
        inputs = inputs_for(model, 3, length, padding=min(2, length - 1))
        options = {"num_beams": num_beams, "num_return_sequences": num_beams, "max_new_tokens": most}
        # Of two candidates a rounding apart stock takes one in float32 and the other in float64.
        if stock_gap(model, inputs, **{**OPTIONS, **options}) > 2e-5:
            result = assert_captured(model, inputs, **options)
            compared += 1
            crossed += 0 if num_beams == 1 else swaps(result, num_beams)
    assert compared >= 4
    assert num_beams == 1 or crossed > 15
    # All are of one shape.
    assert StandIn.made == 1


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 1.0])
def test_steps_after_the_end_change_nothing(length_penalty, early_stopping, model):
    lengths = set()
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 14}
    for ends in (list(range(5, 40)), list(range(5, 90)), [5]):
        before = StandIn.replays
        own = {"eos_token_id": ends, "early_stopping": early_stopping, "length_penalty": length_penalty}
        result = assert_captured(model, inputs_for(model, 4), **options, **own)
        lengths.add(int((result["beam_indices"] >= 0).sum(1).max()))
        assert StandIn.replays - before + 1 <= 14
    assert len(lengths) > 1


def test_what_runs_in_vain_is_counted_neither_as_steps_nor_as_tokens(model):
    options = {**OPTIONS, "eos_token_id": list(range(5, 80)), "max_new_tokens": 30, "return_dict_in_generate": False}
    _, given, steps = generate_both(model, inputs_for(model), fused=fused_decoding, **options)
    assert given.shape[1] - 6 == steps.whole < 10
    assert StandIn.replays == steps.whole - 1 + graphs.LATENESS


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 4},
        {"output_scores": True},
        {"output_logits": True, "eos_token_id": list(range(5, 80))},
        {"output_scores": True, "repetition_penalty": 1.5, "eos_token_id": list(range(5, 80))},
        {"renormalize_logits": True, "repetition_penalty": 1.5},
    ],
    ids=lambda options: "-".join(options),
)
def test_calls_whose_choice_takes_more_capture_the_forward_pass(options, num_beams, model):
    assert_captured(model, inputs_for(model, 3, padding=2), num_beams=num_beams, **options)
    assert StandIn.made == 1 and StandIn.replays > 0


def test_a_clock_ends_a_call(model, monkeypatch):
    now = itertools.count()
    monkeypatch.setattr(time, "time", lambda: next(now))
    options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 60, "max_time": 12.0}
    for beams in (1, 3):
        with fused_decoding(model):
            assert 6 < model.generate(**inputs_for(model), num_beams=beams, **options).shape[1] < 6 + 60


def test_what_is_captured_is_kept_and_dropped(model, monkeypatch):
    monkeypatch.setattr(f"{entry.__package__}.store.MAX_SHAPES", 2)
    for beams in (2, 3, 4, 3):
        assert_captured(model, inputs_for(model), num_beams=beams)
    assert StandIn.made == 3
    store = entry._ready.get(model).store
    assert [shape.beams for shape in store._kept] == [4, 3]
    # A graph's own memory counts.
    sizes = [step.num_bytes - step.decoder.num_bytes for step in store._kept.values()]
    assert sizes == [1000, 1000]
    monkeypatch.setattr(f"{entry.__package__}.store.MAX_BYTES", 1)
    assert_captured(model, inputs_for(model), num_beams=2)
    assert [shape.beams for shape in store._kept] == [2]
    entry.drop(model)
    assert entry._ready.get(model) is None


def test_a_capture_that_fails(model, monkeypatch):
    def fail(run, device, beside):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "Graph", fail)
    for beams in (1, 3):
        stock, given, steps = generate_both(model, fused=fused_decoding, num_beams=beams, **OPTIONS)
        assert_same(stock, given, TOLERANCE)
        assert steps.whole == 0 and steps.stock > 0
        assert steps.reasons == {
            "a step that is to be captured raises RuntimeError: operation not permitted when stream is capturing": 1
        }


def test_what_cannot_be_compiled_is_captured_all_the_same(model, monkeypatch):
    def compile(function, **options):
        def fail(*args):
            raise OSError("no compiler")

        return fail

    monkeypatch.setattr(torch, "compile", compile)
    stock, given, steps = generate_both(model, fused=compiling, num_beams=3, **OPTIONS)
    assert_same(stock, given, TOLERANCE)
    assert steps.captured == steps.whole > 0 and steps.compiled == 0
    assert steps.reasons == {"a step that is to be compiled and captured raises OSError: no compiler": 1}


def test_a_step_for_longer_texts_serves_shorter_ones(model):
    for most, made in ((40, 1), (12, 1), (60, 2), (50, 2)):
        assert_captured(model, inputs_for(model), num_beams=3, max_new_tokens=most, early_stopping="never")
        assert StandIn.made == made
    # Not one for much longer texts: attention looks at places for all of them.
    options = {"num_beams": 3, "eos_token_id": None}
    assert_captured(model, inputs_for(model, 3), max_new_tokens=80, **options)
    assert StandIn.made == 4
    assert_captured(model, inputs_for(model, 3), max_new_tokens=10, **options)
    assert StandIn.made == 5


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("more", [{}, *also({"repetition_penalty": 1.5})], ids=["at-once", "forward-pass"])
def test_each_room_is_captured_once(more, num_beams, model, monkeypatch):
    monkeypatch.setattr(room, "FIRST", 4)
    options = {"num_beams": num_beams, "eos_token_id": None, "max_new_tokens": 60, **more}
    # With room for 4, 8, 16, 32 and 64 new tokens. Only the tensors of the last size stay. There 4 and 8 are captured anew, but
    # not 16: of sizes up to four times what is needed those that are there are taken.
    for made in (5, 7, 7):
        assert_captured(model, inputs_for(model), **options)
        assert StandIn.made == made
    assert_captured(model, inputs_for(model), **{**options, "max_new_tokens": 20})
    assert StandIn.made == 7


@pytest.mark.parametrize("num_beams", [1, 3])
def test_nothing_is_captured_after_the_end(num_beams, model, monkeypatch):
    """The host knows of the end some steps later: there is room for 16 tokens, which is full when it learns of it."""
    monkeypatch.setattr(room, "FIRST", 16)
    inputs = inputs_for(model, 1)
    text = model.generate(**inputs, num_beams=num_beams, do_sample=False, max_new_tokens=40, eos_token_id=None)[0, 6:]
    ends = next(t for t in range(13, 16) if text[t] not in text[:t])
    options = {"num_beams": num_beams, "eos_token_id": int(text[ends]), "max_new_tokens": 40}
    if num_beams > 1:
        options["early_stopping"] = True
    result = assert_captured(model, inputs, **options)
    if 12 < result["sequences"].shape[1] - 6 <= 16:
        assert StandIn.made == 1


@pytest.mark.parametrize("num_beams", [1, 3, "streamed"])
def test_the_loop_waits_for_nothing_but_the_late_flag(num_beams, model):
    waits = []
    for most in (6, 12):
        options = {"max_new_tokens": most, "eos_token_id": None, "do_sample": False}
        inputs = inputs_for(model)
        if num_beams == "streamed":
            options["streamer"], inputs = Recorder(), inputs_for(model, 1)
        else:
            options["num_beams"] = num_beams
        with fused_decoding(model):
            model.generate(**inputs, **options)
            stats(reset=True)
            with Waits() as counted:
                model.generate(**inputs, **options)
        assert stats().captured == most
        waits.append(counted.count)
    assert waits[0] == waits[1]


class Operations(TorchDispatchMode):
    """The names of what runs."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


def test_what_the_host_reads_is_on_a_cpu_whatever_the_users_default_device(monkeypatch):
    monkeypatch.undo()
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory, **options: empty(*args, **options))
    monkeypatch.setattr(torch.cuda, "Event", lambda: None)
    with torch.device("meta"):
        copy = graphs._Copy(torch.zeros(2))
        assert copy.flag.device.type == copy.tokens.device.type == "cpu"


def test_processes_of_a_group_wait_for_flags_no_longer_than_its_limit(monkeypatch):
    asked = []
    monkeypatch.setattr(graphs, "wait_for", lambda is_done, *of: asked.append((is_done(), *of)))
    flag = graphs.EndFlag(True, group="a group")
    goes_on = torch.tensor(True)
    for _ in range(graphs.LATENESS + 1):
        assert flag.goes_on(goes_on)
    assert flag.now(goes_on)
    assert asked == [(True, goes_on.device, "a group")] * 2


def test_a_number_is_filled_in_not_copied_from_the_host():
    """As in the masks and the slopes of models of transformers up to 5.18."""

    def numbers(like):
        made = [torch.tensor(number, device=like.device) for number in (0.5, 3, True)]
        return [*made, torch.tensor(0.5, dtype=torch.bfloat16)]

    like = torch.zeros(1)
    with Operations() as ran:
        found = graphs.Bound(numbers, (like,))()
    assert "full" in ran.names and "lift_fresh" not in ran.names
    for one, other in zip(numbers(like), found, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert graphs.Bound(torch.tensor, ([1, 2],))().tolist() == [1, 2]


def test_a_call_within_a_call_of_the_same_shape_runs_as_stock(model):
    inputs, found = inputs_for(model), []
    options = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None}

    def again(ids, scores):
        found.append(model.generate(**inputs, **options))
        return scores

    with fused_decoding(model):
        outer = model.generate(**inputs, **options, logits_processor=[again])
    assert len(found) == 6 and all(torch.equal(each, outer) for each in found)
    steps = stats(reset=True)
    assert steps.captured == 6 and steps.reasons == {"another call of the same shape runs": 6}


def test_calls_in_inference_mode_have_steps_of_their_own(model):
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            assert_captured(model, inputs_for(model), num_beams=3)
    assert StandIn.made == 2


@pytest.mark.parametrize(("name", "num_beams"), [("Qwen2VL", 3), *also(("Llava", 1), ("Gemma3", 3))])
def test_after_images(name, num_beams):
    model = multimodal(name)
    # Two images, then a prompt without one.
    for seed, has_images in ((0, True), (1, True), (2, False)):
        inputs = images_for(model, seed=seed, has_images=has_images)
        assert_whole(model, inputs, kinds=["captured"], num_beams=num_beams, max_new_tokens=12, output_scores=False)
