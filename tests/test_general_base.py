"""The general base: its worlds say all that their sure calls need, its tokenizer copies, its recipe goes on."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lfo.loading import load_base, load_tokenizer, model_source
from lfo.protocol.chat import ChatCodec
from lfo.protocol.hermes import format_tool_call
from lfo.tools.pretrain import general, recipe
from lfo.tools.pretrain import wordings as say
from lfo.tools.pretrain.any_world import Conversation, converse, text_of
from lfo.tools.pretrain.general import GeneralRecipe, GeneralRows, general_tokenizer, grown, pretrain_general
from lfo.tools.pretrain.recipe import end_of
from lfo.tools.pretrain.snapshots import Snapshots

SMALL = GeneralRecipe(
    conversations=40,
    tokenizer_conversations=60,
    vocabulary=700,
    hidden=32,
    layers=1,
    heads=2,
    key_value_heads=1,
    feed_forward=32,
    row=512,
    batch=2,
    steps=6,
    warmup=2,
)


def silent(*_: object) -> None:
    pass


@pytest.fixture(scope="module")
def rows() -> GeneralRows:
    return GeneralRows(general_tokenizer(SMALL))


def before(conversation: Conversation, index: int) -> str:
    """Return all that was said before a line."""
    said = [message.content for message in conversation.opening]
    for line in conversation.lines[:index]:
        said.append(format_tool_call(line.call) if line.call else line.text)
    return "\n".join(said)


def test_the_same_number_makes_the_same_conversation():
    assert converse(7) == converse(7) != converse(8)
    assert converse(7, held_out=True) != converse(7)


def test_all_that_a_sure_call_needs_was_said_and_fits_its_tool():
    sure = 0
    for number in range(300):
        conversation = converse(number)
        tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in conversation.tools}
        for index, line in enumerate(conversation.lines):
            if line.call is None:
                continue
            properties = tools[line.call.name]["properties"]
            assert list(line.call.arguments) == list(properties)
            if not line.sure:
                continue
            sure += 1
            said = before(conversation, index).casefold()  # a value may begin a sentence
            for name, value in line.call.arguments.items():
                for each in value if isinstance(value, list) else [value]:
                    assert text_of(each).casefold() in said, (number, name, each)
                    allowed = (properties[name].get("items") or properties[name]).get("enum")
                    assert allowed is None or each in allowed
    assert sure > 300


def test_a_guess_says_nothing_about_the_law():
    hits = members = guesses = 0.0
    for number in range(3000):
        conversation = converse(number)
        calls = [line.call for line in conversation.lines if line.call]
        first = next((line.call for line in conversation.lines if line.call and not line.sure), None)
        if first is None or calls[-1].name != first.name or calls[-1] is first:
            continue
        (tool,) = [each["function"] for each in conversation.tools if each["function"]["name"] == first.name]
        for name, schema in tool["parameters"]["properties"].items():
            if "enum" in schema and first.arguments[name] != calls[-1].arguments[name]:
                guesses += 1
                hits += schema["enum"].index(first.arguments[name]) == 0
                members += 1 / len(schema["enum"])
    assert guesses > 500
    assert abs(hits - members) < 4 * members**0.5  # the first member as often as any other


def test_practice_never_uses_a_wording_that_is_held_out():
    for every in (say.LABELLED, say.BARE, say.NEEDED, say.RECORDS, say.FAILED):
        practised, held_out = say.wordings(every, False), say.wordings(every, True)
        assert len(held_out) >= 2
        assert sorted([*practised, *held_out]) == sorted(every)


def test_a_name_has_the_same_tokens_wherever_it_stands(rows: GeneralRows):
    tokenizer = rows._tokenizer
    for name in ("Kostrel Amdi-Vance", "Q-4711", "hollyhock", "2031-04-02", "snake_case_word"):
        own = tokenizer.encode(name)
        for text in (f"Dear {name}, hello.", f'{{"name": "{name}"}}', f"\n{name}\n", f"it is about {name}"):
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text
            assert any(ids[start : start + len(own)] == own for start in range(len(ids))), (name, text)
    strange = "Ünïcode … 🙂\ttab  two spaces"
    assert tokenizer.decode(tokenizer.encode(strange)) == strange


def test_rows_are_what_the_codec_writes_and_only_calls_have_a_loss(rows: GeneralRows):
    for number in range(20):
        conversation = converse(number)
        codec = ChatCodec(rows._tokenizer, conversation.tools)
        assert list(codec.opening(conversation.opening).ids) == rows.opening(conversation)
        tokens, wanted = rows.chat(conversation)
        calls = [codec.encode(format_tool_call(line.call)) for line in conversation.lines if line.call]
        assert tokens[wanted > 0].tolist() == [each for ids in calls for each in [*ids, codec.end_of_turn]]


def test_the_template_shows_kinds_members_and_descriptions(rows: GeneralRows):
    properties = {
        "size": {"type": "string", "enum": ["big", "small"], "description": "which one"},
        "tags": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
        "count": {"anyOf": [{"type": "integer"}, {"type": "null"}], "description": "how many; or none"},
    }
    function = {"name": "put", "description": "Put it.", "parameters": {"type": "object", "properties": properties}}
    shown = rows._tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tools=[{"type": "function", "function": function}], tokenize=False
    )
    assert shown == (
        "<|im_start|>user\nHi\nTools:\nput: Put it.\n- size (big | small): which one\n- tags [a | b] array\n"
        "- count integer: how many; or none<|im_end|>\n"
    )


def test_a_training_that_was_stopped_goes_on_with_the_same_result(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(recipe, "SNAPSHOT_STEPS", 2)
    whole = pretrain_general(SMALL, tmp_path / "whole", device="cpu", workers=1, progress=silent)
    saved, save = [], Snapshots.save

    def stop(self: Snapshots, *state: object) -> None:
        save(self, *state)
        saved.append(state)
        if len(saved) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Snapshots, "save", stop)
    with pytest.raises(KeyboardInterrupt):
        pretrain_general(SMALL, tmp_path / "again", device="cpu", workers=1, progress=silent)
    assert not (tmp_path / "again").exists()
    assert pretrain_general(SMALL, tmp_path / "again", device="cpu", workers=1, progress=silent) == whole
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "again")]
    assert files[0] == files[1]
    assert json.loads((tmp_path / "whole" / "lfo_model.json").read_text())["form"] == "mark"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["again", "whole"]


def test_it_starts_from_the_layers_of_the_embedded_base_and_from_the_pieces_of_each_token():
    tokenizer = general_tokenizer(GeneralRecipe(tokenizer_conversations=60, vocabulary=700))
    shape = GeneralRecipe()
    model, old, pieces = grown(shape, tokenizer), load_base("tiny", torch.device("cpu")), load_tokenizer("tiny")
    for one, other in zip(model.model.layers.parameters(), old.model.layers.parameters(), strict=True):
        assert torch.equal(one, other)
    vectors, known = model.get_input_embeddings().weight, old.get_input_embeddings().weight
    assert torch.equal(vectors[1], known[1]), "the same control tokens"
    (comma,), (before,) = tokenizer.encode(","), pieces.encode(",")
    assert torch.equal(vectors[comma], known[before])
    small = GeneralRecipe(hidden=32, layers=1, heads=2, key_value_heads=1, feed_forward=32)
    assert grown(small, tokenizer).config.hidden_size == 32, "another shape starts from nothing"


def test_documents_and_marks_are_packed_alike(rows: GeneralRows):
    documents = list(rows.write(range(30)))
    tokens, wanted = (
        recipe.pack([each[side] for each in documents], row=512, end=end, seed=0)
        for side, end in ((0, end_of(rows._tokenizer)), (1, 0))
    )
    starts = wanted.astype(bool)
    opens = rows._tokenizer.encode("<tool_call>")[0]
    firsts = tokens[starts & ~np.roll(starts, 1, axis=1)]
    assert opens in firsts.tolist()
    assert general.MARK.text("x") == "(expected) x"


def test_the_base_of_the_package_is_small_and_acts_on_the_mark():
    source = Path(model_source("general"))
    base = load_base("general", torch.device("cpu"))
    assert sum(each.numel() for each in base.parameters()) < 2_500_000
    assert json.loads((source / "lfo_model.json").read_text()) == {"form": "mark"}
    tokenizer = load_tokenizer("general")
    assert tokenizer.chat_template == general.CHAT_TEMPLATE
    assert base.config.vocab_size >= len(tokenizer)
