# SPDX-License-Identifier: Apache-2.0
"""The laws of the files of csrc/algebra, on those files themselves: compiled by g++ and called through ctypes."""

import ctypes
import functools
import math
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

INF, NAN = float("inf"), float("nan")
LOG2_E = math.log2(math.e)
# The bound of one merge: two exponentials with arguments of a few dozen, two products and a sum.
MERGE_ERROR = 2e-5

floats = st.floats(width=32)
finite = st.floats(-1e4, 1e4, width=32)
# Zeros, the smallest and largest denormals, the ends of the finite, infinities, and the first and last NaNs.
_ENDS = (0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF)
float_bits = st.sampled_from([*_ENDS, *(bits | 0x80000000 for bits in _ENDS)]) | st.integers(0, 2**32 - 1)
indices = st.integers(0, 2**31 - 2)
temperatures = st.sampled_from([0.1, 0.7, 1.0, 5.0])
logits = st.lists(st.floats(-50, 50, width=32) | st.just(-INF), min_size=1, max_size=12)


@functools.cache
def _library() -> ctypes.CDLL:
    directory = Path(__file__).parent
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    assert compiler, "these tests need a C++ compiler"
    library = _library.directory / "libalgebra.so"
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(
        [compiler, *flags, str(directory / "cpp/algebra.cpp"), "-o", str(library)],
        check=True,
    )
    loaded = ctypes.CDLL(str(library))
    u32, u64, f32 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_float
    for name, result, arguments in (
        ("order_key", u32, [u32]),
        ("bits_of_key", u32, [u32]),
        ("make_candidate", u64, [u32, u32]),
        ("key_of", u32, [u64]),
        ("index_of", u32, [u64]),
        ("merge", None, [f32] * 5 + [ctypes.POINTER(f32)] * 2),
        ("merge_moments", None, [ctypes.POINTER(f32)] * 2 + [f32, ctypes.POINTER(f32)]),
    ):
        function = getattr(loaded, f"algebra_{name}")
        function.restype, function.argtypes = result, arguments
    return loaded


@pytest.fixture(scope="module", autouse=True)
def _built(tmp_path_factory):
    _library.directory = tmp_path_factory.mktemp("algebra")
    _library()


