"""The recipe builds a base that transformers loads, its corpus teaches no rules, and the check can fail."""

import json
import random
import sys
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lfo.cli import main
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.env.worlds.phone.fields import FIELDS
from lfo.env.worlds.phone.tasks import LEVEL
from lfo.errors import ConfigError
from lfo.loading import load_tokenizer, model_source
from lfo.play.look_ahead import EXPECTED
from lfo.tools.pretrain.check import BlindForm, rule_knowledge, violated_conditions
from lfo.tools.pretrain.corpus import CorpusRows, converse, practice_task
from lfo.tools.pretrain.recipe import (
    PretrainConfig,
    Recipe,
    _encode_part,
    build_corpus,
    build_model,
    pack,
    pretrain,
    train_model,
    warm_up,
)

SMALL = Recipe(
    conversations=60,
    tokenizer_conversations=60,
    vocabulary=500,
    hidden=32,
    layers=1,
    heads=2,
    key_value_heads=1,
    feed_forward=32,
    row=256,
    batch=2,
    steps=6,
    warmup=2,
)


def silent(*_: object) -> None:
    pass


def test_the_recipe_builds_a_folder_that_transformers_loads(tmp_path: Path):
    phases = []
    loss = pretrain(SMALL, tmp_path, device="cpu", workers=1, progress=lambda phase, *_: phases.append(phase))
    assert list(dict.fromkeys(phases)) == ["tokenizer", "corpus", "training"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.model_type == "qwen3"
    assert tokenizer.decode([model.config.eos_token_id]) == "<|im_end|>"
    assert 0 < loss < 10


def test_a_base_that_exists_is_warmed_up_with_its_own_tokenizer(tmp_path: Path):
    practice = PretrainConfig(conversations=40, row=512, batch=2, steps=2, learning_rate=1e-3, warmup=1)
    work = {"device": "cpu", "workers": 1, "progress": silent}
    warm_up("tiny", practice, tmp_path / "warm", **work)
    before, after = (AutoModelForCausalLM.from_pretrained(each) for each in (model_source("tiny"), tmp_path / "warm"))
    assert after.dtype == torch.bfloat16
    assert not torch.allclose(before.lm_head.weight.float(), after.lm_head.weight.float(), atol=1e-4)
    assert load_tokenizer(str(tmp_path / "warm")).get_vocab() == load_tokenizer("tiny").get_vocab()
    noted = json.loads((tmp_path / "warm" / "lfo_model.json").read_text())
    assert noted["weights"] == "tiny; warmed up"
    assert noted["practice"]["steps"] == 2


def test_training_lowers_the_loss_and_does_not_look_at_padding():
    corpus = np.tile(np.array([5, 6, 7, 0, 0, 0, 0, 0], dtype=np.uint16), (4, 1))
    recipe = replace(SMALL, steps=60, learning_rate=0.01)
    model = build_model(recipe, load_tokenizer("tiny"))
    first = train_model(model, corpus, replace(recipe, steps=1), end=0, device="cpu", progress=silent)
    last = train_model(model, corpus, recipe, end=0, device="cpu", progress=silent)
    assert last < first
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[5, 6, 7, 0]])).logits[0]
    assert logits[:3].argmax(-1).tolist() == [6, 7, 0]


def test_too_few_conversations_for_one_batch_are_refused():
    recipe = replace(SMALL, conversations=1, batch=64, row=1024)
    with pytest.raises(ConfigError, match="fewer than a batch of 64"):
        build_corpus(recipe, load_tokenizer("tiny"), workers=1, progress=silent)


def test_packing_keeps_documents_whole():
    documents = [np.full(size, size, dtype=np.int32) for size in (3, 4, 5, 6, 2, 7)]
    rows = pack(documents, row=10, end=0, seed=1)
    for row in rows:
        values, counts = np.unique(row[row > 0], return_counts=True)
        assert (values == counts).all()


def test_packing_keeps_ids_of_a_large_vocabulary():
    documents = [np.full(6, 151_000 + index, dtype=np.int32) for index in range(4)]
    rows = pack(documents, row=8, end=151_643, seed=0)
    assert {int(value) for value in rows.flat} <= {151_643, *range(151_000, 151_004)}
    assert len(rows) == 3


