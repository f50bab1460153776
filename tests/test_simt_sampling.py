# SPDX-License-Identifier: Apache-2.0
"""The kernels of csrc/draws/sample_vocabulary.cu and csrc/draws/sample_rows.cu on the emulated machine: the draws, also with noise, and
every read and write checked."""

import math
from collections.abc import Callable
from itertools import product
from unittest import mock

import pytest
import torch
from torch import Tensor

from exact_draws import (
    BROAD,
    SETTINGS,
    broad_rows,
    check_draws,
    check_kept,
    check_sample,
    kept_weights,
    rows_cut_by_min_p,
    rows_of,
    uniforms,
)
from fused_topk import operators
from fused_topk.backends import cuda, philox
from fused_topk.layout import launch
from fused_topk.problem import Kept, Sample, SampleProblem, TopK, TopkProblem
from fused_topk.rows import LogitRows
from oracle import DTYPES
from rows import INF, NAN, also, packed, random_logits, random_mask
from simt import sanitized
from simt.emulate import emulated
from simt.launch import SCHEDULES, Array
from test_sampling_noise import check_winners, exponential, ties_and_odd_noise


def prepare_list(rows: LogitRows, k: int, device: torch.device) -> Callable[[LogitRows], TopK]:
    """What makes the list, as softmax_topk.cu does on a GPU: that kernel has tests of its own."""

    def run(rows: LogitRows) -> TopK:
        count, dtype = len(rows.logits), rows.logits.dtype
        # Zeros: the machine takes them for inputs of the launch.
        out = TopK(torch.zeros(count, k, dtype=dtype), torch.zeros(count, k, dtype=torch.int64), torch.zeros(2, count))
        operators.row_topk.reference(TopkProblem(rows, k, "state", "allowed"), out)
        return out

    return run


def draw(
    logits: Tensor,
    settings: dict,
    *,
    name_of=0,
    mask=None,
    lengths=None,
    num_samples=2,
    truncated=False,
    kept=False,
    logprobs=0,
    first_row=0,
    noise=None,
    longest=None,
    blocks=1,
    **how,
):
    """What a kernel draws, with all that the machine checks. name_of: the seed. longest: of the list. blocks: of a row."""
    rows = len(logits)

    def parameter(name, default, dtype=torch.float64):
        value = settings.get(name, default)
        return (0, value.to(dtype)) if isinstance(value, Tensor) else (value, None)

    number, of_rows = parameter("temperature", 1.0)
    of_seed = (0, name_of) if isinstance(name_of, Tensor) else (name_of, None)
    problem = SampleProblem(
        LogitRows(logits, temperature=number, row_temperature=of_rows, mask=mask, lengths=lengths),
        *parameter("top_k", 0, torch.int64),
        *parameter("top_p", 1.0),
        *parameter("min_p", 0.0),
        *of_seed,
        0,
        None,
        num_samples,
        logprobs,
        truncated,
        kept,
        first_row,
        noise,
    )
    topk = None
    if logprobs:
        shape = rows, logprobs
        topk = TopK(torch.empty(shape), torch.empty(shape, dtype=torch.int64), torch.empty(rows))
    of_kept = Kept(torch.empty(rows, dtype=torch.int64), torch.empty(rows)) if kept else None
    out = Sample(torch.empty(rows, num_samples, dtype=torch.int64), torch.empty(rows, num_samples), topk, of_kept)
    arrays = [Array("logits", logits, "input"), Array("tokens", out.tokens, "output")]
    arrays.append(Array("log_probs", out.logprobs, "output"))
    arrays += [Array(f"best {i}", x, "output") for i, x in enumerate(topk or ())]
    arrays += [Array(f"kept {i}", x, "output") for i, x in enumerate(of_kept or ())]
    arrays += [
        Array(f"parameter {i}", x, "input")
        for i, x in enumerate((*problem.rows[1:], *problem[1:]))
        if isinstance(x, Tensor)
    ]
    length = launch.sample_list_length

    def short(*arguments) -> int:
        return min(length(*arguments), longest or len(logits[0]))

    with (
        mock.patch.object(operators.sampling, "_prepare_list", prepare_list),
        mock.patch.object(cuda, "multiprocessors", lambda device: 132),
        mock.patch.object(launch, "summing_blocks", lambda *_: blocks),
        mock.patch.object(launch, "searching_blocks", lambda *_: blocks),
        mock.patch.object(launch, "sample_list_length", short),
        emulated(arrays, **how) as outcomes,
    ):
        operators.sampling.prepare_cuda(problem, logits.device)(problem, out)
    outcomes[0].check()
    return out


