"""Train a base on practice conversations: it learns the language and the tools of the domain, but not its rules.

    lfo pretrain --output-dir base                  the embedded base, from nothing; about 10 minutes on one GPU
    lfo pretrain --output-dir base --steps 200      a smoke test on a CPU
    lfo pretrain --base smollm2-135m                warm up an existing base; about 4 minutes on one GPU

Deterministic up to the arithmetic of the device. `lfo pretrain --check` checks the result.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from lfo.atomic import write_json_atomic
from lfo.env.seeds import stream
from lfo.errors import ConfigError
from lfo.loading import load_base, load_tokenizer
from lfo.model.catalog import PROVENANCE
from lfo.model.learner import LOGITS_AT_ONCE
from lfo.objectives.losses import fused_token_hits
from lfo.tools.models import note_warm_up
from lfo.tools.pretrain.corpus import CorpusRows, converse, texts
from lfo.tools.pretrain.snapshots import SNAPSHOT_STEPS, Snapshots
from lfo.tools.pretrain.tokenizer import train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen3ForCausalLM

FORM = "mark"  # of told replies: what the practice dialogues prepare for, with remarks before replies
Progress = Callable[[str, int, int, str], None]  # phase, done, of, words


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainConfig:
    """The data and the training of a base."""

    conversations: int
    row: int  # tokens in a training row; several documents are packed into one
    batch: int
    steps: int
    learning_rate: float
    warmup: int
    weight_decay: float = 0.05
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe(PretrainConfig):
    """The complete config of the embedded base."""

    conversations: int = 300_000
    row: int = 1_024
    batch: int = 64
    steps: int = 7_000
    learning_rate: float = 3e-3
    warmup: int = 200
    tokenizer_conversations: int = 3_000
    vocabulary: int = 1_200
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    key_value_heads: int = 2
    feed_forward: int = 384


# An existing language model only needs the syntax of the tools and when to use them: about one pass.
WARM_UP = PretrainConfig(conversations=20_000, row=2_048, batch=32, steps=400, learning_rate=5e-4, warmup=40)


def end_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token after a document, which is also the padding."""
    assert isinstance(tokenizer.pad_token_id, int)
    return tokenizer.pad_token_id


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
        eos_token_id=tokenizer.eos_token_id,  # pyright: ignore[reportArgumentType]
        pad_token_id=end_of(tokenizer),
        initializer_range=0.5 / math.sqrt(recipe.hidden),
    )
    torch.manual_seed(recipe.seed)
    return Qwen3ForCausalLM(config)


def _encode_part(numbers: range, *, tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    torch.set_num_threads(1)
    return [np.array(row, dtype=np.int32) for row in CorpusRows(tokenizer).write(numbers)]


def encoded(
    count: int, encode: Callable[[range], list[np.ndarray]], *, workers: int, progress: Progress
) -> list[np.ndarray]:
    """Return the documents of this many conversations."""
    parts = [range(start, min(start + 500, count)) for start in range(0, count, 500)]
    documents: list[np.ndarray] = []
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for done, part in enumerate(pool.imap(encode, parts)):
            documents += part
            progress("corpus", parts[done].stop, count, f"{len(documents)} documents")
    return documents


def build_corpus(
    config: PretrainConfig, tokenizer: PreTrainedTokenizerBase, *, workers: int, progress: Progress
) -> np.ndarray:
    """Return all training rows (rows x `config.row`): whole documents in random order, each with a padding token."""
    encode = partial(_encode_part, tokenizer=tokenizer)
    documents = encoded(config.conversations, encode, workers=workers, progress=progress)
    corpus = pack(documents, row=config.row, end=end_of(tokenizer), seed=config.seed)
    if len(corpus) < config.batch:
        raise ConfigError(
            f"{config.conversations} conversations fill {len(corpus)} rows, fewer than a batch of {config.batch}"
        )
    return corpus


def pack(documents: Sequence[np.ndarray], *, row: int, end: int, seed: int) -> np.ndarray:
    """Fill rows with whole documents; a document that does not fit starts the next row."""
    order = list(range(len(documents)))
    stream(seed, "pack").shuffle(order)
    rows: list[np.ndarray] = []
    current: list[np.ndarray] = []
    room = row
    for index in order:
        document = np.append(documents[index][: row - 1], np.int32(end))
        if len(document) > room:
            rows.append(np.concatenate([*current, np.full(room, end, dtype=np.int32)]))
            current, room = [], row
        current.append(document)
        room -= len(document)
    return np.stack(rows) if rows else np.empty((0, row), dtype=np.int32)


def _batches(rows: int, config: PretrainConfig) -> Iterator[np.ndarray]:
    """Yield the row indices of each batch, epoch after epoch."""
    for epoch in itertools.count():
        order = np.random.default_rng((config.seed, epoch)).permutation(rows)
        for start in range(0, len(order) - config.batch + 1, config.batch):
            yield order[start : start + config.batch]


def _rate(config: PretrainConfig, step: int) -> float:
    warm = min(1.0, (step + 1) / config.warmup)
    return config.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * step / config.steps))


