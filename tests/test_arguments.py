# SPDX-License-Identifier: Apache-2.0
"""Every argument is checked, and every error has one form: `argument` rule, value; remedy."""

import numpy as np
import pytest
import torch

import fused_topk
import fused_topk.distributed
from fused_topk import TopK
from oracle import assert_same
from rows import packed, random_logits, random_mask

ROW_ENTRIES = ("softmax_topk", "log_softmax_topk", "topk")
NORMALIZED = ("softmax_topk", "log_softmax_topk")


def call(entry: str, logits, k=2, **kwargs) -> TopK:
    """beam_topk is given scores of zero."""
    if entry == "beam_topk":
        scores = kwargs.pop("beam_scores") if "beam_scores" in kwargs else logits.new_zeros(logits.shape[:2])
        return fused_topk.beam_topk(logits, scores, k, **kwargs)
    return getattr(fused_topk, entry)(logits, k, **kwargs)


def assert_raises(error: type[Exception], argument: str, entry: str, *args, **kwargs) -> str:
    with pytest.raises(error) as caught:
        call(entry, *args, **kwargs)
    message = str(caught.value)
    assert type(caught.value) is error
    # The name of the argument or of a part of it, a rule, and after a semicolon what to do.
    assert message.startswith((f"`{argument}`", f"`{argument}.")), message
    rule, _, remedy = message.partition("; ")
    assert " must " in rule, message
    assert remedy, f"no remedy: {message}"
    return message


def logits_for(entry: str, *, vocab_size: int = 10, **kwargs) -> torch.Tensor:
    return random_logits(2, 3, vocab_size, **kwargs)


@pytest.mark.parametrize("entry", [*ROW_ENTRIES, "beam_topk"])
class TestEveryEntry:
    def test_k_of_numpy(self, entry):
        logits = logits_for(entry)
        assert_same(call(entry, logits, np.int64(2)), call(entry, logits, 2))

    def test_logits_of_a_subclass(self, entry):
        class Tagged(torch.Tensor):
            pass

        logits = logits_for(entry)
        for special in (logits.as_subclass(Tagged), torch.nn.Parameter(logits)):
            want = call(entry, logits)
            got = type(want)(*(x.detach().as_subclass(torch.Tensor) for x in call(entry, special)))
            assert_same(got, want)

    def test_logits_with_a_lazy_sign(self, entry):
        """A view that torch negates when it is read."""
        logits = logits_for(entry)
        lazy = torch.complex(torch.zeros_like(logits), -logits).conj().imag
        assert lazy.is_neg()
        assert_same(call(entry, lazy), call(entry, logits))

    def test_backend_of_another_device(self, entry):
        """Refused, and not quietly replaced: with a GPU for the device of the logits, without one for its absence."""
        with pytest.raises((ValueError, RuntimeError), match="cuda"):
            call(entry, logits_for(entry), backend="cuda")

    @pytest.mark.parametrize("kind", ["added", "ones", "int64", "uint8", "uint32"])
    def test_mask_as_the_error_advises(self, entry, kind):
        """What it says to pass has the meaning of the mask."""
        logits, allowed = logits_for(entry), random_mask(10)
        mask = {
            "added": torch.zeros(10).masked_fill(~allowed, -torch.inf),
            "ones": allowed.float(),
            "int64": allowed.long(),
            "uint8": allowed.byte(),
            "uint32": packed(allowed).view(torch.uint32),
        }[kind]
        message = assert_raises(TypeError, "mask", entry, logits, mask=mask)
        advised = {"added": "mask == 0", "uint32": "mask.view(torch.int32)"}.get(kind, "mask.bool()")
        assert advised in message
        got = call(entry, logits, mask=eval(advised, {"mask": mask, "torch": torch}))
        assert_same(got, call(entry, logits, mask=allowed))


@pytest.mark.parametrize("entry", [*NORMALIZED, "beam_topk"])
class TestNormalizedEntries:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
    def test_temperature_of_another_floating_dtype(self, entry, dtype):
        logits = logits_for(entry)
        assert_same(
            call(entry, logits, temperature=torch.full((3,), 0.5, dtype=dtype)), call(entry, logits, temperature=0.5)
        )