CASES = {
    **SETTINGS,
    "each_its_own": {
        "temperature": torch.tensor([1.0, 0.0, 0.5, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        "top_k": torch.tensor([0, 3, 0, 5, 0, 700, 0, 2, 0, 0]),
        "top_p": torch.tensor([1.0, 1.0, 0.5, 0.9, 0.3, 0.9, 1.0, 1.0, 1.0, 0.5]),
        "min_p": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0]),
    },
}


def check_noise(logits: Tensor, settings: dict, mask: Tensor | None = None, **how) -> None:
    """That every row's token is the winner with some noise. how: as of draw()."""
    noise = exponential(*logits.shape)
    got = draw(logits, settings, noise=noise, num_samples=1, mask=mask, **how)
    check_winners(got.tokens, noise, logits, settings, mask)


def check_case(
    name: str, dtype: torch.dtype, vocab_size: int, longest: int | None, has_noise: bool = False, **how
) -> None:
    """That every row's tokens are those of the exact sums. how: as of draw()."""
    settings = CASES[name]
    logits = rows_of(vocab_size, dtype)
    if has_noise:
        return check_noise(logits, settings, longest=longest, **how)
    seed = torch.arange(len(logits)) + 3
    got = draw(logits, settings, name_of=seed, longest=longest, **how)
    check_sample(got, seed, logits, settings)
    own = logits.double().log_softmax(-1).gather(1, got.tokens)
    torch.testing.assert_close(got.logprobs.double(), own, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(("longest", "blocks"), [(None, 1), (5, 1), (5, 3)], ids=["listed", "searched", "by_blocks"])
@pytest.mark.parametrize("has_noise", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_draws(name, longest, blocks, has_noise):
    """With a list of 5 nearly every filter keeps more than is listed."""
    turn = list(CASES).index(name)
    dtype = list(DTYPES.values())[turn % 3]
    how = {"blocks": blocks, "schedule": SCHEDULES[turn % len(SCHEDULES)], "seed": turn}
    check_case(name, dtype, 777, longest, has_noise, **how)


@pytest.mark.exhaustive
@pytest.mark.parametrize("has_noise", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_of_blocks_that_share_a_row(schedule, has_noise):
    """Those that hand over their parts, and those that wait for each other: for the sum, for each digit of the border, for the
    tokens that tie with it, and for what is kept."""
    for name, dtype in (
        ("temperature", torch.bfloat16),
        ("top_p_min_p", torch.float32),
        ("each_its_own", torch.float16),
    ):
        check_case(name, dtype, 3001, 4, has_noise, blocks=4, schedule=schedule, seed=5)


def check_broad(
    name: str, dtype: torch.dtype, vocab_size: int, rows: slice = slice(None), has_noise: bool = False, **how
) -> None:
    """As check_case(), of rows of which no list has what is kept: the tokens, and what they are drawn from."""
    settings, logits = BROAD[name], broad_rows(vocab_size, dtype)[rows]
    if has_noise:
        return check_noise(logits, settings, **how)
    seed = torch.arange(len(logits)) + 3
    got = draw(logits, settings, name_of=seed, kept=True, **how)
    check_sample(got, seed, logits, settings)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("most", "likely") else pytest.mark.exhaustive) for name in BROAD],
)
@pytest.mark.parametrize("has_noise", [False, True])
def test_broad_rows(name, has_noise):
    turn = list(BROAD).index(name)
    dtype, blocks = list(DTYPES.values())[turn % 3], 1 + turn % 2
    rows = slice(0, 4) if name in ("most", "likely") else slice(None)
    how = {"blocks": blocks, "schedule": SCHEDULES[turn % len(SCHEDULES)], "seed": turn}
    check_broad(name, dtype, 2100, rows, has_noise, **how)


