# SPDX-License-Identifier: Apache-2.0
"""The states of a row's parts, and their merge: equal to the unsharded call, whatever the parts."""

import itertools
import random

import pytest
import torch
from torch import Tensor

import fused_topk
from fused_topk import TopK, TopKState
from fused_topk.operators.merging import merge_parts
from fused_topk.rows import LogitRows
from oracle import DTYPES, VALUES_OF, assert_same, assert_topk, expected
from rows import INF, NAN, adversarial_rows, packed, random_logits, random_mask
from test_autograd import distinct

ENTRIES = tuple(VALUES_OF)
# Where a row of 300 is cut: in halves, unequally, into tokens of their own, with parts that are shorter than k.
CUTS = {"one": [], "halves": [150], "unequal": [7, 8, 250], "short_parts": [3, 6, 9, 290], "at_words": [32, 96, 256]}


def split(logits: Tensor, cuts: list[int]) -> list[tuple[int, Tensor]]:
    """(start, columns) of each part."""
    starts = [0, *cuts]
    return list(zip(starts, logits.tensor_split(cuts, -1), strict=True))


def states(backend, logits: Tensor, k: int, cuts: list[int], *, mask=None, start: int = 0, **settings):
    """The state of each part."""
    found = []
    for first, part in split(logits, cuts):
        of_part = mask
        if mask is not None and mask.dtype == torch.bool:
            of_part = mask[..., first : first + part.shape[-1]]
        elif mask is not None:
            of_part = mask[..., first // 32 : (first + part.shape[-1] + 31) // 32]
        found.append(backend("topk_state", part, k, start=start + first, mask=of_part, **settings))
    return found


def merged(
    backend, entry: str, logits: Tensor, k: int, cuts: list[int], *, temperature=1.0, normalize="allowed", **how
):
    parts = states(backend, logits, k, cuts, temperature=temperature, normalize=normalize, **how)
    return backend("merge_topk", parts, k, kind=VALUES_OF[entry], temperature=temperature, normalize=normalize)


def assert_same_state(got: TopKState, want: TopKState, tolerance: float = 0.0) -> None:
    """The candidates bit for bit but for NaNs, m but for the sign of a zero, d within the relative tolerance."""
    assert_same(TopK(got.logits, got.indices, got.m + 0.0), TopK(want.logits, want.indices, want.m + 0.0))
    torch.testing.assert_close(got.d, want.d, rtol=tolerance, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("k", [1, 40, 300])
def test_merge_is_the_unsharded_call(backend, entry, dtype, cuts, k):
    """On all adversarial rows: NaN and infinities, ties across the parts, zeros of both signs."""
    rows = adversarial_rows(300, k, DTYPES[dtype])
    logits = torch.stack(list(rows.values())).to(backend.device)
    got = merged(backend, entry, logits, k, CUTS[cuts])
    assert_topk(got, expected(entry, logits, k), logits, entry, row_names=list(rows))


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("normalize", ["allowed", "all", "topk"])
@pytest.mark.parametrize("temperature", [1.0, 0.7, "rows"], ids=str)
@pytest.mark.parametrize("kind", ["bool", "packed"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_merge_of_masked_parts(backend, cuts, normalize, temperature, kind, dtype):
    """A mask is cut where the parts are. Some rows allow a single part, fewer than k tokens, or nothing."""
    if kind == "packed" and cuts not in ("one", "at_words"):
        pytest.skip("words of 32 tokens are not cut")
    logits = random_logits(8, 300, dtype=DTYPES[dtype]).to(backend.device)
    mask = random_mask(8, 300, share=0.6)
    mask[1] = False
    mask[2, :250] = False
    mask[3, 256:] = False
    mask[4] = torch.arange(300) == 299
    mask = (packed(mask) if kind == "packed" else mask).to(backend.device)
    t = torch.linspace(0.3, 2.0, 8, device=backend.device) if temperature == "rows" else temperature
    settings = {"temperature": t, "normalize": normalize, "mask": mask}
    for entry in ("softmax_topk", "log_softmax_topk"):
        got = merged(backend, entry, logits, 9, CUTS[cuts], **settings)
        assert_topk(got, expected(entry, logits, 9, **settings), logits, entry, temperature=t)


@pytest.mark.parametrize("backend_of_parts", ["cpu", "reference"])
def test_normalize_topk_of_states_of_the_whole(cpu, backend_of_parts):
    """The hidden tokens are so great that the chosen would vanish relative to them."""
    logits = random_logits(3, 300)
    mask = torch.ones(300, dtype=torch.bool)
    mask[[5, 200]] = False
    logits[:, ~mask] = 1000.0
    parts = [
        fused_topk.topk_state(
            x, 4, start=start, mask=mask[start : start + 100], normalize="all", backend=backend_of_parts
        )
        for start, x in split(logits, [100, 200])
    ]
    want = fused_topk.log_softmax_topk(logits, 4, mask=mask, normalize="topk")
    for backend in ("cpu", "reference"):
        got = fused_topk.merge_topk(parts, 4, kind="log_softmax", normalize="topk", backend=backend)
        torch.testing.assert_close(got.values, want.values)
        assert torch.equal(got.indices, want.indices)


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
def test_log_probabilities_lose_nothing_to_an_offset(backend, offset):
    """Within 2e-6 of float64, of the same rounded logits, for 16 parts of 8192."""
    logits = (random_logits(4, 131072) + offset).to(backend.device)
    cuts = list(range(8192, 131072, 8192))
    got = merged(backend, "log_softmax_topk", logits, 8, cuts)
    want = expected("log_softmax_topk", logits, 8)
    assert torch.equal(got.indices, want.indices)
    assert float((got.values.double() - want.values).abs().max()) < 2e-6


def random_states(backend, parts: int, dtype=torch.bfloat16, **settings) -> list[TopKState]:
    """Of rows in which equal logits lie in several parts."""
    logits = (random_logits(5, 64 * parts) / 4).round().to(dtype).to(backend.device)
    return states(backend, logits, 9, list(range(64, 64 * parts, 64)), **settings)


# d is a sum of float32: a merge rounds a term three times and the sum once, or twice by ex2.approx (2^-22).
D_TOLERANCE = 2e-6


def test_identity(backend):
    """A part in which nothing counts changes nothing."""
    (part,) = random_states(backend, 1)
    hidden = torch.full((5, 40), -INF, dtype=torch.bfloat16, device=backend.device)
    nothing, nothing_else = (backend("topk_state", hidden, 9, start=start) for start in (64, 104))
    assert torch.equal(nothing.d, torch.zeros_like(nothing.d)) and torch.equal(nothing.m, nothing.d - INF)
    for parts in ([part], [part, nothing], [nothing, part], [nothing, part, nothing_else]):
        assert_same_state(backend("merge_states", parts, 9), part)
    assert_same_state(backend("merge_states", [nothing_else, nothing], 9), nothing)


def test_commutativity_and_associativity(backend):
    """Exact for T and m, to rounding for d."""
    parts = random_states(backend, 5, temperature=0.5)
    whole = backend("merge_states", parts, 9, temperature=0.5)
    for order in itertools.islice(itertools.permutations(parts), 0, 120, 7):
        assert_same_state(backend("merge_states", order, 9, temperature=0.5), whole, D_TOLERANCE)
    generator = random.Random(0)
    for _ in range(10):
        pool = list(parts)
        while len(pool) > 1:
            pair = [pool.pop(generator.randrange(len(pool))) for _ in range(2)]
            pool.append(backend("merge_states", pair, 9, temperature=0.5))
        assert_same_state(pool[0], whole, D_TOLERANCE)


def test_merge_is_the_same_in_every_batch(backend):
    """Bit for bit, d included."""
    parts = random_states(backend, 7, torch.float32)
    whole = backend("merge_states", parts, 9)
    for row in range(5):
        of_row = [TopKState(*(x[row] for x in part)) for part in parts]
        assert_same_state(backend("merge_states", of_row, 9), TopKState(*(x[row] for x in whole)))


@pytest.mark.parametrize("start", [0, 2**24 - 3, 2**31 - 150, 2**40])
def test_tokens_beyond_the_integers_of_float32_and_int32(backend, start):
    """Ties go to the smaller token, whatever the order of the parts."""
    logits = torch.full((2, 300), 1.0, device=backend.device)
    logits[0, 200] = 2.0
    logits[1, [0, 150, 299]] = NAN
    parts = states(backend, logits, 20, [100, 150], start=start)
    want = expected("topk", logits, 20).indices + start
    for order in itertools.permutations(parts):
        assert torch.equal(backend("merge_topk", order, 20, kind="logits").indices, want)


def test_k_beyond_the_parts(backend):
    """A state keeps what there is; whole rows must have k tokens."""
    parts = states(backend, random_logits(2, 12, device=backend.device), 50, [5])
    assert [part.indices.shape[-1] for part in parts] == [5, 7]
    assert backend("merge_states", parts, 50).indices.shape == (2, 12)
    with pytest.raises(ValueError, match="`k` must satisfy 1 <= k <= 12"):
        backend("merge_topk", parts, 13)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", ["softmax", "logits", "state"])
def test_parts_of_one_buffer_are_merged_in_place(backend, values, dtype):
    """As a collective leaves them: strided, with indices from each part's start, and with entries that are no candidates."""
    rows, parts, width, k = 6, 4, 8, 9
    logits = random_logits(rows, parts * 20, dtype=DTYPES[dtype]).to(backend.device)
    lengths = torch.tensor([20, 3, 37, 20], dtype=torch.int32)
    cuts = [20, 23, 60]
    wide = torch.empty(parts, rows, 2, width, dtype=DTYPES[dtype]).to(backend.device).fill_(NAN)[:, :, 1]
    tokens = torch.full((parts, rows, 3, width), -1, device=backend.device)[:, :, 1]
    m, d = torch.zeros(2, rows, parts, 5, device=backend.device)[..., 2].transpose(1, 2)
    for part, (_, x) in enumerate(split(logits, cuts)):
        state = backend("topk_state", x, width)
        held = state.indices.shape[-1]
        wide[part, :, :held], tokens[part, :, :held] = state.logits, state.indices
        m[part], d[part] = state.m, state.d
    spread = lengths.unsqueeze(-1).expand(4, 3).contiguous().to(backend.device)[:, 1]
    got = merge_parts(wide, tokens, m, d, spread, k, 1.0, None, values, "allowed", backend.name)
    if values == "state":
        want = backend("topk_state", logits, k)
        assert_same_state(TopKState(got[0], got[1], *got[2]), want, D_TOLERANCE)
    else:
        entry = "topk" if values == "logits" else "softmax_topk"
        assert_topk(TopK(*got), expected(entry, logits, k), logits, entry)


def test_missing_candidates_are_marked(backend):
    """Where the lists hold fewer than k: -inf with the index -1."""
    logits = torch.tensor([[[1.0, 0.0]], [[-INF, NAN]]], device=backend.device)
    indices = torch.tensor([[[0, 1]], [[0, -1]]], device=backend.device)
    m, d = logits[..., 0], torch.tensor([[1.5], [0.0]], device=backend.device)
    lengths = torch.tensor([2, 1], dtype=torch.int32, device=backend.device)
    best, tokens, _ = merge_parts(logits, indices, m, d, lengths, 4, 1.0, None, "logits", "allowed", backend.name)
    assert best.tolist() == [[1.0, 0.0, -INF, -INF]] and tokens.tolist() == [[0, 1, 2, -1]]


# As citizens of torch.


@pytest.mark.parametrize("values", ["softmax", "log_softmax", "logits", "state"])
@pytest.mark.parametrize("normalize", ["allowed", "topk"])
@pytest.mark.parametrize("temperature", [1.0, 0.7, "rows"], ids=str)
def test_merge_gradcheck(values, normalize, temperature):
    """With respect to the candidates and to (m, d) of every part, as if these were independent."""
    t = torch.tensor([0.6, 1.7], dtype=torch.float64) if temperature == "rows" else temperature
    parts = states(lambda entry, *a, **kw: getattr(fused_topk, entry)(*a, **kw), distinct(2, 9).detach(), 3, [3, 5])

    def run(*tensors):
        live = [part._replace(logits=a, m=b, d=c) for part, a, b, c in zip(parts, *[iter(tensors)] * 3, strict=True)]
        if values == "state":
            return (
                fused_topk.merge_states(live, 4, temperature=t)[:4:2]
                + fused_topk.merge_states(live, 4, temperature=t)[3:]
            )
        result = fused_topk.merge_topk(live, 4, kind=values, temperature=t, normalize=normalize)
        return result.values, result.logsumexp

    inputs = [x.clone().requires_grad_() for part in parts for x in (part.logits, part.m, part.d)]
    torch.autograd.gradcheck(run, inputs)


def test_a_hidden_token_passes_on_no_gradient(backend):
    """Where fewer tokens are allowed than k, hidden ones are among the candidates, with the constant -inf."""
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]], device=backend.device, requires_grad=True)
    mask = torch.tensor([True, False, False, False], device=backend.device)
    state = backend("topk_state", logits, 3, mask=mask)
    merged = fused_topk.merge_topk([state], 3, kind="logits", backend=backend.name)
    for values in (backend("topk", logits, 3, mask=mask).values, state.logits, merged.values):
        (gradient,) = torch.autograd.grad(values, logits, torch.ones_like(values), retain_graph=True)
        assert gradient.tolist() == [[1.0, 0.0, 0.0, 0.0]]


@pytest.mark.filterwarnings("error")
def test_a_gradient_of_lists_of_one_entry_warns_of_nothing(backend):
    logits = random_logits(3, 8, device=backend.device).requires_grad_()
    parts = [backend("topk_state", part, 1, start=start) for part, start in ((logits[:, :4], 0), (logits[:, 4:], 4))]
    fused_topk.merge_topk(parts, 1, kind="logits", backend=backend.name).values.sum().backward()
    assert torch.equal(logits.grad, torch.nn.functional.one_hot(logits.argmax(-1), 8).float())


def test_what_an_operator_must_not_be_given(backend):
    """What no public function passes on: it would be read as something else, or not at all."""
    logits = random_logits(3, 40, device=backend.device)
    of_rows = torch.ones(3, dtype=torch.float64, device=backend.device)
    with pytest.raises(TypeError, match=r"`row_temperature` must be torch\.float32"):
        torch.ops.fused_topk.row_topk(
            *LogitRows(logits, row_temperature=of_rows), 4, "softmax", "allowed", backend.name
        )
