# SPDX-License-Identifier: Apache-2.0
"""TokenTrie: what may follow a text is what the items themselves say, whatever the catalogue and however it is given."""

import random

import numpy as np
import pytest
import torch

from decoding import one_thread  # noqa: F401
from fused_topk.generation import TokenTrie
from fused_topk.generation.trie import keys, token_trie
from fused_topk.rows import unpacked
from rows import also
from tries import TOKENS, Items, catalogue

END = 2
ITEMS = [[5, 9, 7], [5, 9], [8], [5, 9, 31], [64, 32, 63, 96]]


def allowed_at(trie, nodes, vocab_size):
    return [set(row.nonzero()[:, 0].tolist()) for row in unpacked(trie.allowed_mask(nodes, vocab_size), vocab_size)]


def texts_of(generator, items: Items, end: int) -> list[tuple[int, ...]]:
    """All beginnings of items, and those with one and two further tokens."""
    begins = {item[:length] for item in items.items for length in range(len(item) + 1)}
    further = {(*text, token) for text in begins for token in (end, generator.choice(TOKENS), 7, -1)}
    return sorted(begins | further | {(*text, generator.choice([end, *TOKENS])) for text in further})


def check_catalogue(module, items: list[list[int]], end: int, generator: random.Random) -> None:
    trie, known = module.TokenTrie(items, end), Items(items, end)
    assert len(trie) == len(known.items)
    assert trie.depth == max(map(len, items))
    most = max(end, *(token for item in items for token in item))
    vocab_size = most + generator.choice([1, 2, 33, 100])
    texts = texts_of(generator, known, end)
    walked = torch.zeros(len(texts), dtype=torch.int64)
    for length in range(max(map(len, texts)) + 1):
        of_length = [text for text in texts if len(text) == length]
        if of_length:
            nodes = trie.nodes(torch.tensor(of_length, dtype=torch.int64).view(len(of_length), length))
            assert allowed_at(trie, nodes, vocab_size) == [known.after(text) for text in of_length]
        if length:
            tokens = torch.tensor([text[length - 1] if len(text) >= length else -1 for text in texts])
            walked = trie.step(walked, tokens)
            is_read = [len(text) >= length for text in texts]
            expected = [known.after(text[:length]) for text, is_so in zip(texts, is_read) if is_so]
            assert allowed_at(trie, walked[torch.tensor(is_read)], vocab_size) == expected


def check(module, seeds) -> None:
    """Args: module: token_trie, or a copy of it with a fault."""
    before = module._NARROW, module._MASK_BYTES
    try:
        for seed in seeds:
            generator = random.Random(seed)
            # With masks of all nodes, of some that are wide, and of no more than there is memory for.
            module._NARROW = generator.choice([0, 1, 2, 3, 256])
            module._MASK_BYTES = generator.choice([0, 32, 64, 1 << 20])
            end = generator.choice([2, 31, 32, 64, 120])
            check_catalogue(module, catalogue(generator, end), end, generator)
    finally:
        module._NARROW, module._MASK_BYTES = before


@pytest.mark.parametrize("seeds", [range(25), *also(*(range(n, n + 250) for n in range(100, 600, 250)))])
def test_random_catalogues(seeds):
    check(token_trie, seeds)


def equal(one: TokenTrie, other: TokenTrie) -> bool:
    return (
        repr(one) == repr(other)
        and np.array_equal(one._levels, other._levels)
        and all(torch.equal(one._tensors()[name], tensor) for name, tensor in other._tensors().items())
    )


def test_however_the_items_are_given():
    table = [[5, 9, 7], [64, 31, 0], [5, 9, 8]]
    expected = TokenTrie(table, END)
    given = [
        *(torch.tensor(table, dtype=dtype) for dtype in (torch.int64, torch.int32, torch.uint8)),
        torch.tensor(table).T.contiguous().T,
        *(np.array(table, dtype=dtype) for dtype in (np.uint16, np.uint64)),
        (item for item in table),
        set(map(tuple, table)),
        [torch.tensor(item) for item in table],
        table + table,
        table[::-1],
    ]
    for each in given:
        assert equal(TokenTrie(each, np.int64(END)), expected)


def test_what_a_trie_says_of_itself():
    trie = TokenTrie(ITEMS, END)
    assert (len(trie), trie.depth, trie.end_token_id, trie.device) == (5, 4, END, torch.device("cpu"))
    # Nine beginnings and an end token inside, and what stands behind them.
    assert trie._keys.nbytes == 8 * 11
    assert trie.nbytes == sum(each.nbytes for each in (trie._keys, trie._wide_nodes, trie._wide_masks, trie._narrow))
    assert repr(trie) == f"TokenTrie(5 items of up to 4 tokens, end_token_id=2, {trie.nbytes} bytes on cpu)"
    assert trie.to("cpu") is trie
    moved = trie.to("meta")
    assert (moved.device.type, trie.device.type, moved.nbytes, len(moved)) == ("meta", "cpu", trie.nbytes, 5)


