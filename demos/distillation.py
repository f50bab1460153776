# SPDX-License-Identifier: Apache-2.0
"""Distillation from a teacher's top-k log-probabilities: what is stored, and that a student learns as much from it.

    python demos/distillation.py

The first part shows what a step of such training costs with a large LM head: torch, which keeps all logits and their
gradient, against `linear_log_softmax_topk`, which computes them in pieces, forwards and backwards. It shows the same for
cross-entropy alone. There Liger-Kernel's fused linear cross-entropy takes part, if it is installed and there is a GPU
(`pip install liger-kernel`). It has no loss over some of a teacher's tokens. It works in pieces of a few rows by the whole
vocabulary, about rows x H logits each. It computes the gradients in the forward pass, and so needs one product less.

The teacher is the small language model of decoding_latency.py, trained there or here. Of each of its distributions over
32,000 tokens the k best log-probabilities are kept. One student of half the width learns from those, one from all of the
teacher's logits, and both are compared with the teacher on held-out text.
"""

from __future__ import annotations

import copy
import importlib
import multiprocessing
import resource
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from torch import Tensor
from tqdm import trange
from transformers import AutoModelForCausalLM

from causal_models import CausalModel, tiny
from fused_topk import linear_log_softmax_topk
from fused_topk.generation import TokenLogprobs, text_topk_logprobs, topk_logprobs
from tiny_language_model import Recipe

LENGTH, BATCH = 64, 8
HELD_OUT = 32


