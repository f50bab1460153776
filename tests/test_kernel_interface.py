# SPDX-License-Identifier: Apache-2.0
"""What Python and csrc/ must agree on, compared by a C++ compiler: the arguments field by field, numbers,
and shared memory."""

import ctypes
import subprocess
from collections.abc import Iterable

import pytest

import choices
import kernel_names
from fused_topk.cuda_runtime import kernel_source
from fused_topk.layout import attention_launch, kernel_arguments, launch, router_launch, topk_choice, topk_launch
from fused_topk.layout.topk_choice import KernelChoice, Method
from kept import built
from simt import build
from simt.translate import translate

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

KERNEL_OF = {
    kernel_arguments.Problem: "fused_topk::softmax_topk_kernel",
    kernel_arguments.SampleRows: "fused_topk::sampling::sample_rows_kernel",
    kernel_arguments.RowNumbers: "fused_topk::full_rows::softmax_warp_rows_kernel",
    kernel_arguments.DrawNumbers: "fused_topk::sampling::sample_rows_kernel",
    kernel_arguments.RowScale: "fused_topk::full_rows::softmax_warp_rows_kernel",
    kernel_arguments.DrawScale: "fused_topk::sampling::sample_rows_kernel",
    kernel_arguments.FullRows: "fused_topk::full_rows::softmax_warp_rows_kernel",
    kernel_arguments.Piece: "fused_topk::pieces::accumulate_piece_kernel",
    kernel_arguments.States: "fused_topk::merging::merge_states_kernel",
    kernel_arguments.Routing: "fused_topk::routers::route_experts_kernel",
    kernel_arguments.TargetRanks: "fused_topk::ranks::target_ranks_kernel",
    kernel_arguments.LogitGradients: "fused_topk::gradients::logit_gradient_kernel",
    kernel_arguments.StepAttention: "fused_topk::attention::step_attention_kernel",
}


def failures(kernel: str, claims: Iterable[str], architecture: int = 90) -> str:
    """What the compiler says about the claims, constant expressions in the namespace fused_topk, that do not hold of the
    files that a kernel is compiled from; an empty string if all hold."""
    text = f'#include "ptx.h"\n{translate(kernel_source.translation_unit(kernel))}\nnamespace fused_topk {{\n'
    text += "".join(f"static_assert({claim});\n" for claim in claims) + "}\n"
    options = [*build._COMMON, f"-D__CUDA_ARCH__={architecture}0", "-w", "-fsyntax-only", "-x", "c++", "-"]

    def compiled(_, path) -> None:
        done = subprocess.run([build._COMPILER, *options], input=text, capture_output=True, text=True)
        path.write_text(done.stderr)

    name = build._key(text, build._texts(build._FOR_KERNELS), *options)
    return built(f"{name}.stderr", compiled).read_text()


SWAPPED = {ctypes.c_float: ctypes.c_int32, ctypes.c_double: ctypes.c_int64, ctypes.c_uint32: ctypes.c_float}


def claims_of(structure: type[ctypes.Structure]) -> list[str]:
    """That the C++ struct has exactly these fields, where Python has them, of the same size and kind."""
    name = structure.__name__
    fields = {item[0]: item[1] for item in structure._fields_}
    # As many names as fields, or this does not compile.
    count = f"[] {{ constexpr {name} problem = {{}}; const auto& [{', '.join(fields)}] = problem; return true; }}()"
    claims = [f"sizeof({name}) == {ctypes.sizeof(structure)}", count]
    for field, type_ in fields.items():
        place = getattr(structure, field)
        claims += [f"offsetof({name}, {field}) == {place.offset}", f"sizeof({name}::{field}) == {place.size}"]
        element = getattr(type_, "_type_", None)
        kind = {ctypes.c_bool: "std::is_integral_v"}.get(type_)
        kind = "std::is_floating_point_v" if type_ in (ctypes.c_float, ctypes.c_double) else kind
        kinds = [kind or ("std::is_signed_v" if ctypes.c_int64 in (type_, element) else "!std::is_signed_v")]
        # A floating-point type is signed, too.
        kinds += [] if kind else ["!std::is_floating_point_v"]
        claims += [f"{kind}<std::remove_extent_t<decltype({name}::{field})>>" for kind in kinds]
    return claims