def test_what_is_saved_is_loaded(tmp_path):
    for name in ("trie.npz", "trie"):
        path = tmp_path / name
        trie = TokenTrie(ITEMS, END)
        trie.save(path)
        assert path.exists() and equal(TokenTrie.load(path), trie)


def test_a_trie_is_on_a_cpu_at_first_whatever_the_users_default_device(tmp_path):
    with torch.device("meta"):
        trie = TokenTrie(ITEMS, END)
        trie.save(tmp_path / "trie")
        loaded = TokenTrie.load(tmp_path / "trie")
    for each in (trie, loaded):
        assert {tensor.device.type for tensor in each._tensors().values()} == {"cpu"}


@pytest.mark.parametrize(
    "change",
    [
        {"keys": np.arange(5.0)},
        {"keys": np.array([[keys.SENTINEL]])},
        {"levels": np.array([0, 3, 2, 4, 10])},
        {"keys": np.array([3, 1, keys.SENTINEL]), "levels": np.array([0, 2])},
        {"keys": np.array([keys.SENTINEL]), "levels": np.array([0])},
        {"items": np.array(-1)},
        {"end_token_id": np.array(-5)},
        {"end_token_id": None},
    ],
    ids=str,
)
def test_a_file_of_something_else(tmp_path, change):
    TokenTrie(ITEMS, END).save(tmp_path / "trie")
    with np.load(tmp_path / "trie") as file:
        content = {name: value for name, value in {**file, **change}.items() if value is not None}
    with open(tmp_path / "trie", "wb") as file:
        np.savez(file, **content)
    with pytest.raises(ValueError, match=r"`path` must be a file that save\(\) wrote"):
        TokenTrie.load(tmp_path / "trie")


@pytest.mark.parametrize("kind", ["empty", "text", "array", "cut", "damaged"])
def test_a_file_of_another_format(tmp_path, kind):
    path = tmp_path / "trie"
    TokenTrie(ITEMS, END).save(path)
    content = {"empty": b"", "text": b"no trie", "cut": path.read_bytes()[:-100]}
    # A method of compression that zipfile does not know, in the directory at the end of the file.
    entry = path.read_bytes().index(b"PK\x01\x02")
    content["damaged"] = path.read_bytes()[: entry + 10] + b"\x63" + path.read_bytes()[entry + 11 :]
    if kind == "array":
        with open(path, "wb") as file:
            np.save(file, np.arange(3))
    else:
        path.write_bytes(content[kind])
    with pytest.raises(ValueError, match=r"`path` must be a file that save\(\) wrote"):
        TokenTrie.load(path)


@pytest.mark.parametrize(
    ("items", "end", "error", "message"),
    [
        ([], END, ValueError, "at least one item, got none"),
        (torch.zeros(0, 3, dtype=torch.int64), END, ValueError, "at least one item, got none"),
        ([[5], []], END, ValueError, "got an empty one"),
        (torch.zeros(3, 0, dtype=torch.int64), END, ValueError, "got an empty one"),
        ([[5], [5, 2**31]], END, ValueError, "from 0 to 2.31 - 1, got 2147483648"),
        (np.array([[2**63]], dtype=np.uint64), END, ValueError, "from 0 to 2.31 - 1, got 9223372036854775808"),
        ([[5], [5, 6, END]], END, ValueError, "`end_token_id` must be in no item, got 2"),
        ([[5.0]], END, TypeError, "must be lists of integers"),
        ([5, 6], END, TypeError, "must be lists of integers"),
        ("ab", END, TypeError, "must be lists of integers"),
        (torch.zeros(2, 2), END, TypeError, "must be integers of shape"),
        (torch.zeros(2, dtype=torch.int64), END, TypeError, "must be integers of shape"),
        (torch.ones(2, 2, dtype=torch.bool), END, TypeError, "must be integers of shape"),
        (torch.ones(2, 2, device="meta").long(), END, ValueError, "`sequences` must have values, got a meta tensor"),
        ([[5]], -1, ValueError, "`end_token_id` must be from 0 to 2.31 - 1, got -1"),
        ([[5]], None, TypeError, "`end_token_id` must be an integer, got NoneType"),
    ],
)
def test_what_is_no_catalogue(items, end, error, message):
    with pytest.raises(error, match=message):
        TokenTrie(items, end)


