"""The tokenizer of the embedded base: a small byte-level BPE, and a chat template with short tool descriptions.

Field and tool names are one token each, and numbers are split into pairs of digits, so that a rollout has a few hundred
tokens. It can encode every byte, and therefore any text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Punctuation may contain single spaces, so that `": "` and `", "` in JSON are one token.
_WORDS = r" ?[\p{L}_]+|\p{N}{1,2}| ?[^\s\p{L}\p{N}_]+(?: [^\s\p{L}\p{N}_]+)*|\s+"

# ChatML; only the names of tools and arguments, because every token is expensive for a tiny model.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% if loop.first and tools %}"
    "{{ '\nTools:' }}{% for tool in tools %}"
    "{{ ' ' + tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')' }}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer(
    texts: Iterable[str], *, vocabulary: int, words: str = _WORDS, chat_template: str = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, START_OF_TURN, END_OF_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    # Not special, as in the Qwen family, but always one token.
    backend.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("</tool_call>", special=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )
