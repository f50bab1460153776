# SPDX-License-Identifier: Apache-2.0
"""Cases that every machine must agree on: the emulated one and, where there is one, a GPU."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

import oracle
from fused_topk import TopK
from fused_topk.backends import cuda
from fused_topk.layout.topk_choice import KernelChoice, choose
from oracle import DTYPES, problem_of, start
from rows import NAN, adversarial_rows, packed, random_logits, random_mask, shifted
from test_beam import check_beams

from .emulate import recorded
from .launch import Outcome
from .row_topk import empty_result, row_topk


class Case(NamedTuple):
    """A request, and how it is laid over the machine."""

    vocab_size: int
    k: int
    dtype: str = "fp32"
    # "adversarial": all of them in a batch; "2/7": every 7th of them from the 2nd on; the name of one; or a number of normal rows.
    rows: str = "adversarial"
    entry: str = "log_softmax_topk"
    owner: str = "few"  # the layout that an H200 gives to one row; "some": to 200 rows; "many": to a million
    splits: int = 0  # blocks that share a row, of 16 warps if more than one; 0: as many as the layout says
    tiles_per_part: int = 0  # a power of two, as for a longer row; 0: as many as this V needs
    mask: str = "none"  # or "bool", "packed"
    normalize: str = "allowed"
    temperature: str = "none"  # or a number; or "rows": one for each row
    start: int = 0  # elements between a 256-byte boundary and the first row
    padding: int = 0  # elements between rows
    beams: int = 0

    def __str__(self) -> str:
        """As the command line (__main__.py) has it."""
        changed = {name: x for name, x in self._asdict().items() if x != self._field_defaults.get(name)}
        return " ".join(f"--{name.replace('_', '-')} {x}" for name, x in changed.items())

    def choice(self) -> KernelChoice:
        """The layout over the machine."""
        rows = {"few": 1, "some": 200, "many": 10**6}[self.owner]
        itemsize = DTYPES[self.dtype].itemsize
        chosen = choose(rows, self.vocab_size, self.k, itemsize, 132, has_beams=bool(self.beams))
        if self.tiles_per_part:
            tile = 32 * chosen.vectors * 16 // itemsize
            parts = -(-self.vocab_size // (tile * self.tiles_per_part))
            chosen = chosen._replace(parts=parts, tiles_per_part=self.tiles_per_part, splits=min(chosen.splits, parts))
        if self.splits > 1:
            chosen = chosen._replace(warps=16)
        return chosen._replace(splits=self.splits or chosen.splits)

    def arguments(self, device: str) -> tuple[Tensor, dict[str, Any], list[str] | None]:
        """(logits, keyword arguments of the public function, names of the rows)."""
        names = None
        if self.beams:
            logits = random_logits(2, self.beams, self.vocab_size, dtype=DTYPES[self.dtype])
        elif self.rows.isdecimal():
            logits = random_logits(int(self.rows), self.vocab_size, dtype=DTYPES[self.dtype])
        else:
            rows = adversarial_rows(self.vocab_size, self.k, DTYPES[self.dtype])
            if self.temperature != "none":
                # Their differences overflow float32 before the temperature divides them.
                for name in ("random_bits", "random_finite_bits", "lowest_and_negative_infinity"):
                    del rows[name]
            first, _, step = self.rows.partition("/")
            names = [self.rows] if self.rows in rows else list(rows)[int(first) :: int(step)] if step else list(rows)
            logits = torch.stack([rows[name] for name in names])
        lead = logits.shape[:-1]
        settings: dict[str, Any] = {}
        if self.mask != "none":
            mask = random_mask(*logits.shape, share=0.7)
            settings["mask"] = (packed(mask) if self.mask == "packed" else mask).to(device)
        if self.normalize != "allowed":
            settings["normalize"] = self.normalize
        if self.temperature == "rows":
            settings["temperature"] = torch.linspace(0.3, 3.0, lead.numel(), device=device).view(lead)
        elif self.temperature != "none":
            settings["temperature"] = float(self.temperature)
        return self._placed(logits.to(device)), settings, names

    def _placed(self, logits: Tensor) -> Tensor:
        """The same logits where `start` and `padding` want them."""
        width = self.vocab_size + self.padding
        wide = shifted(logits.new_full((*logits.shape[:-1], width), NAN), self.start)
        wide[..., : self.vocab_size] = logits
        return wide[..., : self.vocab_size]


class Laid:
    """Runs a public function's kernel, laid over the machine as a case says. Tests use it as a backend (conftest.py)."""

    def __init__(self, case: Case, device: str = "cpu", **how: Any) -> None:
        self.case = case
        self.device = device  # "cpu": emulated, as row_topk() is told `how`
        self.how = how
        self.outcomes: list[Outcome] = []

    def __call__(self, entry: str, logits: Tensor, *arguments: Any, **settings: Any) -> TopK:
        scores = arguments[0] if entry == "beam_topk" else None
        problem = problem_of("log_softmax_topk" if entry == "beam_topk" else entry, logits, arguments[-1], **settings)
        if self.device != "cpu":
            out = empty_result(problem, scores)
            start(cuda, problem, out, scores, choice=self.case.choice())
            return out
        out, outcome = row_topk(problem, self.case.choice(), beam_scores=scores, **self.how)
        self.outcomes.append(outcome)
        outcome.check()
        return out


def check(case: Case, device: str = "cpu", **how: Any) -> list[Outcome]:
    """Runs a case and compares the result with the reference's; returns what came of the emulated launches."""
    logits, settings, names = case.arguments(device)
    laid = Laid(case, device, **how)
    if case.beams:
        scores = random_logits(2, case.beams, seed=1).to(device) - 20
        check_beams(laid, logits, scores, case.k, **settings)
    else:
        oracle.check(laid, case.entry, logits, case.k, row_names=names, **settings)
    return laid.outcomes


def kernel_of(case: Case) -> str:
    """The name of the kernel that a case launches."""
    logits, settings, _ = case._replace(rows="1").arguments("cpu")
    problem = problem_of(case.entry, logits, case.k, **settings)
    with recorded() as names:
        start(cuda, problem, empty_result(problem), choice=case.choice())
    return names[0]