def test_the_greatest_token():
    trie = TokenTrie([[2**31 - 1, 5]], END)
    nodes = trie.step(torch.zeros(2, dtype=torch.int64), torch.tensor([2**31 - 1, -1], dtype=torch.int32))
    assert nodes.tolist() == [1, 3]


def test_more_beginnings_than_keys_can_tell_apart(monkeypatch):
    monkeypatch.setattr(keys, "_MOST_NODES", 9)
    with pytest.raises(ValueError, match="at most 9 different beginnings"):
        TokenTrie(ITEMS, END)


def test_a_vocabulary_without_some_of_the_tokens():
    nodes = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="`vocab_size` must be greater than the trie's tokens, got 96 and a token 96"):
        TokenTrie(ITEMS, END).allowed_mask(nodes, 96)
    with pytest.raises(ValueError, match="got 100 and a token 100"):
        TokenTrie(ITEMS, 100).allowed_mask(nodes, 100)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda trie, at, of: trie.step(at.int(), of), TypeError, "`nodes` must be int64, got torch.int32; use .long"),
        (lambda trie, at, of: trie.step(at, of > 0), TypeError, "`tokens` must be int64 or int32, got torch.bool"),
        (lambda trie, at, of: trie.step(at, [5, 8]), TypeError, "`tokens` must be a torch.Tensor, got list"),
        (lambda trie, at, of: trie.step(at, of.to("meta")), ValueError,
            "`tokens` must be on cpu, .* got meta; .* `trie.to"),
        (lambda trie, at, of: trie.to("meta").step(at, of), ValueError, "`nodes` must be on meta, .* got cpu"),
        (lambda trie, at, of: trie.nodes(of.view(1, 2).double()), TypeError, "`texts` must be int64 or int32"),
        (lambda trie, at, of: trie.nodes(of[0]), ValueError,
            r"`texts` must have the shape \(\.\.\., length\), got \(\)"),
        (lambda trie, at, of: trie.nodes([[5, 9]]), TypeError, "`texts` must be a torch.Tensor, got list"),
        (lambda trie, at, of: trie.allowed_mask(at.int(), 97), TypeError, "`nodes` must be int64, got torch.int32"),
        (lambda trie, at, of: trie.allowed_mask(at, 97.0), TypeError, "`vocab_size` must be an int, got float"),
        (lambda trie, at, of: trie.allowed_mask(at.to("meta"), 97), ValueError, "`nodes` must be on cpu"),
    ],
)  # fmt: skip
def test_wrong_nodes_and_tokens(call, error, message):
    nodes, tokens = torch.zeros(2, dtype=torch.int64), torch.tensor([5, 8])
    with pytest.raises(error, match=message):
        call(TokenTrie(ITEMS, END), nodes, tokens)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 3), (0,), (2, 0)], ids=str)
def test_shapes(shape):
    trie = TokenTrie(ITEMS, END)
    nodes = trie.step(torch.zeros(shape, dtype=torch.int64), torch.full(shape, 5, dtype=torch.int32))
    assert nodes.shape == shape and (nodes == 1).all()
    mask = trie.allowed_mask(nodes, 97)
    assert mask.dtype == torch.int32 and mask.shape == (*shape, 4)
    assert (unpacked(mask, 97).sum(-1) == 1).all()
    text = torch.tensor([5, 9]).expand(*shape, 2)
    assert torch.equal(trie.nodes(text), trie.step(nodes, torch.full(shape, 9)))


@pytest.mark.exhaustive
def test_a_step_is_traced_in_one_piece():
    trie = TokenTrie(ITEMS, END)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(nodes, tokens):
        nodes = trie.step(nodes, tokens)
        return nodes, trie.allowed_mask(nodes, 97)

    nodes, mask = run(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([[5, 8, 7]]))
    assert nodes.tolist() == [[1, 2, 11]]
    assert torch.equal(mask, trie.allowed_mask(nodes, 97))


def test_the_bytes_of_masks_are_bounded(monkeypatch):
    monkeypatch.setattr(token_trie, "_NARROW", 1)
    monkeypatch.setattr(token_trie, "_MASK_BYTES", 4 * 4 * 2)
    # Ten nodes of 2 to 11 children, and the root, which has as many.
    items = [[first, first + n] for first in range(10, 20) for n in range(first - 8)]
    trie = TokenTrie([*items, [96]], END)
    assert trie._wide_masks.shape == (2 + 1, 4) and len(trie._narrow) == 10
