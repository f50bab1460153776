# SPDX-License-Identifier: Apache-2.0
"""Distillation from a teacher's top-k log-probabilities: what is stored, and that a student learns as much from it.

    python demos/distillation.py

The teacher is the small language model of decoding_latency.py, trained there or here. Of each of its distributions over
32,000 tokens the k best log-probabilities are kept. One student of half the width learns from those, one from all of the
teacher's logits, and both are compared with the teacher on held-out text. What a step costs with a large LM head, beside torch and
Liger-Kernel, `python demos/benchmark bench --suite training` shows on a GPU.
"""

from __future__ import annotations

import copy
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import transformers
import typer
from torch import Tensor
from tqdm import trange
from transformers import AutoModelForCausalLM

from causal_models import CausalModel, tiny
from fused_topk import TokenLogprobs, token_logprobs, topk
from fused_topk.generation import text_token_logprobs
from tiny_language_model import Recipe

LENGTH, BATCH = 64, 8
HELD_OUT = 32


class Lesson(NamedTuple):
    """The teacher's k best tokens at each position; their log-probabilities, and that of all others, in the end."""

    tokens: Tensor  # [batch, length, k]
    logprobs: Tensor  # [batch, length, k + 1]


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
def lessons_of(teacher: Any, tokens: Tensor, k: int) -> list[Lesson]:
    """What has to be stored of the teacher at each position, for each batch."""

    def lesson(inputs: Tensor) -> Lesson:
        logits = teacher(inputs).logits
        best = topk(logits, k).indices
        return Lesson(best, events(token_logprobs(logits, best, tail=True)))

    return [lesson(batch[:, :-1]) for batch in tokens.split(BATCH)]


def events(found: TokenLogprobs) -> Tensor:
    """The log-probabilities of the given tokens, and of all others as one: [..., k + 1]."""
    assert found.tail is not None
    return torch.cat([found.logprobs, found.tail.unsqueeze(-1)], -1)


def from_best(student: Any, inputs: Tensor, lesson: Lesson) -> Tensor:
    """Kullback-Leibler divergence of the student from the teacher, over the k tokens and all others as one. The student's
    logits are never all in memory."""
    return divergence(events(text_token_logprobs(student, inputs, lesson.tokens, tail=True)), lesson.logprobs)


def divergence(ours: Tensor, theirs: Tensor) -> Tensor:
    """The same, of the log-probabilities of all events [..., k + 1]."""
    return torch.nn.functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1).mean()


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
        found.append(token_logprobs(logits, batch[:, 1:], ranks=True))
    logprobs = torch.cat([each.logprobs.flatten() for each in found])
    ranks = torch.cat([each.ranks.flatten() for each in found if each.ranks is not None])
    return total, float(logprobs.mean()), float((ranks <= 10).float().mean())


def main(
    k: Annotated[int, typer.Option(min=1, help="Log-probabilities kept at each position.")] = 256,
    steps: Annotated[int, typer.Option(min=0, help="Of each student's training.")] = 60,
    num_texts: Annotated[int, typer.Option(min=1, help=f"Texts of {LENGTH} tokens to learn from.")] = 128,
    training_steps: Annotated[int, typer.Option(min=1, help="Of the teacher.")] = Recipe.steps,
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
    lessons = lessons_of(teacher.model, tokens, k)
    stored = sum(4 * (each.tokens.numel() + each.logprobs.numel()) for each in lessons)
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
