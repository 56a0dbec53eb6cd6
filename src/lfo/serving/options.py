"""Options that would change the answer and are not supported: refused by name, unless they ask for nothing.

Unknown options are ignored, and so are those that do not change the answer, such as `user`, `store` or `metadata`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# The values that ask for nothing, as null always does, and the options of OpenAI, vLLM and other servers with them.
# What changes the answer and has no such value cannot be given at all.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    name: neutral
    for neutral, names in (
        ((), "audio reasoning_effort web_search_options allowed_token_ids prompt_logprobs thinking_token_budget"),
        ((), "structured_outputs structural_tag guided_json guided_regex guided_choice guided_grammar json_schema"),
        ((), "truncate_prompt_tokens chat_template"),
        ((0,), "presence_penalty frequency_penalty top_logprobs top_a min_p mirostat min_tokens"),
        ((1,), "n top_p typical_p tfs_z repetition_penalty repeat_penalty length_penalty best_of"),
        ((-1, 0), "top_k"),
        ((False,), "logprobs use_beam_search ignore_eos include_stop_str_in_output echo continue_final_message"),
        ((True,), "parallel_tool_calls skip_special_tokens add_generation_prompt"),
        (("",), "grammar regex ebnf"),
        (([],), "functions stop_token_ids bad_words logits_processors documents"),
        (([], ""), "stop"),
        (({},), "logit_bias chat_template_kwargs"),
        (("auto", "none"), "tool_choice function_call"),
        (("medium",), "verbosity"),
        ((["text"],), "modalities"),
        (({"type": "text"},), "response_format"),
    )
    for name in names.split()
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
