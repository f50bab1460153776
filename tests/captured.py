# SPDX-License-Identifier: Apache-2.0
"""Steps as a GPU runs them, on the CPU: a stand-in for the CUDA graph, and for what the host reads late."""

import contextlib
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fused_topk.generation.whole_step import draws, graphs, trial


class StandIn:
    """Does again what a graph would replay, and writes to the same output."""

    made = 0
    replays = 0

    def __init__(self, run, device, beside):
        for _ in range(3):
            self.output = run()
        self._run = run
        self.num_bytes = 1000
        StandIn.made += 1

    def replay(self):
        output = self._run()
        if self.output is not None:
            self.output.copy_(output)
        StandIn.replays += 1
        return self.output


class _Event:
    def record(self, stream):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True


# Tensors that the host reads without waiting for anybody, by address. Kept, so that no other gets it.
_ON_THE_HOST: dict[int, torch.Tensor] = {}


class _Copy(graphs._Copy):
    def __init__(self, tokens):
        self.event, self.flag = _Event(), torch.empty((), dtype=torch.bool)
        self.tokens = None if tokens is None else torch.empty_like(tokens)
        _ON_THE_HOST.update((each.data_ptr(), each) for each in (self.flag, self.tokens) if each is not None)

    def begin(self, flag, tokens):
        with mock.patch.object(torch.cuda, "current_stream", lambda device: None):
            super().begin(flag, tokens)


class InVain:
    """Takes back draws of a CPU's generator, which has no offset."""

    def __init__(self, device):
        self.states = [torch.get_rng_state()]

    def note(self):
        self.states.append(torch.get_rng_state())

    def take_back(self, steps):
        torch.set_rng_state(self.states[steps])


def as_on_a_gpu(patch: pytest.MonkeyPatch, kind=StandIn) -> None:
    """Steps are kept as on a GPU, with `kind` for the graph. What the device does late is late here too."""
    patch.setattr(graphs, "is_cuda", lambda device: True)
    patch.setattr(graphs, "Graph", kind)
    patch.setattr(graphs, "_Copy", _Copy)
    # The trial captures a step, too, which tests do not count.
    patch.setattr(draws, "InVain", InVain)
    patch.setattr(trial, "reason_against_capture", lambda twin, agreed: None)


@contextlib.contextmanager
def graphs_of(kind=StandIn):
    """The same in a with block."""
    with pytest.MonkeyPatch.context() as patch:
        as_on_a_gpu(patch, kind)
        yield


class Waits(TorchDispatchMode):
    """Counts what a device would be waited for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += args[0].data_ptr() not in _ON_THE_HOST
        return func(*args, **kwargs or {})
