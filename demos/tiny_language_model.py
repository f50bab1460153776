# SPDX-License-Identifier: Apache-2.0
"""A small language model of Python code, trained on the spot: no download, and a real vocabulary of 32,000 tokens.

The text is the Python standard library's own source, which every machine has. The tokenizer and the model are kept in
the user's cache folder, under a name that covers all they were made from.
"""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"

# Tests and tables are repetitive, and the graphical modules say `self.tk.call` so often that the model would too.
_FOLDERS_LEFT_OUT = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "distutils",
        "encodings",
        "ensurepip",
        "idle_test",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "tkinter",
        "turtledemo",
    }
)


@dataclass(frozen=True)
class Recipe:
    """All that decides what comes out, apart from the text and this file.

    700 steps took one minute on 2 cores of a 2.5 GHz Xeon with AVX-512; `max_seconds` is for slower machines, where
    the schedule of the learning rate ends early rather than being cut off.
    """

    vocab_size: int = 32_000
    text_bytes: int | None = None
    hidden_size: int = 128
    layers: int = 2
    sequences: int = 16
    sequence_length: int = 64
    noise_tokens: int = 3_072
    learning_rate: float = 5e-3
    steps: int = 700
    max_seconds: float = 120.0
    seed: int = 0


def folder_of_trained(recipe: Recipe, device: torch.device) -> tuple[Path, bool]:
    """The folder with the trained tokenizer and model, and whether they were trained now rather than found there."""
    sources = standard_library_sources()
    target = cache_dir() / f"python-code-{_key(recipe, sources)}"
    if target.is_dir():
        return target, False
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=target.parent))
    except OSError as error:
        raise RuntimeError(
            f"the cache folder must be writable, got {target.parent} ({error.strerror}); "
            "set XDG_CACHE_HOME to a folder that is"
        ) from error
    try:
        _train(recipe, sources, device, unfinished)
        # The rename is the only step that makes the folder visible, so an interrupted run leaves nothing half made.
        _rename_unless_exists(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target, True


def cache_dir() -> Path:
    """The demos' folder inside the user's cache folder, wherever the system has that."""
    chosen = os.environ.get("XDG_CACHE_HOME")
    if chosen:
        base = Path(chosen).expanduser()
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path.home() / ".cache"
    return base / "fused_topk" / "demos"


def standard_library_sources() -> list[Path]:
    """The source files of the standard library that make good reading, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = sorted(
        path for path in root.rglob("*.py") if not _FOLDERS_LEFT_OUT.intersection(path.relative_to(root).parts)
    )
    if not sources:
        raise RuntimeError(
            f"the standard library must have its source files, found none in {root}; "
            "choose a model on disk with --model, or --shape"
        )
    return sources


def _key(recipe: Recipe, sources: list[Path]) -> str:
    """A hash of all that the result depends on: the recipe, the text (by names and sizes) and this file."""
    # The code without its comments and layout, which change nothing.
    digest = hashlib.sha256(ast.dump(ast.parse(Path(__file__).read_bytes())).encode())
    digest.update(repr(recipe).encode())
    for path in sources:
        digest.update(f"{path}:{path.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]


def _rename_unless_exists(source: Path, target: Path) -> None:
    try:
        source.rename(target)
    except OSError:
        # Another process was faster, and its result is as good as this one. Anything else is a real error.
        if not target.is_dir():
            raise


def _train(recipe: Recipe, sources: list[Path], device: torch.device, folder: Path) -> None:
    texts = _read(sources, recipe.text_bytes)
    tokenizer = _train_tokenizer(texts, recipe.vocab_size)
    token_ids = _encode(texts, tokenizer).to(device)
    model = _train_model(recipe, token_ids, tokenizer.get_vocab_size())
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def _read(sources: list[Path], text_bytes: int | None) -> list[str]:
    texts: list[str] = []
    read = 0
    for path in sources:
        if text_bytes is not None and read >= text_bytes:
            break
        texts.append(path.read_text(encoding="utf-8", errors="replace"))
        read += len(texts[-1])
    return texts


def _train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level byte-pair tokenizer, as GPT-2's, with `vocab_size` entries or as many as the text gives."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    batches = (texts[start : start + 16] for start in range(0, len(texts), 16))
    progress = tqdm(batches, total=-(-len(texts) // 16), desc="Training the tokenizer", unit=" batches of files")
    tokenizer.train_from_iterator(progress, trainer)
    return tokenizer


def _encode(texts: list[str], tokenizer: Tokenizer) -> Tensor:
    """All texts as one row of token ids, each text after an end-of-text token."""
    end_of_text = tokenizer.encode(END_OF_TEXT).ids
    token_ids: list[int] = []
    for text in tqdm(texts, desc="Encoding the text", unit=" files"):
        token_ids += end_of_text + tokenizer.encode(text).ids
    return torch.tensor(token_ids)


def _train_model(recipe: Recipe, token_ids: Tensor, vocab_size: int) -> PreTrainedModel:
    """A small Llama, trained with a sampled softmax: over 32,000 tokens the full one would be 9/10 of the work."""
    device = token_ids.device
    torch.manual_seed(recipe.seed)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=recipe.hidden_size,
            intermediate_size=3 * recipe.hidden_size,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.hidden_size // 32,
            num_key_value_heads=recipe.hidden_size // 32,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    ).to(device)
    log_inclusion = _log_inclusion(
        token_ids, recipe.sequences * recipe.sequence_length + recipe.noise_tokens, vocab_size
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    window = torch.arange(recipe.sequence_length + 1, device=device)

    model.train()
    started = time.perf_counter()
    with tqdm(total=recipe.steps, desc="Training the model", unit=" steps") as bar:
        for step in range(recipe.steps):
            done = max(step / recipe.steps, (time.perf_counter() - started) / recipe.max_seconds)
            if done >= 1:
                tqdm.write(
                    f"This machine is slow or busy: training ended after {step} of {recipe.steps} steps, at its limit "
                    f"of {recipe.max_seconds:.0f} s, so the text will be poor. To train again, delete its folder.",
                    file=sys.stderr,
                )
                break
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * min(1.0, (step + 1) / 30) * (1 - done)
            starts = torch.randint(len(token_ids) - len(window), (recipe.sequences, 1), device=device)
            tokens = token_ids[starts + window]
            noise = token_ids[torch.randint(len(token_ids), (recipe.noise_tokens,), device=device)]

            hidden = model.model(tokens[:, :-1]).last_hidden_state.flatten(0, 1)
            loss = _sampled_cross_entropy(hidden, model.lm_head.weight, tokens[:, 1:].flatten(), noise, log_inclusion)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

            bar.update()
            if step % 20 == 0:
                bar.set_postfix(loss=f"{loss.item():.2f}")
    return model.eval()


def _sampled_cross_entropy(
    hidden: Tensor, embedding: Tensor, targets: Tensor, noise: Tensor, log_inclusion: Tensor
) -> Tensor:
    """Cross-entropy over the tokens that are a target or noise in this batch.

    A frequent token is nearly always among them and a rare one seldom, so each logit is raised by minus the logarithm
    of its token's chance to be there; on average that restores the full softmax.
    """
    candidates, place = torch.unique(torch.cat([targets, noise]), return_inverse=True)
    logits = hidden @ embedding[candidates].T - log_inclusion[candidates]
    return F.cross_entropy(logits, place[: len(targets)])


def _log_inclusion(token_ids: Tensor, draws: int, vocab_size: int) -> Tensor:
    """Logarithm of each token's chance to occur among `draws` tokens taken at random from the text."""
    frequency = torch.bincount(token_ids, minlength=vocab_size).double() / len(token_ids)
    chance = -torch.expm1(draws * torch.log1p(-frequency))
    return chance.clamp_min(1e-9).log().float()