@pytest.mark.parametrize("blocks", [1, 2])
def test_min_p_cuts_near_the_border_of_top_p(blocks):
    """Among the tokens that are listed, and in the bins beside them."""
    logits, settings = rows_cut_by_min_p(2100)
    got = draw(logits, settings, kept=True, num_samples=20, blocks=blocks)
    weights = kept_weights(logits, settings)
    assert got.kept.counts.tolist() == (weights > 0).sum(1).tolist()
    assert bool((weights.gather(1, got.tokens) > 0).all())
    sums = weights.sum(1).log() + logits.double().amax(1)
    torch.testing.assert_close(got.kept.logsumexp.double(), sums, rtol=0, atol=2e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_broad_rows_that_are_counted_again(schedule):
    """More tokens than a block can list are between the bounds: they are counted by finer bins, until all are equal."""
    for turn, name in enumerate(("half", "all_but_the_least", "of_many", "many")):
        dtype = list(DTYPES.values())[(turn + SCHEDULES.index(schedule)) % 3]
        check_broad(name, dtype, 9001, blocks=1 + 2 * (turn % 2), schedule=schedule, seed=turn)


@pytest.mark.exhaustive
def test_broad_rows_of_pieces_of_several_reads():
    for name in ("most", "likely", "of_many"):
        check_broad(name, torch.float32, 140_000, blocks=2, schedule="random")


@pytest.mark.parametrize("blocks", [1, 2])
def test_kept_of_whole_rows(blocks):
    """All but -inf and what a mask hides."""
    logits = rows_of(2500)
    mask = random_mask(len(logits), 2500, share=0.5)
    for name in ("whole", "temperature", "top_k", "top_p"):
        got = draw(logits, SETTINGS[name], mask=mask, kept=True, blocks=blocks, name_of=torch.arange(len(logits)))
        has_any = (logits.masked_fill(~mask, -INF) > -INF).any(1)
        check_kept(Kept(*(x[has_any] for x in got.kept)), logits[has_any], SETTINGS[name], mask[has_any])


def test_blocks_do_not_change_the_bits():
    """Of tokens and of their log-probabilities: sums are of integers, and parts are cut by the length of the row alone."""
    logits = rows_of(2500, torch.bfloat16)[[0, 2, 3]]
    names = {"name_of": torch.arange(3)}, {"noise": exponential(3, 2500), "num_samples": 1}
    for name, truncated, of_draws in product(("temperature", "top_p_of_almost_all"), (False, True), names):
        given = {"truncated": truncated, "longest": 5, **of_draws}
        one, several = (draw(logits, CASES[name], blocks=blocks, **given) for blocks in (1, 3))
        assert torch.equal(one.tokens, several.tokens)
        assert torch.equal(one.logprobs.view(torch.int32), several.logprobs.view(torch.int32))


@pytest.mark.parametrize("name", ["whole", "usual"])
def test_rows_that_follow_others_of_the_seed(name):
    logits = rows_of(300)
    whole = draw(logits, SETTINGS[name], name_of=8)
    rest = draw(logits[5:], SETTINGS[name], name_of=8, first_row=5)
    assert torch.equal(rest.tokens, whole.tokens[5:])
    again = draw(logits[5:], SETTINGS[name], name_of=8)
    assert not torch.equal(rest.tokens, again.tokens)


def test_long_parts(monkeypatch):
    """As of rows beyond a million tokens: a warp reads a part in several steps."""
    monkeypatch.setattr(launch, "_MOST_PARTS", 2)
    assert launch.part_length_log2(9001) == 13
    for blocks, has_noise in product((1, 2), (False, True)):
        check_case("temperature", torch.float32, 9001, None, has_noise, blocks=blocks)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("architecture", [75, 90])
@pytest.mark.parametrize("vocab_size", [1, 31, 9001])
@pytest.mark.parametrize("has_noise", [False, True])
def test_formats_and_lengths(vocab_size, architecture, dtype, has_noise):
    for name in ("whole", "temperature", "usual", "top_p_min_p"):
        how = {"blocks": 2 if name == "temperature" else 1, "schedule": "random", "architecture": architecture}
        check_case(name, dtype, vocab_size, 7, has_noise, **how)


def test_masks_lengths_strides_and_many_samples():
    """Rows that start at any multiple of their elements' size."""
    logits = rows_of(500).repeat(1, 2)[:4, 3:503]
    halves = rows_of(1500, torch.bfloat16).repeat(1, 2)
    for start in range(8):
        given = halves[:, start : start + 1500]
        got = draw(given, SETTINGS["temperature"], name_of=torch.arange(10))
        check_draws(got.tokens, uniforms(torch.arange(10), 2), kept_weights(given, SETTINGS["temperature"]))
    mask, lengths, seed = random_mask(4, 500, share=0.2), torch.tensor([500, 333, 77, 2]), torch.arange(4)
    mask[:, 0] = True
    is_there = torch.arange(500) < lengths.unsqueeze(1)
    # What is behind a row's end is not looked at.
    shown, given = logits.clone(), logits.copy_(logits.masked_fill(~is_there, INF))
    for of_mask, name, blocks in product((None, mask, packed(mask)), ("whole", "usual", "top_p"), (1, 2)):
        how = {"mask": of_mask, "lengths": lengths, "num_samples": 40, "longest": 9, "blocks": blocks}
        got = draw(given, SETTINGS[name], name_of=seed, **how)
        counts = is_there if of_mask is None else is_there & mask
        check_draws(got.tokens, uniforms(seed, 40), kept_weights(shown, SETTINGS[name], counts))


@pytest.mark.parametrize("settings", [{"top_p": 0.5}, {"top_k": torch.tensor([1000, 1000])}], ids=["top_p", "top_k"])
def test_logits_whose_keys_are_the_greatest(settings):
    """A border near the end of the 32 bits."""
    logits = torch.full((2, 2000), 1e30)
    logits[1, ::2] = 2e30
    got = draw(logits, settings, longest=5, num_samples=8)
    assert got.tokens.min() >= 0 and got.tokens.max() < 2000
    if "top_p" in settings:
        assert (got.tokens[0] < 1000).all() and (got.tokens[1] % 2 == 0).all() and (got.tokens[1] < 1000).all()


@pytest.mark.parametrize(
    "settings", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": torch.tensor([1e9, 2.0, 1.5])}], ids=str
)
def test_parameters_beyond_what_a_cpu_takes(settings):
    """Those of a GPU's tensors are not looked at. A hidden token is never drawn, nor one behind the row's end."""
    logits = random_logits(3, 1001)
    mask = torch.ones(3, 1001, dtype=torch.bool)
    mask[1, 4:] = False
    mask[2, 500:] = False
    temperature = torch.tensor([torch.inf, torch.inf, 1e200], dtype=torch.float64)
    got = draw(logits, {"temperature": temperature, **settings}, mask=mask, num_samples=50)
    assert (got.tokens >= 0).all() and (got.tokens < 1001).all()
    assert mask.gather(1, got.tokens).all()
    if "min_p" in settings:
        assert got.tokens[0].unique().numel() == 1


def test_rows_without_a_distribution():
    rows = torch.randn(5, 100, generator=torch.Generator().manual_seed(1))
    rows[0, 3], rows[1, 4], rows[2] = NAN, INF, -INF
    mask = torch.ones(5, 100, dtype=torch.bool)
    mask[3] = False
    temperature = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0])
    noises = {}, {"noise": exponential(5, 100), "num_samples": 1}
    for truncated, top_p, blocks, noise in product((False, True), (0.5, 1.0), (1, 2), noises):
        given = {"temperature": temperature, "top_p": top_p}
        got = draw(rows, given, mask=mask, truncated=truncated, blocks=blocks, **noise)
        assert got.tokens[:, 0].tolist() == [3, 4, 0, 0, int(rows[4].argmax())]
        assert bool(got.logprobs[:4].isnan().all()) and bool(got.logprobs[4].isnan().all()) == truncated


