"""The base from which practice starts in anybody's environment: trained on generated worlds of tools.

    lfo pretrain --general --output-dir base

It reads requests in any wording, looks up first, copies names that it never saw and acts on what replies say. It knows
no law: where nothing says what to do, its practice is uniform. `any_world` makes the conversations.

Its tokenizer writes a word in the same tokens after a space, a quotation mark and a line break, so that a name of a
request is copied into a call token by token; the space before a word is a token of its own, except for the most common
words, which are never names. Its template shows descriptions and the members of enums, one argument a line.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import torch

from lfo.atomic import write_folder_atomic, write_json_atomic
from lfo.env.seeds import stream
from lfo.loading import EMBEDDED, load_base, load_tokenizer
from lfo.model.catalog import PROVENANCE
from lfo.protocol.chat import ChatCodec
from lfo.protocol.hermes import format_tool_call
from lfo.protocol.shown import MARK
from lfo.protocol.world_model import WorldModelCodec, render_prompt, render_target, state_of
from lfo.tools.pretrain.any_world import SEED, Conversation, converse
from lfo.tools.pretrain.practice import Practice
from lfo.tools.pretrain.recipe import FORM, Progress, Recipe, build_model, encoded, end_of, pack, train_model
from lfo.tools.pretrain.tokenizer import train_tokenizer
from lfo.tools.pretrain.unfinished import Unfinished
from lfo.tools.pretrain.wordings import FILLER
from lfo.types import Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3ForCausalLM

PREDICTED = 0.2  # world-model examples a conversation
STATE_TOKENS = 400
REHEARSED = 0.25  # generated rows for each row of practice
REHEARSALS = 10_000_000  # the first of their numbers
NOISE = 0.5  # of a new vector, as a share of its length
_WORDS = (
    rf" (?:{'|'.join(sorted(FILLER, key=len, reverse=True))})(?![\p{{L}}_])"
    r"|\p{L}+|\p{N}{1,2}|_+| ?[^\s\p{L}\p{N}_]+(?: [^\s\p{L}\p{N}_]+)*|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% if loop.first and tools %}"
    "{{ '\nTools:' }}{% for tool in tools %}"
    "{{ '\n' + tool.function.name }}"
    "{% if tool.function.description %}{{ ': ' + tool.function.description }}{% endif %}"
    "{% for name, given in tool.function.parameters.properties.items() %}"
    "{% set part = (given.anyOf or [given])[0] %}"
    "{{ '\n- ' + name }}"
    "{% if part.enum %}{{ ' (' + part.enum | join(' | ') + ')' }}{% endif %}"
    "{% if part['items'] and part['items'].enum %}{{ ' [' + part['items'].enum | join(' | ') + ']' }}{% endif %}"
    "{% if part.type in ('integer', 'number', 'boolean', 'array') %}{{ ' ' + part.type }}{% endif %}"
    "{% if given.description %}{{ ': ' + given.description }}{% endif %}"
    "{% endfor %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneralRecipe(Recipe):
    """The complete config of the general base."""

    conversations: int = 22_000
    row: int = 640
    batch: int = 10
    steps: int = 1_300
    learning_rate: float = 2e-3
    warmup: int = 50
    tokenizer_conversations: int = 12_000
    vocabulary: int = 4_000


def texts(conversation: Conversation) -> Iterator[str]:
    """Yield the texts of a conversation, for the tokenizer."""
    yield "\n".join(message.content for message in conversation.opening)
    for tool in conversation.tools:
        yield " ".join([tool["function"]["name"], tool["function"]["description"]])
        for name, schema in tool["function"]["parameters"]["properties"].items():
            yield " ".join([name, *map(str, schema.get("enum", ())), schema.get("description", "")])
    for line in conversation.lines:
        yield format_tool_call(line.call) if line.call else line.text
    (call,) = [line.call for line in conversation.lines if line.call][:1]
    yield render_prompt(state_of(conversation.opening, ()), call) + render_target(conversation.lines[-1].text)


class GeneralRows:
    """Encodes generated conversations as `ChatCodec` and `WorldModelCodec` would: tokens, and which have a loss."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # One for all: only openings depend on the tools, and a codec for each conversation would be slow.
        self._chat = ChatCodec(tokenizer)
        self._world_model = WorldModelCodec(tokenizer, state_tokens=STATE_TOKENS)

    def opening(self, conversation: Conversation) -> list[int]:
        messages = [{"role": each.role, "content": each.content} for each in conversation.opening]
        text = self._tokenizer.apply_chat_template(
            messages, tools=[dict(tool) for tool in conversation.tools], add_generation_prompt=True, tokenize=False
        )
        return self._tokenizer.encode(str(text), add_special_tokens=False)

    def chat(self, conversation: Conversation) -> np.ndarray:
        pieces = [(self.opening(conversation), False)]
        for line in conversation.lines:
            if line.call:
                said = [*self._chat.encode_message(format_tool_call(line.call)), self._chat.end_of_turn]
                pieces.append((said, True))
            else:
                heard = MARK.text(line.text) if line.kind == "told" else line.text
                pieces.append((list(self._chat.after_action(heard, stopped=True).ids), False))
        return np.array(
            [[each for ids, _ in pieces for each in ids], [wanted for ids, wanted in pieces for _ in ids]],
            dtype=np.int32,
        )

    def example(self, conversation: Conversation, random: Random) -> np.ndarray | None:
        """Return a world-model example: any call that has a reply, after the real ones before it."""
        turns: list[Turn] = []
        found = []
        for line, answer in zip(conversation.lines, conversation.lines[1:], strict=False):
            if line.call and answer.text:
                found.append((state_of(conversation.opening, turns), line.call, answer.text))
                if answer.kind == "reply":
                    span = dict.fromkeys(("action_start", "action_end", "observation_start", "observation_end"), 0)
                    action = format_tool_call(line.call)
                    turns.append(Turn(action=action, observation=answer.text, call=line.call, **span))
        if not found:
            return None
        example = self._world_model.example(*random.choice(found))
        return np.array([example.tokens, [weight > 0 for weight in example.token_weights]], dtype=np.int32)

    def write(self, numbers: Iterable[int]) -> Iterator[np.ndarray]:
        for number in numbers:
            conversation, random = converse(number), stream(SEED, "row", number)
            yield self.chat(conversation)
            if random.random() < PREDICTED and (example := self.example(conversation, random)) is not None:
                yield example