def texts(teacher: CausalModel, count: int) -> Tensor:
    """Token ids [count, LENGTH + 1] of the standard library's source, or [the most that there are, LENGTH + 1]."""
    root = Path(sysconfig.get_path("stdlib"))
    ids: list[int] = []
    for path in sorted(root.glob("*.py")):
        if len(ids) >= count * (LENGTH + 1):
            break
        assert teacher.tokenizer is not None
        ids += teacher.tokenizer(path.read_text(encoding="utf-8", errors="replace"))["input_ids"]
    count = min(count, len(ids) // (LENGTH + 1))
    return torch.tensor(ids[: count * (LENGTH + 1)]).view(count, LENGTH + 1)


@torch.no_grad()
def lessons_of(teacher: Any, tokens: Tensor, k: int) -> list[TokenLogprobs]:
    """The teacher's k best log-probabilities at each position, for each batch: all that has to be stored."""
    return [text_topk_logprobs(teacher, batch[:, :-1], k) for batch in tokens.split(BATCH)]


def from_best(student: Any, inputs: Tensor, lesson: TokenLogprobs) -> Tensor:
    """Kullback-Leibler divergence of the student from the teacher, over the k tokens and all others as one. The student's
    logits are never all in memory."""
    ours = text_topk_logprobs(student, inputs, 1, targets=lesson.indices).target_logprobs
    assert ours is not None
    return divergence(ours, lesson.values)


def divergence(ours: Tensor, theirs: Tensor) -> Tensor:
    """The same, of log-probabilities [..., k]."""
    # The probability of all other tokens, at least 1e-6 so that its logarithm is finite.
    our_rest = torch.log1p(-ours.exp().sum(-1).clamp(max=1 - 1e-6))
    their_rest = torch.log1p(-theirs.exp().sum(-1).clamp(max=1 - 1e-6))
    of_best = (theirs.exp() * (theirs - ours)).sum(-1)
    return (of_best + their_rest.exp() * (their_rest - our_rest)).mean()


def from_all(logits: Tensor, lesson: Tensor) -> Tensor:
    """Over all tokens; `lesson` are the teacher's logits."""
    theirs = lesson.log_softmax(-1)
    return (theirs.exp() * (theirs - logits.log_softmax(-1))).sum(-1).mean()


def trained(student: Any, tokens: Tensor, loss_of: Callable[[Any, Tensor, int], Tensor], steps: int, name: str) -> Any:
    """A copy of the student after some steps; `loss_of` the student, its input and the number of the batch."""
    student = copy.deepcopy(student).train()
    optimizer = torch.optim.AdamW(student.parameters(), lr=4e-3)
    batches = tokens.split(BATCH)
    for step in (bar := trange(steps, desc=f"Student, {name}", mininterval=1.0)):
        number = step % len(batches)
        loss = loss_of(student, batches[number][:, :-1], number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            bar.set_postfix(loss=f"{loss.item():.2f}")
    return student.eval()


@torch.no_grad()
def scored(model: Any, teacher: Any, tokens: Tensor) -> tuple[float, float, float]:
    """On texts: divergence from the teacher, mean log-probability of the next token, how often it is among the ten best."""
    found, total = [], 0.0
    for batch in tokens.split(BATCH):
        logits = model(batch[:, :-1]).logits
        total += float(from_all(logits, teacher(batch[:, :-1]).logits)) * len(batch) / len(tokens)
        found.append(topk_logprobs(logits, 1, targets=batch[:, 1:]))
    logprobs = torch.cat([each.target_logprobs.flatten() for each in found if each.target_logprobs is not None])
    ranks = torch.cat([each.target_ranks.flatten() for each in found if each.target_ranks is not None])
    return total, float(logprobs.mean()), float((ranks <= 10).float().mean())


LIGER = "Liger-Kernel"
LOGITS_KEPT = "torch, all logits kept"
IN_PIECES = "linear_log_softmax_topk"


def why_no_liger() -> str:
    """Why Liger-Kernel cannot take part; empty where it can."""
    if not torch.cuda.is_available():
        return "needs a GPU"
    try:
        importlib.import_module("liger_kernel.transformers")
    except ImportError as error:
        return f"does not load: {error}"
    return ""


def step_cost(positions: int, depth: int, vocab_size: int, k: int, way: str) -> tuple[float, float, float]:
    """(seconds, MB by which the memory rises at most, the loss) of a forward and a backward pass of an LM head.

    k: the teacher's tokens of each position; 0 for cross-entropy alone. way: one of the three above."""
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if is_cuda else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if is_cuda else torch.float32

    def learned(*shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=generator, device=device) * depth**-0.5
        return drawn.to(dtype).requires_grad_()

    hidden, weight = learned(positions, depth), learned(vocab_size, depth)
    tokens = torch.randint(vocab_size, (positions, k + 1), generator=generator, device=device)
    theirs = torch.randn(positions, k, generator=generator, device=device).log_softmax(-1) - 0.1

    def loss() -> Tensor:
        if way == LIGER:
            liger = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
            value: Tensor = liger(weight, hidden, tokens[:, k])
            return value
        if way == LOGITS_KEPT:
            logprobs = (hidden @ weight.T).log_softmax(-1, dtype=torch.float32).gather(-1, tokens)
        else:
            logprobs = linear_log_softmax_topk(hidden, weight, 1, targets=tokens).target_logprobs
        ours, of_target = logprobs.split([k, 1], -1)
        return divergence(ours, theirs) - of_target.mean() if k else -of_target.mean()

    def step() -> float:
        value = loss()
        value.backward()
        # Waits for a GPU.
        return float(value.detach())

    if is_cuda:
        # Kernels are compiled and libraries make their workspaces.
        step()
        hidden.grad = weight.grad = None
    with Peak(device) as peak:
        begin = time.perf_counter()
        found = step()
        seconds = time.perf_counter() - begin
    return seconds, peak.megabytes, found


def compare_steps(positions: int, depth: int, vocab_size: int, k: int) -> None:
    """Each in a process of its own, whose peak memory is the step's."""
    what = f"{k} teacher's tokens each" if k else "cross-entropy alone"
    print(f"One step of an LM head, {positions} positions x {depth} -> {vocab_size}, {what}:", flush=True)
    context = multiprocessing.get_context("spawn")
    ways = [LOGITS_KEPT, IN_PIECES]
    if not k and not why_no_liger():
        ways.append(LIGER)
    for way in ways:
        with context.Pool(1) as pool:
            seconds, megabytes, loss = pool.apply(step_cost, (positions, depth, vocab_size, k, way))
        print(f"  {way:28}{megabytes:8,.0f} MB {seconds:8.2f} s   loss {loss:.5f}", flush=True)
    if not k and why_no_liger():
        print(f"  {LIGER:28}{why_no_liger()}", flush=True)


class Peak:
    """How far the memory rises in a block: torch's on a GPU, the process's on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.megabytes = 0.0

    def __enter__(self) -> Peak:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._before = self._now()
        return self

    def __exit__(self, *error: object) -> None:
        self.megabytes = (self._now(is_peak=True) - self._before) / 1e6

    def _now(self, is_peak: bool = False) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated() if is_peak else torch.cuda.memory_allocated()
        # The most memory that the process has held so far, at the start of the block too: memory that it has freed since is not
        # given back. Linux's own count is of this program alone. `ru_maxrss` begins with that of the process that started it.
        status = Path("/proc/self/status")
        if status.exists():
            return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(
    k: Annotated[int, typer.Option(min=1, help="Log-probabilities kept at each position.")] = 256,
    steps: Annotated[int, typer.Option(min=0, help="Of each student's training.")] = 60,
    num_texts: Annotated[int, typer.Option(min=1, help=f"Texts of {LENGTH} tokens to learn from.")] = 128,
    training_steps: Annotated[int, typer.Option(min=1, help="Of the teacher.")] = Recipe.steps,
    positions: Annotated[
        int, typer.Option(min=0, help="Of the step whose memory is compared; 0 leaves it out.")
    ] = 1024,
    depth: Annotated[int, typer.Option(min=1, help="Of its hidden states.")] = 256,
    vocab_size: Annotated[int, typer.Option(min=1, help="Of its LM head.")] = 128256,
) -> None:
    transformers.logging.set_verbosity_error()
    teacher = tiny(torch.device("cpu"), torch.float32, Recipe(steps=training_steps))
    if k > teacher.vocab_size:
        raise typer.BadParameter(f"--k must be at most {teacher.vocab_size}, the tokens of the teacher, got {k}")
    everything = texts(teacher, num_texts + HELD_OUT)
    if len(everything) < num_texts + HELD_OUT:
        most = len(everything) - HELD_OUT
        raise typer.BadParameter(f"--num-texts must be at most {most}, the texts that there are, got {num_texts}")
    tokens, held_out = everything[:-HELD_OUT], everything[-HELD_OUT:]
    if positions:
        compare_steps(positions, depth, vocab_size, k)
        compare_steps(positions, depth, vocab_size, 0)
    lessons = lessons_of(teacher.model, tokens, k)
    stored = sum(each.values.numel() * (4 + 4) + each.logsumexp.numel() * 4 for each in lessons)
    full = tokens[:, 1:].numel() * teacher.vocab_size * 4
    print(f"Stored: {stored / 1e6:.0f} MB (float32 and int32), where the logits are {full / 1e6:,.0f} MB.", flush=True)

    @torch.no_grad()
    def all_logits(number: int) -> Tensor:
        # Too many to keep: computed anew each time.
        logits: Tensor = teacher.model(tokens.split(BATCH)[number][:, :-1]).logits
        return logits

    config = copy.deepcopy(teacher.model.config)
    config.hidden_size //= 2
    config.intermediate_size //= 2
    config.num_attention_heads = config.num_key_value_heads = max(1, config.num_attention_heads // 2)
    torch.manual_seed(0)
    student = AutoModelForCausalLM.from_config(config)
    best, whole = f"from the best {k}", "from all logits"
    models = {
        "teacher": teacher.model,
        "student, untrained": student,
        f"student, {best}": trained(student, tokens, lambda model, x, n: from_best(model, x, lessons[n]), steps, best),
        f"student, {whole}": trained(
            student, tokens, lambda model, x, n: from_all(model(x).logits, all_logits(n)), steps, whole
        ),
    }
    print(f"On held-out text:           {'KL from teacher':>20} {'log p(next token)':>20} {'among the ten best':>20}")
    for name, model in models.items():
        from_teacher, mean, share = scored(model, teacher.model, held_out)
        print(f"{name:28}{from_teacher:20.3f} {mean:20.3f} {share:20.1%}")


if __name__ == "__main__":
    typer.run(main)