def train_model(
    model: PreTrainedModel,
    corpus: np.ndarray,
    config: PretrainConfig,
    *,
    end: int,
    device: str,
    progress: Progress,
    wanted: np.ndarray | None = None,
    snapshots: Snapshots | None = None,
) -> float:
    """Train on the next token, at every position or where `wanted`; return the mean loss of the last hundred steps.

    With `snapshots` a training that was stopped goes on from the last one, with the same result."""
    model.to(device).train()  # pyright: ignore[reportArgumentType]
    head_VD = model.get_output_embeddings().weight  # pyright: ignore[reportOptionalMemberAccess]
    chunk = max(1, LOGITS_AT_ONCE // len(head_VD))
    decayed = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=device == "cuda")
    first, losses = snapshots.load(model, optimizer) if snapshots else (0, [])
    for step, rows in itertools.islice(enumerate(_batches(len(corpus), config)), first, config.steps):
        for group in optimizer.param_groups:
            group["lr"] = _rate(config, step)
        length = corpus.shape[1]
        if wanted is not None:  # what follows the last wanted token changes nothing
            length = int(np.flatnonzero(wanted[rows].any(axis=0))[-1]) + 1
        tokens_BT = torch.from_numpy(corpus[rows, :length].astype(np.int64)).to(device, non_blocking=True)
        targets_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
        if wanted is not None:
            targets_BT = torch.from_numpy(wanted[rows, :length]).to(device, non_blocking=True)
        targets_BT[:, 0] = False
        targets_BT[:, 1:][(tokens_BT[:, 1:] == end) & (tokens_BT[:, :-1] == end)] = False  # after the last document
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            hidden_BTD = model.get_decoder()(input_ids=tokens_BT, use_cache=False).last_hidden_state
            logprobs_BT, _ = fused_token_hits(hidden_BTD, head_VD, tokens_BT, positions_BT=targets_BT, chunk=chunk)
        loss = -logprobs_BT.sum() / targets_BT.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses = [*losses[-99:], loss.detach()]
        if step % 50 == 0 or step == config.steps - 1:
            progress("training", step + 1, config.steps, f"loss {torch.stack(losses).mean().item():.3f}")
        if snapshots and (step + 1) % SNAPSHOT_STEPS == 0:
            snapshots.save(step + 1, model, optimizer, losses)
    return torch.stack(losses).mean().item()


def pretrain(recipe: Recipe, output_dir: Path, *, device: str, workers: int, progress: Progress) -> float:
    """Build the embedded base and save it as an ordinary model folder."""
    progress("tokenizer", 0, 1, "")
    written = (text for number in range(recipe.tokenizer_conversations) for text in texts(converse(number)))
    tokenizer = train_tokenizer(written, vocabulary=recipe.vocabulary)
    progress("tokenizer", 1, 1, f"{len(tokenizer)} words")
    tokenizer.save_pretrained(output_dir)
    corpus = build_corpus(recipe, tokenizer, workers=workers, progress=progress)
    model = build_model(recipe, tokenizer)
    loss = train_model(model, corpus, recipe, end=end_of(tokenizer), device=device, progress=progress)
    model.to("cpu").half().save_pretrained(output_dir)  # pyright: ignore[reportArgumentType]
    write_json_atomic(output_dir / PROVENANCE, {"form": FORM})
    return loss


def warm_up(
    base: str, config: PretrainConfig, output_dir: Path, *, device: str, workers: int, progress: Progress
) -> float:
    """Train an existing base on practice conversations, with its own tokenizer and template, and save it in bf16."""
    tokenizer = load_tokenizer(base)
    corpus = build_corpus(config, tokenizer, workers=workers, progress=progress)
    model = load_base(base, torch.device("cpu"))  # fp32 on a CPU
    loss = train_model(model, corpus, config, end=end_of(tokenizer), device=device, progress=progress)
    model.to("cpu", torch.bfloat16).save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    note_warm_up(base, output_dir, asdict(config), form=FORM)
    return loss
