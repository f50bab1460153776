# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel models: each process has some columns of the LM head, which gathers the logits of all of them at every step.

Within a fused call the head's forward() gives :class:`ShardedLogits` in the place of gathered logits: the product with the process's
own columns. Only the forward() of the model that is generating gets them, and only for the decoding loop.

From then on every process must take part in the same collectives. Equal tokens and equal choices ensure that, if all processes
made the same call with the same options. So they compare a hash of the call once, in one small collective, and gather the logits
if it differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...distributed.collective import all_gather
from ..calls import after_forward
from .sharded_logits import Columns, ShardedLogits

# The styles of transformers' plans that gather the output of a linear layer, and change nothing else.
_GATHERING = ("colwise_gather_output", "colwise_rep")
# A process sends this in the place of a seed to ask whether the call runs in whole steps.
_PROPOSES = -1
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# A method that is given the model's output before the loop takes the logits. A user's model may override it.
_OF_OUTPUT = "_update_model_kwargs_for_generation"
# torch's private names of the hooks of all modules.
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


class Agreement(NamedTuple):
    """What the processes of a call have agreed on."""

    is_alike: bool  # whether all make the same call
    seed: int | None  # the same for all

    def generator(self, device: torch.device) -> SharedGenerator | None:
        """Random numbers that are the same on all processes."""
        return None if self.seed is None else SharedGenerator(self.seed, device)


class Answers(NamedTuple):
    """What the processes answer to a question whether a call runs in whole steps."""

    all_ask: bool  # whether every process asks
    are_alike: bool  # whether all ask the same


class SharedGenerator:
    """Gives a generator that is in the same state on every process.

    A call that draws nothing must leave the process's own random numbers as they are. So the number that became the seed is
    taken from them only when the generator is first used.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self._generator: torch.Generator | None = None

    def __call__(self) -> torch.Generator:
        if self._generator is None:
            _random_seed(self._device)
            self._generator = torch.Generator(self._device).manual_seed(self._seed)
        return self._generator


def _random_seed(device: torch.device) -> Tensor:
    """A seed by the process's own random numbers, int64 of shape ()."""
    return torch.randint(0, 2**63 - 1, (), device=device)


def _next_seed(device: torch.device) -> Tensor:
    """What _random_seed() will give, without taking it from the random numbers."""
    is_cpu = device.type == "cpu"
    with torch.random.fork_rng([] if is_cpu else [device], device_type="cuda" if is_cpu else device.type):
        return _random_seed(device)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


class ShardedHead:
    """The LM head of a tensor-parallel model during a generate() call.

    Args:
        model: the model that generates.
        module: :func:`sharded_head_of` it.
    """

    def __init__(self, model: Any, module: Any) -> None:
        self.module = module
        self._model = model
        mesh, placements = module.weight.device_mesh, module.weight.placements
        self._columns: Columns | None = None
        if mesh.ndim == 1 and placements[0].is_shard(0):
            size, rank = mesh.size(), mesh.get_local_rank()
            columns = Columns.of(mesh.get_group(), rank, size, module.weight.shape[0])
            if columns.length == len(module.weight.to_local()):
                self._columns = columns

    @property
    def group(self) -> Any:
        assert self._columns is not None
        return self._columns.group

    def reason(self) -> str | None:
        """Why the logits are gathered; None if they need not be. Processes may have different reasons."""
        module, model = self.module, self._model
        if self._columns is None:
            return "an LM head that is not cut into columns, or over several dimensions of a mesh"
        if type(module) is not nn.Linear:
            return f"an LM head that is a {type(module).__name__}"
        # Hooks and wrappers of a forward() must get plain tensors. Some versions of transformers gather in hooks.
        if any(getattr(module, hooks, None) for hooks in _HOOKS):
            return "a forward hook of the LM head"
        if any(hook is not after_forward for hook in getattr(model, _HOOKS[0], {}).values()):
            return "a forward hook of the model"
        if any(getattr(nn.modules.module, hooks, None) for hooks in _GLOBAL_HOOKS):
            return "a forward hook of all modules"
        forward = vars(model).get("forward")
        if forward is not None and getattr(forward, "__func__", None) is not type(model).forward:
            return "a forward() of the model that has been replaced"
        if not str(getattr(getattr(model, _OF_OUTPUT, None), "__module__", "transformers.")).startswith(
            "transformers."
        ):
            return f"{_OF_OUTPUT} of {type(model).__name__}"
        if not self._is_planned_to_gather():
            return "an LM head whose plan is not one that gathers its output"
        return None

    def _is_planned_to_gather(self) -> bool:
        plan = getattr(self._model, "tp_plan", None) or {}
        names = [name for name, module in self._model.named_modules() if module is self.module]
        return any(plan.get(name) in _GATHERING for name in names)

    def agree(self, call: str, draws: bool) -> Agreement:
        """Compares the call with those of the other processes. A collective.

        Args:
            call: a text of all options that decide which collectives run.
            draws: whether it may need random numbers. The seed comes from rank 0's generator.
        """
        if self._columns is None:
            return Agreement(True, None)
        said, seed = _hash(call), int(_next_seed(self._device)) if draws else 0
        everyone = self._told(said, seed)
        while any(each[1] == _PROPOSES for each in everyone):
            # The processes that ask for whole steps have their answer now, and then come here, too.
            everyone = self._told(said, seed)
        return Agreement(all(each[0] == said for each in everyone), everyone[0][1] if draws else None)

    def propose(self, call: str) -> Answers:
        """Asks the other processes whether the call is to run in whole steps. A collective.

        A process that does not ask, for whatever reason of its own, calls agree(). Then all processes call agree().

        Args:
            call: a text of all that decides which collectives run.
        """
        said = _hash(call)
        everyone = self._told(said, _PROPOSES)
        return Answers(all(each[1] == _PROPOSES for each in everyone), all(each[0] == said for each in everyone))

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.module.weight.device
        return device

    def _told(self, said: int, seed: int) -> list[list[int]]:
        """What each process says. Waits for the device."""
        assert self._columns is not None
        own = torch.tensor([[said, seed]], device=self._device)
        everyone: list[list[int]] = all_gather(own, self._columns.group).tolist()
        return everyone

    def columns(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ShardedLogits | None:
        """What the head's forward() returns instead of gathered logits; None where it must gather.

        Args:
            args, kwargs: of forward().
        """
        hidden = args[0] if len(args) == 1 and not kwargs else None
        if self._columns is None or type(hidden) is not Tensor or torch.is_grad_enabled():
            return None
        weight, bias = self.module.weight.to_local(), self.module.bias
        local = nn.functional.linear(hidden, weight, None if bias is None else bias.to_local())
        return ShardedLogits.of(local, self._columns)
