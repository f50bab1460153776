# SPDX-License-Identifier: Apache-2.0
"""Models that are spread over the processes of a group: modules that compute with plain tensors what transformers' modules do with
DTensors.

transformers puts a forward() of its own on each module that has a part of a weight. That function makes DTensors of parameters and
outputs, and changes the module while it runs. The modules here do the same operations and collectives on plain tensors, so a CUDA
graph can hold them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..distributed.collective import all_gather

_MODULE = "transformers.distributed."
# The style of norms of a process's own heads, whose weights are whole. Some versions of transformers replace their forward(), too.
_PLAIN = "ReplicatedWithGradAllReduce."


class Columns(NamedTuple):
    """The columns of this process. All processes but the last ones have `block` of them."""

    group: Any
    processes: int
    start: int
    length: int
    block: int
    vocab_size: int

    @staticmethod
    def of(group: Any, rank: int, processes: int, vocab_size: int) -> Columns:
        """The columns of a rank, cut as DTensor and torch.chunk cut a dimension."""
        block = -(-vocab_size // processes)
        start = min(rank * block, vocab_size)
        return Columns(group, processes, start, min(block, vocab_size - start), block, vocab_size)

    def gathered(self, local: Tensor) -> Tensor:
        """The whole tensor (..., V), of which each process has the columns (..., length). A collective."""
        padded = torch.nn.functional.pad(local, (0, self.block - self.length)).contiguous()
        everywhere = all_gather(padded.view(1, -1), self.group).view(self.processes, *padded.shape)
        return everywhere.movedim(0, -2).flatten(-2)[..., : self.vocab_size]

    def of_mask(self, words: Tensor) -> Tensor:
        """int32 [R, W]: the packed mask of this process's columns, of one [R, W] of the vocabulary."""
        first, shift = divmod(self.start, 32)
        count = -(-self.length // 32)
        low = words[:, first : first + count]
        if not shift:
            return low.contiguous()
        # Bits of the next word move in from above. A shift to the right brings copies of the sign bit, which are cleared.
        high = torch.nn.functional.pad(words, (0, 1))[:, first + 1 : first + 1 + count]
        low = low.bitwise_right_shift(shift).bitwise_and_((1 << (32 - shift)) - 1)
        return high.bitwise_left_shift(32 - shift).bitwise_or_(low)


class RowwiseLinear(nn.Linear):
    """A linear layer with the columns of the weight for this process's part of the input. Gives the sum over all processes."""

    part: Part

    def forward(self, input: Tensor) -> Tensor:
        output = nn.functional.linear(input, self.weight)
        dist.all_reduce(output, group=self.part.group)
        return output if self.bias is None else output + self.bias


class GatheredLinear(nn.Linear):
    """A linear layer with some rows of the weight. Gives the outputs of all processes, beside each other."""

    part: Part

    def forward(self, input: Tensor) -> Tensor:
        return self.part.columns.gathered(nn.functional.linear(input, self.weight, self.bias))


class RowwiseEmbedding(nn.Embedding):
    """An embedding with the vectors of some tokens. Gives the vector of any token, from the process that has it."""

    part: Part

    def forward(self, input: Tensor) -> Tensor:
        own = input - self.part.columns.start
        is_own = (own >= 0) & (own < self.part.columns.length)
        found = nn.functional.embedding(own.where(is_own, 0), self.weight)
        found = found.where(is_own.unsqueeze(-1), 0)
        dist.all_reduce(found, group=self.part.group)
        return found


class Part(NamedTuple):
    """What a process has of a module."""

    kind: type[nn.Module]  # the class that computes with it
    columns: Columns  # the rows of the weight; of a RowwiseLinear its columns

    @property
    def group(self) -> Any:
        return self.columns.group


class _Style(NamedTuple):
    """What the forward() that transformers has put on a module refers to."""

    name: str
    style: Any
    mesh: Any


def reason_against(model: nn.Module) -> str | None:
    """Why there are no such modules for a tensor-parallel model; None where there are. The same on all processes."""
    meshes = set()
    for module in model.modules():
        if not _is_spread(module):
            continue
        found = part_of(module)
        if found is None:
            style = _style_of(module)
            return f"a tensor-parallel {type(module).__name__} of {'an unknown plan' if style is None else style.name}"
        meshes.add(found.group)
    return "a tensor-parallel model over several groups" if len(meshes) > 1 else None


def has_known_forward(module: nn.Module) -> bool:
    """Whether a module's forward() is one that transformers has put on it, and that has a form here."""
    if _is_spread(module):
        return part_of(module) is not None
    return str(getattr(_forward_of(module), "__qualname__", "")).startswith(_PLAIN)


def take_parts(model: nn.Module, twin: Any) -> None:
    """Gives the modules of a model's twin this process's parts of the weights, in the memory of the model itself."""
    for name, module in model.named_modules():
        part = part_of(module) if _is_spread(module) else None
        if part is None:
            continue
        own = twin.get_submodule(name)
        own.__class__ = part.kind
        state = vars(own)
        state["part"] = part
        state["_parameters"] = {
            name: None if each is None else nn.Parameter(_local(each), requires_grad=False)
            for name, each in module._parameters.items()
        }


def part_of(module: nn.Module) -> Part | None:
    """What this process has of a module whose weight is spread; None for a module of an unknown kind."""
    found = _style_of(module)
    weight: Any = module._parameters.get("weight")
    bias: Any = module._parameters.get("bias")
    if found is None or weight is None or not _is_of(weight, found.mesh):
        return None
    kind = _kind_of(module, found)
    dim = 1 if kind is RowwiseLinear else 0
    if kind is None or not weight.placements[0].is_shard(dim):
        return None
    if bias is not None:
        is_whole = kind is RowwiseLinear
        if not _is_of(bias, found.mesh) or not (
            bias.placements[0].is_replicate() if is_whole else bias.placements[0].is_shard(0)
        ):
            return None
    mesh, length = found.mesh, weight.shape[dim]
    columns = Columns.of(mesh.get_group(), mesh.get_local_rank(), mesh.size(), length)
    # Every process must have some of the rows or columns.
    is_cut = columns.block * (mesh.size() - 1) < length and _local(weight).shape[dim] == columns.length
    return Part(kind, columns) if is_cut else None


def _kind_of(module: nn.Module, found: _Style) -> type[nn.Module] | None:
    of = found.style
    if not getattr(of, "use_local_output", False):
        return None
    if type(module) is nn.Embedding and module.max_norm is None:
        # In earlier versions of transformers an embedding has the style of a linear layer.
        is_own = found.name == "EmbeddingParallel" and of.shard_dim == 0
        is_of_rows = found.name == "RowwiseParallel" and of.input_layouts.is_replicate()
        return RowwiseEmbedding if is_own or (is_of_rows and of.output_layouts.is_replicate()) else None
    if type(module) is not nn.Linear:
        return None
    if found.name == "ColwiseParallel" and of.input_layouts.is_replicate():
        if of.output_layouts.is_replicate():
            return GatheredLinear
        return nn.Linear if of.output_layouts.is_shard(-1) else None
    is_split = found.name == "RowwiseParallel" and of.input_layouts.is_shard(-1)
    return RowwiseLinear if is_split and of.output_layouts.is_replicate() else None


def _is_spread(module: nn.Module) -> bool:
    return any(hasattr(each, "placements") for each in module._parameters.values())


def _is_of(weight: Any, mesh: Any) -> bool:
    return hasattr(weight, "placements") and mesh.ndim == 1 and weight.device_mesh == mesh


def _local(weight: Any) -> Tensor:
    local: Tensor = weight.to_local() if hasattr(weight, "placements") else weight
    return local.detach()


def _forward_of(module: nn.Module) -> Any:
    """The forward() that transformers has put on the module; None where there is none."""
    forward = vars(module).get("forward")
    is_stock = str(getattr(forward, "__module__", None)).startswith(_MODULE) and hasattr(forward, "__code__")
    return forward if is_stock else None


def _style_of(module: nn.Module) -> _Style | None:
    forward = _forward_of(module)
    if forward is None:
        return None
    held = zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True)
    found = {name: cell.cell_contents for name, cell in held}
    style, mesh, original = (found.get(name) for name in ("self", "mesh", "original_forward"))
    # transformers' function must call the forward() of the class, not one that somebody has put there before.
    is_of_class = getattr(original, "__func__", None) is type(module).forward and original.__self__ is module  # type: ignore[union-attr]
    if style is None or mesh is None or not is_of_class:
        return None
    return _Style(type(style).__name__, style, mesh)
