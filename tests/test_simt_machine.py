# SPDX-License-Identifier: Apache-2.0
"""The emulated machine itself: each of CUDA's means does what its documentation says, and its misuse is reported."""

import numpy as np
import pytest
import torch

from simt.build import Kernel
from simt.launch import SCHEDULES, Array, Outcome, launch
from simt.translate import translate


def run(source: str, *tensors: torch.Tensor, grid=(1,), threads=32, zeros=(), **how) -> Outcome:
    """Launches `kernel`, the tensors being its parameters: the last one its output, those at `zeros` zeroed counters."""
    roles = ["zeros" if i in zeros else "input" for i in range(len(tensors) - 1)] + ["output"]
    arrays = [Array(f"argument {i}", tensor, role) for i, (tensor, role) in enumerate(zip(tensors, roles))]
    arguments = [np.uint64(tensor.data_ptr()) for tensor in tensors]
    return launch(Kernel(source, "kernel"), grid, threads, arguments, arrays, **how)


def kinds(outcome: Outcome) -> set[str]:
    return {fault.kind for fault in outcome.faults}


SHUFFLES = """
__global__ void kernel(const int* given, int* out) {
  const int x = given[threadIdx.x];
  int i = 0;
  for (int width = 1; width <= 32; width *= 2)
    for (int step = 0; step < 32; ++step) {
      int* to = out + 4 * 32 * i++ + threadIdx.x;
      to[0] = __shfl_sync(~0u, x, step, width);
      to[32] = __shfl_xor_sync(~0u, x, step, width);
      to[64] = __shfl_up_sync(~0u, x, step, width);
      to[96] = __shfl_down_sync(~0u, x, step, width);
    }
}
"""


def test_shuffles():
    given = torch.randperm(1000, dtype=torch.int32)[:32]
    out = torch.empty(6, 32, 4, 32, dtype=torch.int32)
    run(SHUFFLES, given, out, schedule="random").check()
    for i, width in enumerate((1, 2, 4, 8, 16, 32)):
        for step in range(32):
            for lane in range(32):
                segment = lane // width * width
                sources = (
                    segment + step % width,
                    # Lanes of an earlier segment can be read, of a later one not.
                    lane ^ step if lane ^ step < segment + width else lane,
                    lane - step if lane - step >= segment else lane,
                    lane + step if lane + step < segment + width else lane,
                )
                assert out[i, step, :, lane].tolist() == [given[source] for source in sources]


COLLECTIVES = """
__global__ void kernel(const unsigned* given, unsigned* out) {
  const unsigned x = given[threadIdx.x];
  unsigned* to = out + threadIdx.x;
  const unsigned half = threadIdx.x < 16 ? 0xFFFFu : 0xFFFF0000u;
  *to = __ballot_sync(~0u, x & 1); to += 32;
  *to = __any_sync(half, x == 3); to += 32;
  *to = __all_sync(half, x < 7); to += 32;
  *to = __reduce_add_sync(half, x); to += 32;
  *to = __reduce_max_sync(half, x); to += 32;
  *to = __syncthreads_or(x == 5); to += 32;
  *to = __syncthreads_or(x == 9);
}
"""


def test_collectives():
    given = torch.randint(0, 8, (32,), generator=torch.Generator().manual_seed(3)).int()
    x = given.numpy().astype(np.uint32)
    out = torch.empty(7, 32, dtype=torch.int32)
    run(COLLECTIVES, given, out, schedule="random").check()
    halves = [x[:16], x[16:]]
    bits = lambda claims: int(sum(1 << i for i in np.flatnonzero(claims)))  # noqa: E731
    want = [
        [bits(x & 1)] * 32,
        np.repeat([(half == 3).any() for half in halves], 16),
        np.repeat([(half < 7).all() for half in halves], 16),
        np.repeat([half.sum() for half in halves], 16),
        np.repeat([half.max() for half in halves], 16),
        [1] * 32,
        [0] * 32,
    ]
    np.testing.assert_array_equal(out.numpy().view(np.uint32), np.array(want, dtype=np.uint32))


CONVERSIONS = """
__global__ void kernel(const float* given, unsigned* out) {
  const float x = given[blockIdx.x * 32 + threadIdx.x];
  unsigned pair;
  unsigned short half;
  float back;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(x), "f"(-x));
  half = pair >> 16;
  asm("cvt.f32.f16 %0, %1;" : "=f"(back) : "h"(half));
  unsigned* to = out + 4 * (blockIdx.x * 32 + threadIdx.x);
  to[0] = pair;
  to[1] = __float_as_uint(back);
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(x), "f"(-x));
  to[2] = pair;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(back) : "f"(x));
  to[3] = __float_as_uint(back);
}
"""