def test_greedy_rows_of_the_vocabulary():
    """The first of equal tokens, wherever its part is, and 0 or its own log-probability."""
    logits = torch.zeros(3, 3000)
    logits[0, 2500] = logits[0, 2700] = 1.0
    logits[1, 1023] = logits[1, 1024] = 2.0
    own = logits.double().log_softmax(-1).amax(-1)
    for truncated in (False, True):
        got = draw(logits, {"temperature": 0.0}, truncated=truncated, blocks=2)
        assert got.tokens[:, 0].tolist() == [2500, 1023, 0]
        expected = torch.zeros(3) if truncated else own.float()
        torch.testing.assert_close(got.logprobs[:, 1], expected, rtol=2e-6, atol=2e-6)


def test_truncated_log_probabilities():
    logits = rows_of(600)[:4]
    for name in ("whole", "usual", "top_p", "min_p"):
        for longest in (None, 4):
            got = draw(logits, SETTINGS[name], truncated=True, longest=longest)
            weights = kept_weights(logits, SETTINGS[name])
            expected = (weights.gather(1, got.tokens) / weights.sum(1, keepdim=True)).log()
            torch.testing.assert_close(got.logprobs.double(), expected, rtol=1e-5, atol=1e-5)


def test_numbers_are_those_of_the_reference():
    """Bit for bit, of seeds and counters with all bits: csrc/draws/philox.h compiled for the GPU draws the same of equal logits."""
    logits = torch.zeros(3, 4096)
    for seed in (-1, 2**63 - 1, 0x123456789ABCDEF):
        got = draw(logits, {}, name_of=seed, num_samples=8)
        streams = torch.arange(3).unsqueeze(1)
        u = philox.uniforms(torch.tensor([[seed]]), torch.zeros(1, 1, dtype=torch.int64), streams, 8, torch.float64)
        assert torch.equal(got.tokens, (u * 4096).long())


