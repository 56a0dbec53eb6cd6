"""Tags whose rows only pad, as `<tool_call>` in Qwen2.5-Coder: they are ordinary text wherever the base is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Qwen2Config

from lfo.agent import load_agent
from lfo.config import to_yaml
from lfo.engines import create_trainer
from lfo.env.worlds.oracle import OracleCodes
from lfo.loading import load_tokenizer
from lfo.model.untrained_tags import untrained_tags
from lfo.protocol.chat import ChatCodec
from lfo.protocol.hermes import format_tool_call
from lfo.serving.speaker import local_speaker
from lfo.types import Message, Origin, ToolCall
from small_runs import small_config
from small_tokenizers import CHATML_WITH_TOOLS, TOOLS, qwen3_tokenizer, small_tokenizer

CALLS, REPLIES = ["<tool_call>", "</tool_call>"], ["<tool_response>", "</tool_response>"]
PADDED = {"qwen": 151_936, "small": 384}  # rows of the matrices; the tokenizers have 151,669 and 330 tokens


def base_of(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    untrained: list[str],
    *,
    rows: int,
    tied: bool = True,
    shard: str = "1GB",
) -> str:
    """A small random base of Qwen's shape in which some tokens were never trained; its rows from there on only pad."""
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape = Qwen2Config(vocab_size=rows, num_key_value_heads=1, tie_word_embeddings=tied, **sizes)
    model = AutoModelForCausalLM.from_config(shape)
    head = model.get_output_embeddings().weight
    numbers = [*tokenizer.convert_tokens_to_ids(untrained), *range(len(tokenizer), rows)]
    with torch.no_grad():
        head[numbers] = torch.randn(16) + 1e-4 * torch.randn(len(numbers), 16)  # as after rounding
    model.save_pretrained(folder, max_shard_size=shard)
    tokenizer.save_pretrained(folder)
    return str(folder)


def found(folder: str) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return untrained_tags(tokenizer, lambda name: path if (path := Path(folder, name)).is_file() else None)


# --- which they are ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("untrained", [CALLS, REPLIES, []])
@pytest.mark.parametrize("options", [{}, {"tied": False}, {"shard": "20KB"}], ids=["tied", "untied", "shards"])
def test_tags_with_the_row_of_the_padding_are_found(tmp_path: Path, untrained: list[str], options: dict[str, Any]):
    tokenizer = small_tokenizer(CHATML_WITH_TOOLS)
    folder = base_of(tmp_path, tokenizer, untrained, rows=PADDED["small"], **options)
    assert found(folder) == untrained
    assert (tmp_path / "model.safetensors.index.json").is_file() == ("shard" in options)


def test_a_special_token_stays_one_although_it_was_never_trained(tmp_path: Path):
    untrained = ["<|endoftext|>", "<think>", *CALLS]
    assert found(base_of(tmp_path, small_tokenizer(CHATML_WITH_TOOLS), untrained, rows=PADDED["small"])) == CALLS


def test_where_nothing_pads_or_no_weights_can_be_read_all_tags_are_trained(tmp_path: Path):
    tokenizer = small_tokenizer(CHATML_WITH_TOOLS)
    folder = base_of(tmp_path, tokenizer, [], rows=len(tokenizer))
    assert found(folder) == []
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:40])
    assert found(folder) == []
    weights.unlink()
    assert found(folder) == []
    embedded = load_tokenizer("tiny")
    assert all(len(embedded.encode(tag, add_special_tokens=False)) == 1 for tag in CALLS)


# --- they are text -------------------------------------------------------------------------------------------------


def test_with_qwens_tokenizer_tags_are_pieces_in_texts_and_templates_and_a_sampled_one_is_read(tmp_path: Path, caplog):
    known = qwen3_tokenizer()
    folder = base_of(tmp_path / "base", known, CALLS, rows=PADDED["qwen"])
    tokenizer = load_tokenizer(folder)
    load_tokenizer(folder)
    said = "was never trained on the tokens <tool_call>, </tool_call>; they are written as ordinary text"
    assert caplog.text.count(said) == 1
    opens, closes = known.convert_tokens_to_ids(CALLS)
    before, now = ChatCodec(known, TOOLS), ChatCodec(tokenizer, TOOLS)
    opening = [Message(role="user", content="What is <tool_call>?")]
    assert {opens, closes} <= set(before.opening(opening).ids)
    assert not {opens, closes} & set(now.opening(opening).ids)
    shown = [codec._vocabulary.decode(codec.opening(opening).ids, skip_special_tokens=False) for codec in (before, now)]
    assert shown[0] == shown[1]
    call = ToolCall(name="search_company", arguments={"name": "Acme"})
    written = now.encode_message(format_tool_call(call))
    assert not {opens, closes} & set(written)
    text = now.encode(format_tool_call(call).removeprefix(CALLS[0]).removesuffix(CALLS[1]))
    for message in (written, [opens, *text, closes]):
        assert now.read([*message, now.end_of_turn]).calls == (call,)


def test_all_other_tokens_keep_their_ids_also_in_a_saved_copy(tmp_path: Path):
    """Verl's workers load a copy, and so does whoever is given a merged model."""
    known = qwen3_tokenizer()
    tokenizer = load_tokenizer(base_of(tmp_path / "base", known, CALLS, rows=PADDED["qwen"]))
    tokenizer.save_pretrained(tmp_path / "copy")
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "copy")):
        lost = {token: number for token, number in known.get_added_vocab().items() if token not in CALLS}
        assert each.get_added_vocab() == lost
        assert len(each) == len(known)
        text = "<|im_start|>user\nÜber <think> 你好 <|fim_prefix|><|im_end|>"
        assert each.encode(text) == known.encode(text)
        assert len(each.encode(CALLS[0])) == 4
        assert each.decode(known.convert_tokens_to_ids(CALLS)) == "".join(CALLS)


class FewOracles(OracleCodes):
    def tasks(self, split: str) -> Any:
        return super().tasks(split)[:4]


def test_a_run_its_agent_and_its_server_write_them_as_text(tmp_path: Path):
    known = small_tokenizer(CHATML_WITH_TOOLS)
    model = base_of(tmp_path / "base", known, CALLS, rows=PADDED["small"])
    settings = (
        "rollout.max_context=4096",
        "rollout.max_turn_tokens=16",
        "rollout.max_turns=1",
        "world_model.state_tokens=256",
    )
    config = small_config(f"model={model}", "env=oracle-codes", *settings, "steps=1", f"output_dir={tmp_path / 'run'}")
    trainer = create_trainer(config, FewOracles, load_tokenizer(model))
    never = set(known.convert_tokens_to_ids(CALLS))
    for rollout in trainer.collect(trainer.plan(0)).rollouts:
        told = {
            token for token, origin in zip(rollout.tokens, rollout.origins, strict=True) if origin != Origin.SAMPLED
        }
        assert told
        assert not told & never
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(trainer.config))
    agent = load_agent(tmp_path / "run", adapter="none", environment=FewOracles)
    opening = FewOracles().reset(FewOracles().tasks("val")[0])
    for codec in (agent.codec, local_speaker(agent).codec):
        assert not never & set(codec.opening(opening).ids)