@pytest.mark.parametrize("structure", KERNEL_OF, ids=lambda structure: structure.__name__)
def test_arguments_are_the_structs_of_the_kernels(structure):
    assert failures(KERNEL_OF[structure], claims_of(structure)) == ""


# Each takes four runs of the compiler, and all of them the same claims.
@pytest.mark.parametrize(
    "structure",
    [
        pytest.param(each, marks=() if each is kernel_arguments.Problem else pytest.mark.exhaustive)
        for each in KERNEL_OF
    ],
    ids=lambda structure: structure.__name__,
)
def test_every_difference_is_seen(structure):
    """One field moved, renamed or left out; floats and integers in the places of each other."""
    for change in (
        lambda items: items[1:],
        lambda items: [(f"{items[0][0]}_", items[0][1]), *items[1:]],
        lambda items: [items[1], items[0], *items[2:]],
        lambda items: [(name, SWAPPED.get(type_, type_)) for name, type_ in items],
    ):
        changed = type(structure.__name__, (ctypes.Structure,), {"_fields_": change(list(structure._fields_))})
        assert list(changed._fields_) != list(structure._fields_)
        assert "error" in failures(KERNEL_OF[structure], claims_of(changed))


def test_fields_must_be_adjacent():
    with pytest.raises(ValueError, match="`parts` of Problem does not follow"):
        kernel_arguments.writer(kernel_arguments.Problem, "row_temperature", "parts")
    write, offset = kernel_arguments.writer(kernel_arguments.Problem, "beam_lists", "beam_indices")
    assert offset == kernel_arguments.Problem.beam_lists.offset
    buffer = bytearray(ctypes.sizeof(kernel_arguments.Problem))
    write(buffer, offset, 3, 4)
    problem = kernel_arguments.Problem.from_buffer(buffer)
    assert (problem.beam_lists, problem.beam_indices, problem.mask) == (3, 4, 0)


FORMATS = {2: "BFloat16", 4: "Float32"}
VALUE_KINDS = {"logits": "Logits", "softmax": "Probabilities", "log_softmax": "LogProbabilities", "state": "State"}


def mirrored(itemsize: int) -> list[str]:
    """Every number of layout/ that csrc/ has too."""
    claims = [
        f"kTileByTile == {Method.TILE_BY_TILE:d} && kForMany == {Method.FOR_MANY:d} && kInWindows == {Method.IN_WINDOWS:d}",
        f"kMaxSteps * kPartsOfStep == {topk_choice._MAX_PARTS}",
        f"kShortK == {topk_choice._SHORT_K}",
        f"kPerShortLane == {topk_choice._SHORT_LANE}",
        f"kRouterLanes == {topk_choice._ROUTER_LANES} && kRouterLanes == {topk_choice._ROUTER_K}",
        f"kIndexBits + 1 == {topk_choice._SHORT_ROW}",
        f"kLeadingDims == {kernel_arguments.LEADING_DIMS}",
        *(f"k{name} == {launch.VALUE_KINDS[kind]}" for kind, name in VALUE_KINDS.items()),
        f"kMaskBoth == {topk_launch._MASK_USES['allowed']} && kMaskChoice == {topk_launch._MASK_USES['all']}",
    ]
    for warps, vectors in topk_choice.VARIANTS[itemsize]:
        group = f"Group<{warps}, {'true' if warps > 8 else 'false'}>"
        claims.append(f"Candidates<{group}>::kCapacity == {2 * choices.MOST_K[warps]}")
        claims.append(f"Tile<{FORMATS[itemsize]}, {vectors}>::kElements == {topk_choice._TILE}")
    return claims