@pytest.mark.exhaustive
def test_under_address_sanitizer():
    cases = [("usual", 4), ("top_p", 4), ("whole", None), ("temperature", 2), ("all", None)]
    done = sanitized.call("test_simt_sampling", "run_sanitized", cases)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]


def run_sanitized(name: str, longest: int | None) -> None:
    blocks = 2 if longest else 1
    check_case(name, torch.bfloat16, 333, longest, blocks=blocks, address_sanitizer=True, schedule="random")


@pytest.mark.parametrize(
    ("vocab_size", "top_k", "length"),
    [(1000, 50, 72), (1000, None, 128), (60, 50, 60), (1000, 0, 128), (10**6, 5000, 1024), (5, 7, 5)],
)
def test_list_length(vocab_size, top_k, length):
    assert launch.sample_list_length(vocab_size, top_k) == length


@pytest.mark.parametrize(
    ("top_k", "has_other_filter", "from_vocabulary"),
    [(0, False, True), (1000, False, True), (999, False, False), (0, True, False), (None, False, False)],
)
def test_which_draws_need_no_list(top_k, has_other_filter, from_vocabulary):
    assert launch.draws_from_vocabulary(1000, top_k, has_other_filter) == from_vocabulary


def test_blocks_of_a_row():
    """A part for each warp, and no more blocks that wait for each other than run at a time."""
    shapes = (1, 128256), (8, 32000), (8, 128256), (64, 128256), (256, 128256)
    assert [launch.summing_blocks(*shape, 132) for shape in shapes] == [16, 4, 16, 4, 1]
    assert [launch.searching_blocks(*shape, 0, 132) for shape in shapes] == [16, 7, 16, 4, 1]
    assert launch.searching_blocks(1, 128256, 50, 132) == 1
    assert launch.searching_blocks(1, 128256, None, 132) == 16
    for rows, vocab_size, count in product((1, 3, 100, 500), (1, 2048, 10**6, 2**31 - 1), (1, 40, 132)):
        blocks = launch.searching_blocks(rows, vocab_size, 2000, count)
        assert blocks == 1 or blocks * rows <= 2 * count
        assert vocab_size <= 1024 << launch.part_length_log2(vocab_size)
    assert launch.part_length_log2(2**20) == 10 and launch.part_length_log2(2**31 - 1) == 21


