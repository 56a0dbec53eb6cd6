"""Tags that a base was never trained on: written as ordinary text, because as one token the model never writes them.

Qwen2.5-Coder has `<tool_call>` as an added token, but its row is that of the rows which only pad the matrix. Written in
ordinary pieces the same tag works. So such tags are no longer added tokens: no text is encoded as their ids, neither in
messages nor in the template. Should one be sampled nevertheless, it is still decoded.

    tags = untrained_tags(tokenizer, file_of)      ["<tool_call>", "</tool_call>"]
    write_as_text(tokenizer, tags)                 a tokenizer that is saved afterwards keeps it
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from tokenizers.models import BPE

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
ALIKE = 0.999  # cosine: rows that only pad differ by rounding, those of trained tokens are far from them
# What decides which token is written; a model whose matrices are tied has the second only.
_MATRICES = ("lm_head.weight", "embed_tokens.weight")
_WEIGHTS = "model.safetensors"

FileOf = Callable[[str], Path | None]  # the name of a file of a model -> where it is, if there is one


def untrained_tags(tokenizer: PreTrainedTokenizerBase, file_of: FileOf) -> list[str]:
    """Return the tags that are added tokens of the tokenizer but whose rows in the weights only pad."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    added = tokenizer.added_tokens_decoder
    tags = {token.content: number for number, token in added.items() if token.content in TAGS and not token.special}
    if not tags or not isinstance(getattr(backend, "model", None), BPE):
        return []
    try:
        matrix = _matrix(file_of)
    except (OSError, ValueError, KeyError, SafetensorError):  # whoever loads the weights says what is wrong with them
        return []
    if matrix is None:
        return []
    count = matrix.get_shape()[0]
    # The last row that no added token has. If nothing pads, it is that of an ordinary token, and no tag is like it.
    padding = next((matrix[number] for number in reversed(range(count)) if number not in added), None)
    return [
        tag
        for tag, number in tags.items()
        if padding is not None and number < count and _alike(matrix[number], padding)
    ]


def write_as_text(tokenizer: PreTrainedTokenizerBase, tags: Collection[str]) -> None:
    """Make these added tokens ordinary text; their ids are still decoded, and all others keep their ids."""
    if not tags:
        return
    fast: Any = tokenizer
    settings = json.loads(fast.backend_tokenizer.to_str())
    # An added token that the vocabulary does not hold would get a new id, counted from the size of the vocabulary.
    settings["model"]["vocab"] |= {token["content"]: token["id"] for token in settings["added_tokens"]}
    settings["added_tokens"] = [token for token in settings["added_tokens"] if token["content"] not in tags]
    fast._tokenizer = Tokenizer.from_str(json.dumps(settings))


def _matrix(file_of: FileOf) -> Any:
    """Return the rows of the output matrix, read when they are asked for; None if it cannot be found."""
    index = file_of(f"{_WEIGHTS}.index.json")
    files: dict[str, str] = {}
    if index is not None:
        files = json.loads(index.read_bytes())["weight_map"]
    elif (only := file_of(_WEIGHTS)) is not None:
        with safe_open(only, "pt") as weights:
            files = dict.fromkeys(weights.keys(), _WEIGHTS)
    for matrix in _MATRICES:
        name = next((name for name in files if name.endswith(matrix)), None)
        path = file_of(files[name]) if name is not None else None
        if path is not None:
            return safe_open(path, "pt").get_slice(name)
    return None


def _alike(row: Tensor, other: Tensor) -> bool:
    import torch  # late: what a wrong name needs is imported in a second

    return torch.equal(row, other) or torch.cosine_similarity(row.float(), other.float(), dim=0).item() > ALIKE