@pytest.mark.parametrize("entry", ROW_ENTRIES)
class TestRowEntries:
    def _out(self, entry) -> list[torch.Tensor]:
        return list(call(entry, logits_for(entry)))

    def test_out_overlapping_the_logits(self, entry):
        buffer = torch.zeros(200)
        logits = buffer[:60].view(2, 3, 10)
        _, *others = self._out(entry)
        for start in (0, 30, 59):
            values = buffer[start : start + 12].view(2, 3, 2)
            assert_raises(ValueError, "out", entry, logits, out=(values, *others))
        call(entry, logits, out=(buffer[60:72].view(2, 3, 2), *others))

    def test_out_overlapping_other_arguments(self, entry):
        indices = torch.zeros(2, 3, 2, dtype=torch.int64)
        values, _, *others = self._out(entry)
        read = {"mask": indices.view(torch.bool).flatten()[40:50]}
        if entry in NORMALIZED:
            read["temperature"] = indices.view(torch.float32)[..., 1].fill_(1.0)
        for name, given in read.items():
            assert_raises(ValueError, "out", entry, logits_for(entry), out=(values, indices, *others), **{name: given})

    def test_out_overlapping_itself(self, entry):
        values, indices, *others = self._out(entry)
        buffer = torch.zeros(20)
        if others:
            shared = buffer[:12].view(2, 3, 2), indices, buffer[11:17].view(2, 3)
            assert_raises(ValueError, "out", entry, logits_for(entry), out=shared)
        expanded = torch.zeros(1, 1, 2).expand(2, 3, 2), indices, *others
        assert_raises(ValueError, "out", entry, logits_for(entry), out=expanded)

    def test_out_with_a_gradient(self, entry):
        assert_raises(ValueError, "out", entry, logits_for(entry).requires_grad_(), out=tuple(self._out(entry)))
        with torch.no_grad():
            call(entry, logits_for(entry).requires_grad_(), out=tuple(self._out(entry)))

    def test_nothing_is_written_when_an_argument_is_wrong(self, entry):
        out = TopK(torch.full((2, 3, 2), 7.0), torch.full((2, 3, 2), 7), torch.full((2, 3), 7.0, dtype=torch.float64))
        with pytest.raises(TypeError):
            call(entry, logits_for(entry), out=out)
        assert all((field == 7).all() for field in out)


def test_beam_topk_without_beams():
    """There is nothing to choose from, also in an empty batch."""
    for batch in (0, 2):
        scores = torch.zeros(batch, 0)
        assert_raises(ValueError, "logits", "beam_topk", torch.zeros(batch, 0, 10), beam_scores=scores)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_beam_topk_scores_of_another_dtype(backend, dtype):
    logits = random_logits(2, 3, 100, device=backend.device)
    scores = random_logits(2, 3, dtype=dtype, device=backend.device)
    assert_same(backend("beam_topk", logits, scores, 5), backend("beam_topk", logits, scores.float(), 5))


def test_automatic_backend_gives_the_same_answer(native):
    """Also beyond what the kernels take: float64 logits and a large k."""
    logits = random_logits(2, 5000, device=native.device)
    mask = random_mask(2, 5000, device=native.device)
    assert_same(fused_topk.softmax_topk(logits, 9, mask=mask), native("softmax_topk", logits, 9, mask=mask))
    for entry in ROW_ENTRIES:
        all_of_it, reference = call(entry, logits, 5000), call(entry, logits, 5000, backend="reference")
        assert torch.equal(all_of_it.indices, reference.indices)
        in_double = call(entry, logits.double(), 5000)
        assert torch.equal(in_double.indices, reference.indices)
        assert all(x.dtype == torch.float64 for x in in_double[::2])


def test_native_backend_refuses_float64(native):
    with pytest.raises((TypeError, ValueError), match="float64"):
        native("softmax_topk", random_logits(2, 10, dtype=torch.float64, device=native.device), 2)


def test_symbolic_trace_is_refused_with_what_works():
    with pytest.raises(TypeError, match=r"`logits` must be .* Proxy; .*torch\.compile"):
        torch.fx.symbolic_trace(lambda x: fused_topk.softmax_topk(x, 3))


def test_distributed_tensors_are_refused_with_what_works(tmp_path):
    distributed = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        logits = distribute_tensor(torch.randn(4, 100), init_device_mesh("cpu", (1,)), [Shard(1)])
        with pytest.raises(TypeError, match=r"`logits` must not be a DTensor.*full_tensor"):
            fused_topk.topk_state(logits, 3)
        with pytest.raises(TypeError, match=r"`logits` must not be a DTensor.*full_tensor"):
            fused_topk.token_logprobs(logits, torch.tensor([3, 0, 99, 7]))
    finally:
        distributed.destroy_process_group()