def shared_bytes_of(itemsize: int) -> list[tuple[str, int]]:
    """Of each variant: C++ for the bytes of dynamic shared memory before the states of parts, and what Python asks for."""
    found = []
    for warps, vectors in topk_choice.VARIANTS[itemsize]:
        choice = KernelChoice(warps, vectors, 2, 2, 1)  # two splits: no states
        for is_aligned, mask in ((True, 0), (True, 1), (False, 0), (False, 2)):
            for method in kernel_names.methods(choice, itemsize, not mask):
                parameters = f"{warps}, {method:d}, {vectors}, {str(is_aligned).lower()}, {mask}"
                scan = f"ScanOf<{FORMATS[itemsize]}, {parameters}>::Type"
                window = f" + sizeof({scan}::Shared)" if method == Method.IN_WINDOWS else ""
                per_warp = f"(16 * {scan}::Stream::kWarpVectors{window})"
                asked = choice.shared_bytes(method, is_aligned, not mask)
                found.append((f"{choice.threads // 32} * {per_warp}", asked))
    return found


@pytest.mark.parametrize("itemsize", FORMATS)
def test_numbers_are_those_of_the_kernels(itemsize):
    kernel = KERNEL_OF[kernel_arguments.Problem]
    assert failures(kernel, mirrored(itemsize)) == ""


NUMBERS = {
    kernel_arguments.Piece: [
        f"pieces::kRowsPerBlock == {launch.PIECE_ROWS_PER_BLOCK}",
        *(
            f"pieces::kRowsPerBlock * pieces::PieceReader<{name}>::Type::Stream::kWarpVectors * sizeof(Vector)"
            f" == {launch.piece_shared_bytes(dtype)}"
            for dtype, name in launch.FORMATS.items()
        ),
    ],
    kernel_arguments.Routing: [
        f"routers::kMostExperts == {router_launch.MOST_EXPERTS} && routers::kMostChosen == {router_launch.MOST_CHOSEN}",
        f"routers::kTokensOfBlock == {router_launch.CHOICE.rows_per_block}",
        *(f"routers::k{x} == {router_launch.SCORINGS[x.lower()]}" for x in ("Softmax", "Sigmoid", "SqrtSoftplus")),
    ],
    kernel_arguments.TargetRanks: [f"ranks::kThreads == {launch.RANK_THREADS}"],
    kernel_arguments.LogitGradients: [
        f"gradients::kThreads == {launch.GRADIENT_THREADS}",
        f"gradients::kSpanVectors * sizeof(Vector) == {launch.GRADIENT_SPAN_BYTES}",
    ],
}


@pytest.mark.parametrize("structure", NUMBERS, ids=lambda structure: structure.__name__)
def test_numbers_of_other_kernels(structure):
    assert failures(KERNEL_OF[structure], NUMBERS[structure]) == ""


def test_launches_of_attention():
    claims = [
        f"attention::kWarps == {attention_launch.WARPS}",
        f"attention::kRows == {attention_launch.ROWS}",
    ]
    for dim in attention_launch.DIMS:
        planned, shared = attention_launch.plan(1, 1, 1, 1, dim, 256, 1), attention_launch.shared_bytes(dim)
        claims += [
            f"attention::kBlocks<{dim}> == {attention_launch.resident_blocks(dim)}",
            f"{dim} / attention::kOwn<{dim}> == {planned.grid[1]}",
            f"attention::kStateWords<{dim}> * {planned.parts * planned.grid[1]} == {planned.state_words}",
            f"attention::Stage<BFloat16, {dim}>::kCount * sizeof(attention::Stage<BFloat16, {dim}>) == {shared}",
            f"2 * attention::kStateWords<{dim}> * sizeof(float) <= {shared}",
        ]
    assert failures(KERNEL_OF[kernel_arguments.StepAttention], claims) == ""


@pytest.mark.parametrize("itemsize", FORMATS)
@pytest.mark.parametrize("architecture", kernel_source.ARCHITECTURES)
def test_launches_ask_for_the_shared_memory_that_kernels_use(itemsize, architecture):
    """As much on compute capability 9.0, whose tuning has the most in shared memory, and enough on the others."""
    claims = [f"{code} {'==' if architecture == 90 else '<='} {asked}" for code, asked in shared_bytes_of(itemsize)]
    assert failures(KERNEL_OF[kernel_arguments.Problem], claims, architecture) == ""
