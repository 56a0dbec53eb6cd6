"""Options that would change the answer and are not supported: refused by name, unless they ask for nothing.

Unknown options are ignored, and so are those that do not change the answer, such as `user`, `store` or `metadata`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# Option -> the values that ask for nothing, as null always does.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    # OpenAI's
    "n": (1,),
    "top_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "stop": ([], ""),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    # what vLLM and other servers add: sampling
    "top_k": (-1, 0),
    "top_a": (0,),
    "min_p": (0,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "mirostat": (0,),
    "repetition_penalty": (1,),
    "repeat_penalty": (1,),
    "length_penalty": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "skip_special_tokens": (True,),
    "thinking_token_budget": (),
    # ... the form of the answer
    "structured_outputs": (),
    "structural_tag": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "grammar": ("",),
    "regex": ("",),
    "ebnf": ("",),
    "json_schema": (),
    # ... and the prompt
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "truncate_prompt_tokens": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
}


def unsupported(wanted: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first option that cannot be honoured, with a sentence, or None.

    >>> unsupported({"temperature": 0.5, "top_k": -1, "min_p": 0.1})
    ('min_p', 'min_p can only be 0')
    """
    for name, neutral in NEUTRAL.items():
        given = wanted.get(name)
        if given is not None and given not in neutral:
            only = " or ".join(map(json.dumps, neutral))
            return name, f"{name} can only be {only}" if neutral else f"{name} is not supported"
    return None