def test_errors_of_heads_name_their_own_arguments():
    hidden = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"`weight` must be on cpu, where the logits are, got meta"):
        fused_topk.linear_topk(hidden, torch.zeros(5, 4, device="meta"), 1)
    with pytest.raises(ValueError, match=r"`weight` must have at most 2\^31 - 1 entries"):
        fused_topk.linear_topk(hidden.to("meta"), torch.empty(2**31, 4, device="meta"), 1)
    with pytest.raises(ValueError, match=r"`weight` must have at least one entry"):
        fused_topk.linear_topk(hidden, torch.zeros(0, 4), 1)
    head = torch.nn.Linear(4, 5)
    with pytest.raises(TypeError, match=r"`weight` must be a torch.Tensor, got Linear; pass its parts \.weight"):
        fused_topk.linear_topk(hidden, head, 1)


def test_flags_of_numpy_are_told_from_bools():
    for call in (
        lambda flag: fused_topk.sample(torch.zeros(2, 4), kept=flag),
        lambda flag: fused_topk.router_topk(torch.zeros(2, 4), 1, renormalize=flag),
    ):
        with pytest.raises(TypeError, match="must be a bool, got a bool of NumPy; pass True or False"):
            call(np.bool_(True))


def test_mask_of_another_shape_with_the_vocabulary_elsewhere():
    with pytest.raises(ValueError, match=r"broadcast to \(5, 3, 100\), the shape of `logits` with the vocabulary last"):
        fused_topk.topk(torch.zeros(5, 100, 3), 2, dim=1, mask=torch.ones(7, 100, 3, dtype=torch.bool))


def test_k_is_named_only_where_it_is_too_large():
    with pytest.raises(ValueError, match=r"takes float32, float16 and bfloat16 logits, got torch.float64; leave"):
        fused_topk.softmax(torch.zeros(2, 5, dtype=torch.float64), backend="cpu")


@pytest.mark.parametrize(
    ("run", "error", "message"),
    [
        (lambda x: fused_topk.softmax_topk(x, 1, targets=x), TypeError, "`targets` is no argument of softmax_topk.*token_logprobs"),
        (lambda x: fused_topk.log_softmax_topk(x, 1, target_ties="last"), TypeError, "token_logprobs.*ties="),
        (lambda x: fused_topk.topk(x, 1, targets=x), TypeError, "`targets` is no argument of topk"),
        (lambda x: fused_topk.topk(x, 1, out=(x, x, x)), TypeError, r"`out` must be a tuple \(values, indices\), got tuple of 3"),
        (lambda x: fused_topk.topk(x, 1).logsumexp, AttributeError, "logsumexp is gone; call logsumexp"),
        (lambda x: fused_topk.linear_topk(x, x, 1, targets=x), TypeError, "linear_token_logprobs"),
        (lambda x: fused_topk.linear_softmax_topk(x, x, 1, targets=x), TypeError, "linear_token_logprobs"),
        (lambda x: fused_topk.linear_log_softmax_topk(x, x, 1, targets=x), TypeError, "linear_token_logprobs"),
        (lambda x: fused_topk.distributed.linear_topk(x, x, 1, start=0), TypeError, "linear_token_logprobs"),
        (lambda x: fused_topk.distributed.linear_softmax_topk(x, x, 1, start=0), TypeError, "linear_token_logprobs"),
        (lambda x: fused_topk.distributed.linear_log_softmax_topk(x, x, 1, start=0), TypeError, "linear_token_logprobs"),
        (lambda x: fused_topk.sample(x, truncated_log_probs=True), TypeError, 'write logprobs="kept"'),
        (lambda x: fused_topk.linear_sample(x, x, truncated_log_probs=True), TypeError, 'write logprobs="kept"'),
        (lambda x: fused_topk.distributed.sample(x, truncated_log_probs=True), TypeError, 'write logprobs="kept"'),
        (lambda x: fused_topk.sample(x, seed=0).log_probs, AttributeError, "write .logprobs"),
        (lambda x: fused_topk.router_topk(x, 1, normalize=True), TypeError, "write renormalize="),
        (lambda x: fused_topk.merge_topk([], 1, values="logits"), TypeError, "write kind="),
        (lambda x: fused_topk.warm_up((1, 9), masked=True), TypeError, "write mask=True"),
        (lambda x: fused_topk.warm_up((1, 9), ragged=True), TypeError, "write lengths=True"),
        (lambda x: fused_topk.warm_up((1, 9), targets=True), TypeError, "token_logprobs"),
        (lambda x: fused_topk.TargetTopK, AttributeError, "TokenLogprobs"),
        (lambda x: fused_topk.softmax_topk(x, 1, tmperature=1), TypeError, "`tmperature` is no argument of softmax_topk.*spelling"),
        (lambda x: fused_topk.nothing, AttributeError, "has no attribute 'nothing'"),
    ],
)  # fmt: skip
def test_names_that_are_gone_say_what_to_write_instead(run, error, message):
    with pytest.raises(error, match=message):
        run(torch.zeros(2, 2))
