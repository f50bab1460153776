# SPDX-License-Identifier: Apache-2.0
"""Generative retrieval: a model writes the ids of items, and a trie lets it write no others.

    $ python demos/semantic_ids.py --beams 64

An item's id is four tokens, one of each codebook, as recommenders learn them. A user is the four items seen last; the model
writes the next one. Items, users and the model are made here in under a minute. It exits with 1 if a result is no item, or if
the best ones are not those of scoring every item by itself.
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated, Any

import torch
import transformers
import typer
from torch import Tensor
from tqdm import trange
from transformers import LlamaConfig, LlamaForCausalLM

from fused_topk.generation import TokenTrie, TrieLogitsProcessor, fused_decoding

START, END, FIRST = 0, 1, 2
LEVELS, CODES = 4, 64
SEEN = 4
USERS, BEST = 8, 10


def made_items(count: int) -> Tensor:
    """Ids [about count, LEVELS] of items that differ, those of a category one after the other. Token 64 l + c + 2 is code c of level l."""
    codes = torch.randint(CODES, (count, LEVELS))
    # Each category, which is the first code, has items.
    codes[:, 0] = torch.arange(count) * CODES // count
    return torch.unique(codes, dim=0) + FIRST + CODES * torch.arange(LEVELS)


class Taste:
    """What users look at next: an item of the category that follows the last one. A category's first items are the most frequent."""

    def __init__(self, items: Tensor) -> None:
        self.items = items
        categories = items[:, 0] - FIRST
        self._starts = torch.searchsorted(categories, torch.arange(CODES))
        self._counts = torch.bincount(categories, minlength=CODES)

    def users(self, count: int) -> tuple[Tensor, Tensor]:
        """Texts [count, 1 + SEEN * LEVELS] of the items seen, and the next one of each [count, LEVELS]."""
        category = torch.randint(CODES, (count,))
        seen = []
        for _ in range(SEEN + 1):
            place = (torch.rand(count) ** 3 * self._counts[category]).long()
            seen.append(self.items[self._starts[category] + place])
            category = (5 * category + 3) % CODES
        texts = torch.cat([torch.full((count, 1), START), *seen], 1)
        return texts[:, :-LEVELS], texts[:, -LEVELS:]


def trained(taste: Taste, steps: int) -> LlamaForCausalLM:
    # A model this small is only slowed down by threads that wait for each other.
    torch.set_num_threads(1)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"bos_token_id": START, "eos_token_id": END, "pad_token_id": END}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=FIRST + LEVELS * CODES, **shape, **special)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in (bar := trange(steps, desc="Learning what users look at")):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * min(1.0, (step + 1) / 30) * (1 - step / steps)
        texts = torch.cat(taste.users(64), 1)
        loss = model(input_ids=texts, labels=texts).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")
    return model.eval()


@torch.no_grad()
def best_by_scoring_all(model: Any, texts: Tensor, items: Tensor) -> Tensor:
    """The BEST items of each text, [texts, BEST, LEVELS]: each item read by the model behind the text."""
    best = []
    for text in texts:
        scores = []
        for part in items.split(512):
            whole = torch.cat([text.expand(len(part), -1), part], 1)
            log_probs = model(whole).logits[:, -LEVELS - 1 : -1].log_softmax(-1)
            scores.append(log_probs.gather(2, part.unsqueeze(-1)).sum((1, 2)))
        best.append(items[torch.cat(scores).topk(BEST).indices])
    return torch.stack(best)


def prefix_fn(items: Tensor, begin_index: int) -> Any:
    """transformers' way: what may follow a text, looked up on the host for each beam."""
    following: dict[tuple[int, ...], set[int]] = {}
    for item in items.tolist():
        for level, token in enumerate(item):
            following.setdefault(tuple(item[:level]), set()).add(token)
    listed = {text: list(tokens) for text, tokens in following.items()}
    return lambda batch, ids: listed.get(tuple(ids[begin_index:].tolist()), [END])


def median_ms(call: Any, repeats: int) -> tuple[Any, float]:
    """What the call gives, and its time after a first one."""
    result = call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - started))
    return result, statistics.median(times)


def main(
    items: Annotated[int, typer.Option(min=CODES, help="In the catalogue.")] = 5000,
    beams: Annotated[int, typer.Option(min=BEST, help="Items that are kept for each user.")] = 64,
    steps: Annotated[int, typer.Option(min=0, help="Of training.")] = 300,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each way.")] = 5,
) -> None:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    catalogue = made_items(items)
    taste = Taste(catalogue)
    model = trained(taste, steps)
    started = time.perf_counter()
    trie = TokenTrie(catalogue, end_token_id=END)
    print(f"{trie}, built in {1e3 * (time.perf_counter() - started):.0f} ms")

    texts, _ = taste.users(USERS)
    begin_index = texts.shape[1]
    options = {"num_beams": beams, "num_return_sequences": beams, "max_new_tokens": LEVELS, "do_sample": False}
    inputs = {"inputs": texts, "attention_mask": torch.ones_like(texts)}
    ways: dict[str, dict[str, Any]] = {
        "no constraint": {},
        "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": prefix_fn(catalogue, begin_index)},
        "trie": {"logits_processor": [TrieLogitsProcessor(trie, begin_index)]},
    }
    known = set(map(tuple, catalogue.tolist()))
    found = {}
    with fused_decoding(model):
        for name, way in ways.items():
            written, milliseconds = median_ms(lambda way=way: model.generate(**inputs, **options, **way), repeats)
            found[name] = written[:, begin_index:].view(USERS, beams, LEVELS)
            are_items = sum(tuple(text) in known for text in found[name].flatten(0, 1).tolist())
            print(f"{name:>25}: {milliseconds:6.1f} ms, {are_items} of {USERS * beams} results are items")

    best = best_by_scoring_all(model, texts, catalogue)
    same = int((found["trie"][:, :BEST] == best).all(-1).sum())
    print(
        f"Of the best {BEST} of each user by scoring all {len(catalogue)} items the search gives {same} of {USERS * BEST}."
    )
    all_are_items = all(tuple(text) in known for text in found["trie"].flatten(0, 1).tolist())
    if not all_are_items or same < USERS * BEST or not torch.equal(found["trie"], found["prefix_allowed_tokens_fn"]):
        print("Wrong: see above.")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