def bits_of(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def float_of(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def order_key(bits: int) -> int:
    return _library().algebra_order_key(bits)


def candidate(bits: int, index: int) -> int:
    return _library().algebra_make_candidate(order_key(bits), index)


State = tuple[float, float]
IDENTITY: State = (-INF, 0.0)


def merge(a: State, b: State, temperature: float = 1.0) -> State:
    m, d = ctypes.c_float(), ctypes.c_float()
    _library().algebra_merge(*a, *b, LOG2_E / temperature, ctypes.byref(m), ctypes.byref(d))
    return m.value, d.value


def of_row(row: list[float], temperature: float = 1.0) -> State:
    return functools.reduce(lambda state, x: merge(state, (x, 1.0), temperature), row, IDENTITY)


def assert_close(a: State, b: State) -> None:
    """The same maximum exactly, the same sum up to rounding, NaN and the infinities apart."""
    assert a[0] == b[0] or (math.isnan(a[0]) and math.isnan(b[0]))
    assert (math.isnan(a[1]) and math.isnan(b[1])) or math.isclose(a[1], b[1], rel_tol=MERGE_ERROR)


# The order.


@given(float_bits, float_bits)
def test_order_key_is_the_order_of_the_logits(a, b):
    x, y = float_of(a), float_of(b)
    if math.isnan(x) or math.isnan(y):
        assert (order_key(a) > order_key(b)) == (math.isnan(x) and not math.isnan(y))
    else:
        assert (order_key(a) > order_key(b)) == (x > y)
        assert (order_key(a) == order_key(b)) == (x == y)


def test_order_key_named_values():
    keys = (ctypes.c_uint32 * 5)()
    _library().algebra_named_keys(keys)
    nan, positive_infinity, zero, negative_infinity, nothing = keys
    assert [order_key(bits_of(x)) for x in (NAN, INF, 0.0, -INF)] == [
        nan,
        positive_infinity,
        zero,
        negative_infinity,
    ]
    assert order_key(bits_of(-0.0)) == zero
    assert {order_key(bits) for bits in (0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF)} == {nan}
    assert nothing < negative_infinity < zero < positive_infinity < nan
    largest, smallest = 0x7F7FFFFF, 0xFF7FFFFF
    assert negative_infinity < order_key(smallest) and order_key(largest) < positive_infinity
    # The denormals next to zero.
    assert order_key(0x80000001) < zero < order_key(0x00000001)


@given(float_bits)
def test_bits_of_key_inverts_order_key(bits):
    back = _library().algebra_bits_of_key(order_key(bits))
    if math.isnan(float_of(bits)):
        assert math.isnan(float_of(back))
    else:
        assert float_of(back) == float_of(bits)
    assert order_key(back) == order_key(bits)


@given(float_bits, indices, float_bits, indices)
def test_candidate_ranks_by_logit_then_smaller_index(a, i, b, j):
    first, second = candidate(a, i), candidate(b, j)
    if order_key(a) != order_key(b):
        assert (first > second) == (order_key(a) > order_key(b))
    else:
        assert (first > second) == (i < j)
        assert (first == second) == (i == j)


@given(float_bits, indices)
def test_candidate_holds_key_and_index(bits, index):
    packed = candidate(bits, index)
    assert _library().algebra_key_of(packed) == order_key(bits)
    assert _library().algebra_index_of(packed) == index
    # Every candidate ranks before the empty slot.
    assert packed > 0


@given(
    st.lists(st.tuples(float_bits, indices), max_size=12),
    st.lists(st.tuples(float_bits, indices), max_size=12),
    st.integers(1, 8),
)
def test_best_k_of_parts_is_best_k_of_all(a, b, k):
    """The T of the algebra: the best k of two lists need only the best k of each."""
    a, b = ([candidate(*pair) for pair in part] for part in (a, b))

    def best(part):
        return sorted(part, reverse=True)[:k]

    assert best(a + b) == best(best(a) + best(b)) == best(best(b) + best(a))


# The normalizer.


def test_normalizer_identity_is_the_default():
    m, d = ctypes.c_float(), ctypes.c_float()
    _library().algebra_identity(ctypes.byref(m), ctypes.byref(d))
    assert (m.value, d.value) == IDENTITY


@given(logits, logits, logits, temperatures)
def test_normalizers_are_a_commutative_monoid(a, b, c, temperature):
    a, b, c = (of_row(row, temperature) for row in (a, b, c))
    assert merge(a, IDENTITY, temperature) == merge(IDENTITY, a, temperature) == a
    assert merge(IDENTITY, IDENTITY, temperature) == IDENTITY
    assert merge(a, b, temperature) == merge(b, a, temperature)
    left = merge(merge(a, b, temperature), c, temperature)
    assert_close(left, merge(a, merge(b, c, temperature), temperature))


@given(logits, st.integers(1, 20), temperatures)
def test_merge_with_a_part_of_negative_infinity_changes_nothing(row, length, temperature):
    masked = of_row([-INF] * length, temperature)
    # Its sum may be anything finite: it weighs e^-inf.
    state = of_row(row, temperature)
    assume(state[0] > -INF)
    assert merge(state, masked, temperature) == merge(masked, state, temperature) == state
    assert masked[0] == -INF and not math.isnan(masked[1])


@given(logits, st.data(), temperatures)
def test_concatenation_is_merge(row, data, temperature):
    cut = data.draw(st.integers(0, len(row)))
    parts = merge(of_row(row[:cut], temperature), of_row(row[cut:], temperature), temperature)
    assert_close(parts, of_row(row, temperature))
    assert_close(of_row(data.draw(st.permutations(row)), temperature), of_row(row, temperature))


@given(logits, temperatures)
def test_normalizer_is_logsumexp(row, temperature):
    m, d = of_row(row, temperature)
    assert m == max(row)
    if m > -INF:
        assert math.isclose(
            d,
            math.fsum(math.exp((x - m) / temperature) for x in row),
            rel_tol=MERGE_ERROR,
        )


@given(st.lists(finite, min_size=1, max_size=8), st.sampled_from([NAN, INF]), st.data())
def test_normalizer_keeps_nan_and_infinity(row, special, data):
    """Wherever the value is and however the row is cut; a NaN outweighs an infinity."""
    row.insert(data.draw(st.integers(0, len(row))), special)
    with_infinity = data.draw(st.booleans())
    if with_infinity:
        row.insert(data.draw(st.integers(0, len(row))), INF)
    cut = data.draw(st.integers(0, len(row)))
    m, d = merge(of_row(row[:cut]), of_row(row[cut:]))
    assert math.isnan(m) if math.isnan(special) else m == INF
    # No finite sum: probabilities of such a row are NaN.
    assert not math.isfinite(d)


@given(floats, floats, floats, floats)
def test_merge_maximum_never_loses_a_nan(a, b, c, d):
    m, _ = merge(merge((a, 1.0), (b, 1.0)), merge((c, 1.0), (d, 1.0)))
    values = (a, b, c, d)
    assert math.isnan(m) if any(map(math.isnan, values)) else m == max(values)


# The moments.

Moments = tuple[float, float, float]
NO_MOMENTS: Moments = (-INF, 0.0, 0.0)


def merge_moments(a: Moments, b: Moments, temperature: float = 1.0) -> Moments:
    three = ctypes.c_float * 3
    result = three()
    _library().algebra_merge_moments(three(*a), three(*b), LOG2_E / temperature, result)
    return tuple(result)


def moments_of(row: list[float], temperature: float = 1.0) -> Moments:
    return functools.reduce(lambda state, x: merge_moments(state, (x, 1.0, 0.0), temperature), row, NO_MOMENTS)


def assert_moments_close(a: Moments, b: Moments) -> None:
    assert_close(a[:2], b[:2])
    # Terms of s are those of d times numbers of some hundreds at most.
    assert math.isclose(a[2], b[2], rel_tol=4 * MERGE_ERROR, abs_tol=4 * MERGE_ERROR)


@given(logits, logits, logits, temperatures, st.data())
def test_moments_are_a_commutative_monoid(a, b, c, temperature, data):
    cut = data.draw(st.integers(0, len(a)))
    parts = merge_moments(moments_of(a[:cut], temperature), moments_of(a[cut:], temperature), temperature)
    a, b, c = whole, *_ = [moments_of(row, temperature) for row in (a, b, c)]
    assert_moments_close(parts, whole)
    assert merge_moments(a, NO_MOMENTS, temperature) == merge_moments(NO_MOMENTS, a, temperature) == a
    assert merge_moments(a, b, temperature) == merge_moments(b, a, temperature)
    left = merge_moments(merge_moments(a, b, temperature), c, temperature)
    assert_moments_close(left, merge_moments(a, merge_moments(b, c, temperature), temperature))


@given(logits, temperatures)
def test_moments_are_the_normalizer_and_the_entropy(row, temperature):
    m, d, s = moments_of(row, temperature)
    assert (m, d) == of_row(row, temperature)
    if m == -INF:
        assert (d, s) == (0.0, 0.0)
        return
    logp = [(x - m) / temperature - math.log(d) for x in row if x > -INF]
    exact = -math.fsum(math.exp(each) * each for each in logp)
    # s is in units of the logarithm to base 2.
    assert math.isclose(math.log(d) - s / d * math.log(2), exact, rel_tol=1e-4, abs_tol=1e-4)
    if len(logp) == 1:
        assert (d, s) == (1.0, 0.0)
