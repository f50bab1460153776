# SPDX-License-Identifier: Apache-2.0
"""Random catalogues, and what may follow a text by the items themselves."""

import random

# Both ends of the words of a mask.
TOKENS = (0, 1, 8, 31, 32, 63, 64, 95, 96)


def catalogue(generator: random.Random, end: int, most: int = 40, longest: int = 5, tokens=TOKENS) -> list[list[int]]:
    """Items of one length or of several, from few tokens or many. Some are equal, some the beginning of others."""
    tokens = [token for token in tokens if token != end]
    tokens = generator.sample(tokens, generator.randint(1, len(tokens)))
    length = generator.randint(1, longest)
    shortest = generator.choice([1, length])
    return [generator.choices(tokens, k=generator.randint(shortest, length)) for _ in range(generator.randint(1, most))]


class Items:
    """A catalogue, and what may follow a text: looked up among the items, one by one."""

    def __init__(self, items, end: int) -> None:
        self.items = {tuple(item) for item in items}
        self.end = end
        self._next: dict[tuple[int, ...], set[int]] = {}
        for item in self.items:
            for length, token in enumerate(item):
                self._next.setdefault(item[:length], set()).add(token)

    def after(self, text) -> set[int]:
        text = tuple(text)
        allowed = self._next.get(text, set())
        return allowed | {self.end} if text in self.items or not allowed else allowed

    def prefix_fn(self, begin_index: int):
        """For generate()."""
        return lambda batch, ids: sorted(self.after(ids[begin_index:].tolist()))