def test_sums_of_weights_fit_64_bits():
    for vocab_size in (1, 2**18, 2**31 - 1):
        unit = launch.sample_unit(vocab_size)
        assert unit * vocab_size < 2**62 and unit >= 2**30


def rows_with_ties_at_an_edge(bins_above: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a best token, 3000 equal ones and 100 of a little less, and a top_p that keeps half of the latter.

    bins_above: how far the equal ones are above the edge between their bin and that of the 100, in widths of a bin.
    """
    at = bins_above.double().unsqueeze(1)
    behind = torch.linspace(0.1, 0.9, 100, dtype=torch.float64)
    width = torch.full_like(at, 0.003)
    for _ in range(60):
        edge = (1 / width).floor() * width
        fall = torch.cat([torch.zeros_like(at), (edge - at * width).expand(-1, 3000), edge + behind * width], 1)
        weights = (-fall).exp()
        total = weights.sum(1, keepdim=True)
        rest = weights[:, -50:].sum(1, keepdim=True) + weights[:, -51:-50] / 2
        # As first_bins() of sample_rows.cu makes them.
        width = (2.0**8 * fall.shape[1] / rest).log() / 2048 + math.log(2) / 2048
    return (-fall).float(), (1 - rest / total).squeeze(1)


def test_ties_at_the_edge_of_a_bin():
    """They are listed with the tokens of the next bin, and are more than a list has: the count of both says so."""
    logits, top_p = rows_with_ties_at_an_edge(torch.tensor([-0.004, 0.004, 0.5]))
    seed = torch.arange(3)
    got = draw(logits, {"top_p": top_p}, name_of=seed, kept=True, num_samples=20)
    check_draws(got.tokens, uniforms(seed, 20), kept_weights(logits, {"top_p": top_p}))
    assert bool(((got.kept.counts - 3051).abs() <= 1).all())


@pytest.mark.parametrize("blocks", [1, 2])
def test_ties_at_the_border_of_top_p(blocks):
    """A few, which are listed, and more than a list has: the first of them are kept, and race."""
    for ties in (300, 3000):
        logits = torch.full((4, 4000), -9.0)
        logits[:, 3 : 3 + ties] = 1.0
        logits[:, 3500:3510] = 1.5
        for top_p in (0.3, 0.6):
            check_noise(logits.bfloat16(), {"top_p": top_p}, longest=5, blocks=blocks)


def test_masks_lengths_and_strides_of_noise():
    """Logits and noise that start at any multiple of their elements' size. What is behind a row's end is not read."""
    halves = rows_of(1500, torch.bfloat16).repeat(1, 2)
    for start in range(0, 8, 3):
        check_noise(halves[:3, start : start + 1501], SETTINGS["temperature"])
    logits = rows_of(500)[:4]
    mask = random_mask(4, 500, share=0.2)
    lengths = torch.tensor([500, 333, 77, 2])
    mask[:, 0] = True
    allowed = mask & (torch.arange(500) < lengths.unsqueeze(1))
    noise = exponential(4, 500)
    for given, name in product((mask, packed(mask)), ("whole", "usual", "top_p")):
        got = draw(logits, SETTINGS[name], noise=noise, num_samples=1, mask=given, lengths=lengths, longest=9)
        check_winners(got.tokens, noise, logits, SETTINGS[name], allowed)


@pytest.mark.parametrize(
    "settings",
    [{}, {"top_k": 20}, *also({"top_p": 0.99}, {"min_p": 1e-4})],
    ids=str,
)
def test_ties_and_noise_that_no_distribution_gives(settings):
    for vocab_size, blocks in ((24, 1), (2100, 2)):
        logits, noise, expected = ties_and_odd_noise(vocab_size)
        for longest in (None, 1):
            given = {"noise": noise, "num_samples": 1, "blocks": blocks, "longest": longest}
            got = draw(logits, settings, **given)
            assert got.tokens.flatten().tolist() == expected
            got = draw(torch.ones_like(logits), settings, mask=logits != -INF, **given)
            assert got.tokens.flatten().tolist() == expected