def test_documents_of_a_large_vocabulary_keep_their_ids():
    tokenizer = load_tokenizer("tiny")
    tokenizer.add_tokens([f"<extra-{number}>" for number in range(65_536)])
    tokenizer.add_special_tokens({"eos_token": "<end-of-turn>"})
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "<end-of-turn>")
    documents = _encode_part(range(1), tokenizer=tokenizer)
    assert tokenizer.convert_tokens_to_ids("<end-of-turn>") in documents[0].tolist()


def test_practice_shows_no_look_ahead_and_is_the_same_every_time():
    rows = CorpusRows(load_tokenizer("tiny"))
    tokenizer = load_tokenizer("tiny")
    for number in range(40):
        written = rows.chat(converse(number), random.Random(number))
        assert written == rows.chat(converse(number), random.Random(number))
        assert EXPECTED.strip() not in tokenizer.decode(written)


def test_practice_rules_follow_nothing():
    """Two practice tasks for one kind of department and service agree no more often than chance."""
    required = defaultdict(list)
    for number in range(1500):
        for errand in practice_task(number).errands:
            required[errand.kind, errand.service].append(frozenset(errand.requires))
    pairs = [(one, other) for same in required.values() for one, other in pairwise(same)]
    assert sum(one == other for one, other in pairs) / len(pairs) < 0.02


def test_the_shipped_base_has_the_recipes_shape():
    config = AutoModelForCausalLM.from_pretrained(model_source("tiny")).config
    recipe = Recipe()
    assert (config.hidden_size, config.num_hidden_layers) == (recipe.hidden, recipe.layers)
    folder = Path(model_source("tiny"))
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 8e6


# --- the check ----------------------------------------------------------------------------------------------------


def forms_of(choose) -> list[BlindForm]:
    tasks = PhoneCalls(levels=(2,), counts={"val": 300}).tasks("val")
    rng = random.Random(3)
    return [BlindForm(task=task, industry=task.id, fields=tuple(choose(rng, task))) for task in tasks]


def test_random_forms_know_nothing():
    knowledge = rule_knowledge(forms_of(lambda rng, task: rng.sample(sorted(FIELDS), 3)), permutations=200)
    assert knowledge["entropy_share"] > 0.97
    assert knowledge["required_fields_asked"]["p"] > 0.01
    assert knowledge["information_on_department"]["p"] > 0.01


def test_forms_that_know_a_little_are_caught():
    def peek(rng, task):
        known = [name for name in task.errands[0].requires if name in FIELDS]
        return rng.sample(sorted(FIELDS), 3) if rng.random() < 0.7 else known

    knowledge = rule_knowledge(forms_of(peek), permutations=1000)
    assert knowledge["required_fields_asked"]["p"] < 0.002
    assert knowledge["information_on_department"]["p"] < 0.002


def test_promises():
    success = {"1": 1.0} | {str(level): 0.0 for level in LEVEL if level > 1}
    levels = {
        level: {f"alone_{way}": {"success": value} for way in ("greedy", "sampled")} for level, value in success.items()
    }
    blind = {"p": 0.4}
    knowledge = {
        "entropy_share": 0.99,
        "required_fields_asked": blind,
        "information_on_department": blind,
        "information_on_industry": blind,
    }
    assert violated_conditions(levels, knowledge) == []
    levels["3"]["alone_sampled"] = {"success": 0.2}
    assert violated_conditions(levels, knowledge) == ["level 3 alone, sampled: success 20%, expected at most 2%"]
    knowledge["entropy_share"] = 0.5
    knowledge["information_on_industry"] = {"p": 0.0004}
    assert len(violated_conditions(levels, knowledge)) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "needs --output-dir"),
        (("--output-dir", "."), "already exists"),
        (("--base", "elsewhere"), "name the new folder with --output-dir"),
    ],
)
def test_the_command_refuses_in_one_sentence(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lfo", "pretrain", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err


def test_the_check_command_ends_with_1_when_a_promise_is_broken(monkeypatch, capsys):
    result = {"levels": {}, "blind_forms": {}, "problems": ["level 2 alone"], "ok": False}
    monkeypatch.setattr("lfo.tools.pretrain.check.check_base", lambda *_, **__: result)
    monkeypatch.setattr(sys, "argv", ["lfo", "pretrain", "--check", "--json"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 1
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is False
    assert (said["gate"]["helps"], said["gate"]["alone"]["n"]) == (True, 64), "what it can use is measured all the same"