def general_tokenizer(recipe: GeneralRecipe) -> PreTrainedTokenizerFast:
    written = (text for number in range(recipe.tokenizer_conversations) for text in texts(converse(number)))
    return train_tokenizer(written, vocabulary=recipe.vocabulary, words=_WORDS, chat_template=CHAT_TEMPLATE)


def rehearsal(tokenizer: PreTrainedTokenizerBase, practice: Practice, seed: int) -> Practice:
    """Return a practice with generated conversations among its rows, so that the base does not forget how to read."""
    longest, count = practice.tokens.shape[1], math.ceil(REHEARSED * len(practice.tokens))
    numbers = itertools.count(REHEARSALS + seed * REHEARSALS)
    fitting = (row for row in GeneralRows(tokenizer).write(numbers) if row.shape[1] <= longest)
    tokens = np.full((count, longest), end_of(tokenizer), dtype=np.int32)
    wanted = np.zeros((count, longest), dtype=bool)
    for index, row in enumerate(itertools.islice(fitting, count)):
        tokens[index, : row.shape[1]], wanted[index, : row.shape[1]] = row
    return replace(
        practice,
        tokens=np.concatenate([practice.tokens, tokens]),
        wanted=np.concatenate([practice.wanted, wanted]),
    )


def _encode_part(numbers: range, *, tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    torch.set_num_threads(1)
    return list(GeneralRows(tokenizer).write(numbers))


def grown(recipe: GeneralRecipe, tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    """Return a model with the layers of the embedded base, which copy already, and a vector for each new token: those
    of its pieces there, with noise. From nothing, copying had not appeared after 3.8 million tokens."""
    model = build_model(recipe, tokenizer)
    old, pieces = load_base(EMBEDDED, torch.device("cpu")), load_tokenizer(EMBEDDED)
    parameters = dict(model.named_parameters())
    if old.config.hidden_size != recipe.hidden or old.config.num_hidden_layers != recipe.layers:
        return model  # another shape starts from nothing
    new_VD = parameters["model.embed_tokens.weight"]
    with torch.no_grad():
        known_VD = old.get_input_embeddings().weight
        for name, value in old.named_parameters():
            if value is not known_VD:
                parameters[name].copy_(value)
        norm, noise = known_VD[: len(pieces)].norm(dim=1).mean(), torch.Generator().manual_seed(recipe.seed)
        for token in range(len(tokenizer)):
            text = tokenizer.decode([token])
            ids = pieces.encode(text) or [token]
            vector_D = known_VD[ids].sum(dim=0)
            if len(ids) > 1:
                vector_D = vector_D / vector_D.norm() * norm
                vector_D = vector_D + NOISE * norm / len(vector_D) ** 0.5 * torch.randn(len(vector_D), generator=noise)
            new_VD[token] = vector_D
    return model


def pretrain_general(
    recipe: GeneralRecipe, output_dir: Path, *, device: str, workers: int, progress: Progress
) -> float:
    """Build the general base and save it as a model folder; a training that was stopped goes on."""
    begun = Unfinished.beside(output_dir, asdict(recipe))
    progress("tokenizer", 0, 1, "")
    tokenizer = general_tokenizer(recipe)
    progress("tokenizer", 1, 1, f"{len(tokenizer)} words")
    encode = partial(_encode_part, tokenizer=tokenizer)
    documents = encoded(recipe.conversations, encode, workers=workers, progress=progress)
    tokens, wanted = (
        # The order depends on the lengths only, so tokens and marks stay side by side.
        pack([document[side] for document in documents], row=recipe.row, end=end, seed=recipe.seed)
        for side, end in ((0, end_of(tokenizer)), (1, 0))
    )
    model = grown(recipe, tokenizer)
    loss = train_model(
        model,
        tokens,
        recipe,
        end=end_of(tokenizer),
        device=device,
        progress=progress,
        wanted=wanted.astype(bool),
        snapshots=begun.snapshots,
    )

    def write(folder: Path) -> None:
        model.to("cpu").half().save_pretrained(folder)  # pyright: ignore[reportArgumentType]
        tokenizer.save_pretrained(folder)
        write_json_atomic(folder / PROVENANCE, {"form": FORM})

    write_folder_atomic(output_dir, write)
    begun.remove()
    return loss
