"""The recipe of the embedded base: corpus -> tokenizer -> a tiny Qwen3 -> a folder that transformers loads.

    lfo pretrain --output-dir base                  about 10 minutes on one GPU
    lfo pretrain --output-dir base --steps 200      a smoke test on a CPU

Deterministic up to the device's arithmetic. What comes out is checked by `lfo pretrain --check`.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lfo.engines.pretrain.corpus import Rows, converse, texts
from lfo.engines.pretrain.tokenizer import END_OF_TEXT, END_OF_TURN, train_tokenizer
from lfo.env.seeds import stream
from lfo.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

Progress = Callable[[str, int, int, str], None]  # phase, done, of, words


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All that decides what the base becomes."""

    conversations: int = 300_000
    tokenizer_conversations: int = 3_000
    vocabulary: int = 1_200
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    key_value_heads: int = 2
    feed_forward: int = 384
    row: int = 1_024  # tokens in a training row; several documents are packed into one
    batch: int = 64
    steps: int = 7_000
    learning_rate: float = 3e-3
    warmup: int = 200
    weight_decay: float = 0.05
    seed: int = 0


def build_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    written = (text for number in range(recipe.tokenizer_conversations) for text in texts(converse(number)))
    return train_tokenizer(written, vocabulary=recipe.vocabulary)


def _id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    found = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=math.ceil(len(tokenizer) / 16) * 16,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.feed_forward,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.key_value_heads,
        head_dim=recipe.hidden // recipe.heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=_id(tokenizer, END_OF_TURN),
        pad_token_id=_id(tokenizer, END_OF_TEXT),
        initializer_range=0.5 / math.sqrt(recipe.hidden),
    )
    torch.manual_seed(recipe.seed)
    return Qwen3ForCausalLM(config)


def _encode_part(numbers: range, *, tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    torch.set_num_threads(1)
    return [np.array(row, dtype=np.uint16) for row in Rows(tokenizer).write(numbers)]


def build_corpus(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, *, workers: int, progress: Progress) -> np.ndarray:
    """All training rows (rows x `recipe.row`): whole documents in random order, each ended by END_OF_TEXT."""
    parts = [range(start, min(start + 500, recipe.conversations)) for start in range(0, recipe.conversations, 500)]
    documents: list[np.ndarray] = []
    encode = partial(_encode_part, tokenizer=tokenizer)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for done, part in enumerate(pool.imap(encode, parts)):
            documents += part
            progress("corpus", parts[done].stop, recipe.conversations, f"{len(documents)} documents")
    corpus = pack(documents, row=recipe.row, end=_id(tokenizer, END_OF_TEXT), seed=recipe.seed)
    if len(corpus) < recipe.batch:
        raise ConfigError(
            f"{recipe.conversations} conversations fill {len(corpus)} rows, fewer than a batch of {recipe.batch}"
        )
    return corpus


def pack(documents: Sequence[np.ndarray], *, row: int, end: int, seed: int) -> np.ndarray:
    """Fill rows with whole documents; what does not fit into a row starts the next one."""
    order = list(range(len(documents)))
    stream(seed, "pack").shuffle(order)
    rows: list[np.ndarray] = []
    current: list[np.ndarray] = []
    room = row
    for index in order:
        document = np.append(documents[index][: row - 1], np.uint16(end))
        if len(document) > room:
            rows.append(np.concatenate([*current, np.full(room, end, dtype=np.uint16)]))
            current, room = [], row
        current.append(document)
        room -= len(document)
    return np.stack(rows) if rows else np.empty((0, row), dtype=np.uint16)


def _batches(corpus: np.ndarray, recipe: Recipe) -> Iterator[np.ndarray]:
    for epoch in itertools.count():
        order = np.random.default_rng((recipe.seed, epoch)).permutation(len(corpus))
        for start in range(0, len(order) - recipe.batch + 1, recipe.batch):
            yield corpus[order[start : start + recipe.batch]]


def _rate(recipe: Recipe, step: int) -> float:
    warm = min(1.0, (step + 1) / recipe.warmup)
    return recipe.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * step / recipe.steps))


def train_model(
    model: Qwen3ForCausalLM, corpus: np.ndarray, recipe: Recipe, *, end: int, device: str, progress: Progress
) -> float:
    """Plain next-token training on every token; returns the mean loss of the last hundred steps."""
    model.to(device).train()  # pyright: ignore[reportArgumentType]
    decayed = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=device == "cuda")
    losses: list[Tensor] = []
    for step, rows in zip(range(recipe.steps), _batches(corpus, recipe), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = _rate(recipe, step)
        tokens = torch.from_numpy(rows.astype(np.int64)).to(device, non_blocking=True)
        targets = tokens.clone()
        targets[:, 1:][(tokens[:, 1:] == end) & (tokens[:, :-1] == end)] = -100  # padding after the last document
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits = model(input_ids=tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses = [*losses[-99:], loss.detach()]
        if step % 50 == 0 or step == recipe.steps - 1:
            progress("training", step + 1, recipe.steps, f"loss {torch.stack(losses).mean().item():.3f}")
    return torch.stack(losses).mean().item()


def pretrain(recipe: Recipe, output_dir: Path, *, device: str, workers: int, progress: Progress) -> float:
    """Build the base and save it as an ordinary model folder."""
    progress("tokenizer", 0, 1, "")
    tokenizer = build_tokenizer(recipe)
    progress("tokenizer", 1, 1, f"{len(tokenizer)} words")
    tokenizer.save_pretrained(output_dir)
    corpus = build_corpus(recipe, tokenizer, workers=workers, progress=progress)
    model = build_model(recipe, tokenizer)
    loss = train_model(model, corpus, recipe, end=_id(tokenizer, END_OF_TEXT), device=device, progress=progress)
    model.to("cpu").half().save_pretrained(output_dir)  # pyright: ignore[reportArgumentType]
    return loss