def test_conversions():
    """As torch converts: every half, the values between two of them, and random bits."""
    halves = torch.arange(2**16).to(torch.int16).view(torch.float16)
    between = (halves[:-1].float() + halves[1:].float()) / 2
    random = torch.randint(0, 2**32, (2**14,), generator=torch.Generator().manual_seed(0)).int().view(torch.float32)
    given = torch.cat([halves.float(), between, between.nextafter(halves[1:].float()), random])
    given = given[: len(given) // 32 * 32]
    out = torch.empty(len(given), 4, dtype=torch.int32)
    run(CONVERSIONS, given, out, grid=(len(given) // 32,)).check()

    def assert_equal(got: torch.Tensor, want: torch.Tensor) -> None:
        assert torch.equal(got.isnan(), want.isnan())
        integers = {2: torch.int16, 4: torch.int32}[want.element_size()]
        assert torch.equal(got[~want.isnan()].view(integers), want[~want.isnan()].view(integers))

    pairs = out.view(torch.int16).view(-1, 8)
    for sign, word in ((-1, 0), (1, 1)):
        assert_equal(pairs[:, word].contiguous().view(torch.float16), (sign * given).half())
        assert_equal(pairs[:, 4 + word].contiguous().view(torch.bfloat16), (sign * given).bfloat16())
    assert_equal(out[:, 1].contiguous().view(torch.float32), given.half().float())
    smallest = torch.finfo(torch.float32).smallest_normal
    want = given.double().exp2().float()
    torch.testing.assert_close(
        out[:, 3].contiguous().view(torch.float32),
        want.where(want >= smallest, torch.zeros(()).where(~want.isnan(), want)),
        rtol=2**-23,
        atol=0,
        equal_nan=True,
    )


ASYNC_COPY = """
__global__ void kernel(const int* given, int* out) {
  extern __shared__ __align__(16) int tiles[];  // [2, 128]
  for (int tile = 0; tile < 3; ++tile) {
    const unsigned to = __cvta_generic_to_shared(tiles + tile % 2 * 128 + threadIdx.x * 4);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::
                 "r"(to), "l"(given + tile * 128 + threadIdx.x * 4), "r"(tile == 2 && threadIdx.x == 31 ? 4 : 16));
    asm volatile("cp.async.commit_group;");
    if (tile == 0) continue;
    asm volatile("cp.async.wait_group 1;" ::: "memory"); /* the tile before this */
    __syncwarp();
    for (int i = 0; i < 4; ++i) out[(tile - 1) * 128 + i * 32 + threadIdx.x] = tiles[(tile - 1) % 2 * 128 + i * 32 + threadIdx.x];
    __syncwarp(); /* before the tile is overwritten */
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncwarp();
  for (int i = 0; i < 4; ++i) out[256 + i * 32 + threadIdx.x] = tiles[i * 32 + threadIdx.x];
}
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_asynchronous_copies(schedule):
    given, out = torch.arange(381).int(), torch.empty(384, dtype=torch.int32)
    run(ASYNC_COPY, given, out, shared_bytes=1024, schedule=schedule).check()
    assert out.tolist() == [*range(381), 0, 0, 0]
    late = run(ASYNC_COPY.replace("wait_group 1;", "wait_group 2;"), given, out, shared_bytes=1024, schedule=schedule)
    assert kinds(late) == {"uninitialised"}
    overwritten = ASYNC_COPY.replace("__syncwarp(); /*", "/*")
    assert "race" in kinds(run(overwritten, given, out, shared_bytes=1024, schedule=schedule))
    small = run(ASYNC_COPY, given, out, shared_bytes=1008, schedule=schedule)
    assert kinds(small) == {"out of bounds"} and "dynamic shared memory [1008 bytes]" in small.faults[0].text


@pytest.mark.parametrize(
    ("old", "new", "kind", "text"),
    [
        ("[%0], [%1], 16, %2", "[%0], [%1], 8, %2", "trap", "another number of bytes than 16"),
        ("31 ? 4 : 16", "31 ? 20 : 16", "trap", "reads more than it copies"),
        # A GPU wants the address of a copy that reads less aligned too.
        ('+ threadIdx.x * 4), "r"', '+ threadIdx.x * 4 + (threadIdx.x == 31)), "r"', "trap", "misaligned"),
        ("tile % 2 * 128 + threadIdx.x * 4);", "tile % 2 * 128 + threadIdx.x * 4 + 1);", "misaligned", "aligned to"),
        ("31 ? 4 : 16", "31 ? 8 : 16", "out of bounds", "past its end"),
    ],
)
def test_asynchronous_copies_of_other_sizes_and_places(old, new, kind, text):
    given, out = torch.arange(381).int(), torch.empty(384, dtype=torch.int32)
    assert ASYNC_COPY.count(old) == 1
    outcome = run(ASYNC_COPY.replace(old, new), given, out, shared_bytes=1024)
    assert kinds(outcome) == {kind} and text in outcome.faults[0].text


MESSAGE = """
__global__ void kernel(unsigned* flag, int* box, int* out) {
  if (blockIdx.x == gridDim.x - 1) {
    box[threadIdx.x] = 7 * threadIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(flag), "r"(1u) : "memory");
    return;
  }
  __shared__ unsigned arrived;
  if (threadIdx.x == 0) {
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(flag) : "memory");
      __nanosleep(20);
    } while (arrived == 0);
    *flag = 0;
  }
  __syncthreads();
  out[threadIdx.x] = __ldcg(box + threadIdx.x);
}
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_blocks_that_wait_for_blocks(schedule):
    def message(source: str, **how) -> Outcome:
        nonlocal out
        box, flag = torch.zeros(64, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        out = torch.empty(64, dtype=torch.int32)
        arrays = [Array("flag", flag, "zeros"), Array("box", box, "scratch"), Array("out", out, "output")]
        arguments = [np.uint64(tensor.data_ptr()) for tensor in (flag, box, out)]
        return launch(Kernel(source, "kernel"), (2,), 64, arguments, arrays, schedule=schedule, **how)

    out = None
    message(MESSAGE).check()
    assert out.tolist() == [7 * i for i in range(64)]
    for relaxed in (MESSAGE.replace("st.release", "st.relaxed"), MESSAGE.replace("ld.acquire", "ld.relaxed")):
        assert kinds(message(relaxed)) == {"race"}
    # With room for one block, the first waits for ever.
    if schedule == "forward":
        hung = message(MESSAGE, max_blocks=1)
        assert kinds(hung) == {"deadlock"} and "1 poll" in hung.faults[0].text


ATOMICS = """
__global__ void kernel(const unsigned* given, unsigned* out) {
  __shared__ unsigned words[4];
  if (threadIdx.x < 4) words[threadIdx.x] = 0;
  __syncthreads();
  const unsigned x = given[threadIdx.x];
  atomicAdd(&words[0], x);
  atomicMax(&words[1], x);
  atomicOr(&words[2], 1u << x);
  atomicInc(&words[3], 9u);
  __syncthreads();
  if (threadIdx.x < 4) out[threadIdx.x] = words[threadIdx.x];
}
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_atomics(schedule):
    x = np.random.default_rng(1).integers(0, 30, 128).astype(np.uint32)
    out = torch.empty(4, dtype=torch.int32)
    run(ATOMICS, torch.from_numpy(x.view(np.int32)), out, threads=128, schedule=schedule).check()
    want = [x.sum(), x.max(), np.bitwise_or.reduce(1 << x), 128 % 10]
    assert out.numpy().view(np.uint32).tolist() == want


MISUSES = {
    "exited lanes": ("if (threadIdx.x == 3) return; out[0] = __ballot_sync(~0u, 1);", {"divergence"}),
    "different masks": ("__syncwarp(threadIdx.x < 9 ? ~0u : ~511u); out[0] = 1;", {"divergence", "deadlock"}),
    "barriers of two kinds": (
        "if (threadIdx.x) __syncthreads(); else __syncthreads_or(1); out[0] = 1;",
        {"divergence"},
    ),
    "source outside of the mask": ("out[0] = threadIdx.x < 16 ? __shfl_sync(0xFFFFu, 1, 20) : 1;", {"divergence"}),
    "same word, other values": ("out[0] = threadIdx.x;", {"race"}),
    "read before a write": ("__shared__ int x[2]; x[0] = 1; out[0] = x[0] + x[1];", {"uninitialised"}),
    "atomic and plain": ("__shared__ int x; x = 0; __syncwarp(); atomicAdd(&x, 1); out[0] = x;", {"race"}),
    "outside of shared memory": ("__shared__ int x[32]; x[threadIdx.x + 1] = 1; out[0] = 1;", {"out of bounds"}),
    "local variable of another": (
        "__shared__ int* x; int own = 1; if (threadIdx.x == 0) x = &own; __syncwarp(); out[0] = *x;",
        {"out of bounds"},
    ),
    "division by zero": ("out[0] = 1 / (out[0] = 0);", {"undefined behaviour"}),
    "trap": ("__trap();", {"trap"}),
}


@pytest.mark.parametrize(("body", "expected"), MISUSES.values(), ids=list(MISUSES))
def test_misuse_is_reported(body, expected):
    for schedule in SCHEDULES:
        outcome = run(f"__global__ void kernel(int* out) {{ {body} }}", torch.empty(1).int(), schedule=schedule)
        assert kinds(outcome) & expected, (schedule, outcome)


def test_lanes_may_write_one_value_together():
    """One instruction of one warp: CUDA lets one of its lanes win."""
    body = "out[0] = __reduce_max_sync(~0u, threadIdx.x);"
    run(f"__global__ void kernel(unsigned* out) {{ {body} }}", torch.empty(1).int(), schedule="random").check()
    two_warps = run(f"__global__ void kernel(unsigned* out) {{ {body} }}", torch.empty(1).int(), threads=64)
    assert kinds(two_warps) == {"race"}


def test_translation_keeps_lines():
    source = MESSAGE + ASYNC_COPY
    assert translate(source).count("\n") == source.count("\n")
    for number, line in enumerate(source.splitlines()):
        if "out[" in line:
            assert "out[" in translate(source).splitlines()[number]


def test_translation_refuses_what_it_cannot_read():
    with pytest.raises(ValueError, match="one __shared__ variable at a time"):
        translate("__shared__ int a[3], b;")
    with pytest.raises(RuntimeError, match=r"is not a member of .simt::ptx"):
        run('__global__ void kernel(int* out) { asm("popc.b32 %0, %1;" : "=r"(*out) : "r"(5)); }', torch.empty(1).int())
