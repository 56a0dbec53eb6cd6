"""The README.md of an export: its contents, its results, and how to run it with look-ahead."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from lfo import __version__
from lfo.agent import Agent
from lfo.base_form import form_of
from lfo.evaluation.runs import RunRecord, read_run
from lfo.loading import EMBEDDED, model_source
from lfo.model.couplings import POLICY, WORLD_MODEL
from lfo.protocol.hermes import format_tool_call
from lfo.protocol.shown import ShownForm
from lfo.protocol.world_model import WorldModelState, render_prompt, render_target
from lfo.rundir import run_folder
from lfo.statistics import wilson
from lfo.types import MOST_IMAGINED, ToolCall

BASE = "base"
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # supported by vLLM


def model_card(agent: Agent, run: Path, form: str, own_world_model: bool) -> str:
    record = read_run(run_folder(run))
    alone = form == "alone" or agent.config.looks_ahead_untrained
    parts = [
        _front_matter(agent, form),
        _what_it_is(agent, record.name, form),
        _figures(record, "" if agent.adapters_folder is None else agent.adapters_folder.name, blind=alone),
        _files(agent, form, own_world_model),
        _serving(agent, form, own_world_model),
    ]
    if form != "alone" and agent.model.world_model_adapters and agent.config.world_model.input == "state":
        parts.append(_lookahead(agent, record.path, own_world_model))
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def base_of(agent: Agent) -> str:
    """Return where the exported files find the base: in the export, in a folder of this machine or on the hub."""
    if agent.config.model == EMBEDDED:
        return BASE
    source = Path(model_source(agent.config.model))
    return str(source.resolve()) if source.is_dir() else agent.config.model


def _front_matter(agent: Agent, form: str) -> str:
    base = base_of(agent)
    on_hub = base != BASE and not Path(base).is_absolute()
    named = [f"base_model: {json.dumps(base)}"] if on_hub else []
    library = "transformers" if form == "merged" else "peft"
    return "\n".join(["---", *named, f"library_name: {library}", "tags: [lora, tool-use, world-model]", "---"])


def _what_it_is(agent: Agent, name: str, form: str) -> str:
    config = agent.config
    base = "the tiny base that ships with lfo (in `base/`)" if config.model == EMBEDDED else f"`{base_of(agent)}`"
    what = {
        "alone": "The policy as one LoRA, which acts without look-ahead and without a world model,",
        "adapters": "The LoRA adapters",
        "merged": "The policy, merged into a whole model,",
    }[form]
    learned = (
        "two jobs: a policy that calls tools (DAPO), and a world model that predicts what the environment will answer"
        if agent.model.world_model_adapters
        else "one job: a policy that calls tools (plain DAPO)"
    )
    weights = "untrained weights" if agent.adapters_folder is None else f"weights of `{agent.adapters_folder.name}`"
    rows = {
        "environment": f"`{config.env}`" + (f", levels {levels}" if (levels := config.env_args.get("levels")) else ""),
        "algorithm": f"{config.algo}, coupling={config.coupling}",
        "look-ahead in training": f"yes, from {config.lookahead_source}" if config.looks_ahead else "no",
        "LoRA": f"rank {config.lora.rank}, alpha {config.lora.alpha:g}, targets {config.lora.targets}",
        "world-model weight": f"{config.world_model.weight:g}, `world_model.predict={config.world_model.predict}`",
        "sampling temperature": f"{config.rollout.temperature:g}",
        "seed": str(config.seed),
    }
    table = "\n".join(f"| {setting} | {value} |" for setting, value in rows.items())
    return (
        f"# {name}\n\n{what} of the run `{name}`, {weights}, on {base}. It was trained for {learned}.\n\n"
        f"| setting | value |\n|---|---|\n{table}\n\nWritten by learn-from-observation {__version__}."
    )


def _figures(record: RunRecord, weights: str, *, blind: bool) -> str:
    """Return the results at the step of these adapters, or the last ones; `blind`: without look-ahead."""
    rows = [row for row in record.rows if any(name.startswith("eval/") for name in row)]
    rows = [row for row in rows if weights == f"step-{row['step']:06d}"] or rows
    if not rows:
        return "## Figures\n\nThe run was not evaluated."
    splits, last = (record.data or {}).get("splits", {}), rows[-1]
    metric = "success_blind" if blind else "success"
    values = {
        parts[1]: last[name] for name in last if (parts := name.split("/"))[0] == "eval" and parts[2:] == [metric]
    }
    # Success is the mean reward: a share of the tasks only if the environment keeps its rewards within 0..1.
    are_shares = all(0 <= value <= 1 for value in values.values())
    shown = ".1%" if are_shares else ".4g"
    lines = []
    for split, value in values.items():
        tasks = splits.get(split, {}).get("tasks", record.config.eval.tasks if record.config else 0)
        interval = " - ".join(f"{bound:.1%}" for bound in wilson(value, tasks)) if are_shares else "-"
        ceiling = splits.get(split, {}).get("ceiling")
        lines.append(
            f"| {split} | {tasks} | {value:{shown}} | {interval} | {'-' if ceiling is None else f'{ceiling:{shown}}'} |"
        )
    how = "Greedy, without look-ahead" if blind else "Greedy"
    wilson_note = "; the interval is over tasks (Wilson, 95 %)" if are_shares else ""
    return (
        f"## Figures\n\n{how}, at the run's evaluation after step {last['step']} ({last['tasks_seen']} training tasks "
        f"seen). One run with one seed{wilson_note}.\n\n"
        f"| split | tasks | {'success' if are_shares else 'mean reward'} | interval | information ceiling |\n"
        "|---|---|---|---|---|\n" + "\n".join(lines)
    )


def _files(agent: Agent, form: str, own_world_model: bool) -> str:
    lines, rank = [], agent.config.lora.rank
    if form == "merged":
        lines.append("- this folder itself: the policy, a whole model with tokenizer and chat template")
    else:
        lines.append(f"- `policy/`: a LoRA of rank {rank}")
    if own_world_model:
        unmerged = ", for the base and not for the merged model" if form == "merged" else ""
        lines.append(f"- `world_model/`: a LoRA of rank {rank}{unmerged}")
    base, needs_base = base_of(agent), own_world_model or form != "merged"
    if needs_base and base == BASE:
        lines.append("- `base/`: the base, which is on no hub; compute it in fp32, as in training")
    text = "## Files\n\n" + "\n".join(lines)
    if needs_base and Path(base).is_absolute():
        text += (
            f"\n\nThe base is not among them: it is the folder `{base}` of the machine that wrote this. On another "
            "machine, copy that folder, and replace its path below and in each `adapter_config.json`."
        )
    if agent.model.coupling.is_shared and own_world_model:
        text += "\n\nThe run has one adapter for both jobs, so `policy/` and `world_model/` hold the same weights."
    return text


def _serving(agent: Agent, form: str, own_world_model: bool) -> str:
    base, dtype = base_of(agent), " --dtype float32" if agent.config.model == EMBEDDED else ""
    text = "## Serving\n\nRun these in this folder.\n\n"
    modules = [] if form == "merged" else [f"{POLICY}={POLICY}"]
    modules += [f"{WORLD_MODEL}={WORLD_MODEL}"] if own_world_model else []
    commands = []
    if form == "merged":
        commands.append(f"vllm serve . --served-model-name {POLICY}{dtype}")
    if modules:
        rank = agent.config.lora.rank
        most = next((each for each in VLLM_RANKS if each >= rank), rank)
        loras = f"--enable-lora --max-lora-rank {most} --lora-modules {' '.join(modules)}"
        port = " --port 8001" if form == "merged" else ""
        commands.append(f"vllm serve {shlex.quote(base)}{dtype} {loras}{port}")
    text += "With vLLM:\n\n" + "\n".join(f"    {command}" for command in commands)
    text += "\n\nGive the tools with each request. The policy writes one call a message, in `<tool_call>` tags."
    return text + "\n\nIn Python:\n\n" + _indented(_python(agent, form, base, own_world_model))


def _python(agent: Agent, form: str, base: str, own_world_model: bool) -> str:
    dtype = '"float32"' if agent.config.model == EMBEDDED else '"auto"'
    lines = ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    if form == "merged":
        lines.append(f'policy = AutoModelForCausalLM.from_pretrained(".", dtype={dtype})')
        lines.append('tokenizer = AutoTokenizer.from_pretrained(".")')
        return "\n".join(lines)
    lines.insert(1, "from peft import PeftModel")
    lines.append(f"base = AutoModelForCausalLM.from_pretrained({json.dumps(base)}, dtype={dtype})")
    lines.append(f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(base)})")
    lines.append(f'model = PeftModel.from_pretrained(base, "{POLICY}", adapter_name="{POLICY}")')
    if own_world_model:
        lines.append(f'model.load_adapter("{WORLD_MODEL}", adapter_name="{WORLD_MODEL}")')
    lines.append(
        f'model.set_adapter("{POLICY}")  # to act' + (f'; "{WORLD_MODEL}" to predict' if own_world_model else "")
    )
    return "\n".join(lines)


def _lookahead(agent: Agent, run: Path, own_world_model: bool) -> str:
    state, call, reply = _example()
    config, predicts = agent.config, f"`{WORLD_MODEL}`" if own_world_model else "the model"
    state_tokens, reply_tokens = config.world_model.state_tokens, config.world_model.reply_tokens
    before, after = _propose_and_decide(agent)
    form = form_of(config)
    imagined = [
        {"role": "assistant", "content": format_tool_call(call)},
        {"role": "user" if form.by_user else "tool", "content": form.text(reply)},
    ]
    return f"""
## Look-ahead

{_who_looks_ahead(agent, predicts)} The caller looks ahead at each turn of the policy:

1. {before}
2. Let {predicts} predict the reply. The prompt is plain text to complete, without the chat template; the tags are
   ordinary text. The state is compressed to {state_tokens} tokens. Decode greedily, at most {reply_tokens} tokens,
   and stop at `{render_target("").removeprefix("<|csr|>")}`.
3. {_written_as(form)} {after}

The prompt of step 2, for an invented tool:

{_indented(render_prompt(state, call))}

The exchange of step 3:

{_indented(json.dumps(imagined, indent=2))}

{_done_by(agent, run)}In Python, the package builds the prompts:

    from lfo.protocol.world_model import WorldModelCodec, parse_prediction
    codec = WorldModelCodec(tokenizer, state_tokens={state_tokens})
    prompt = codec.prompt_ids(state, call)      # a WorldModelState and a ToolCall -> token ids
    reply = parse_prediction(text)              # what the server answered -> the reply without its tags
"""


def _who_looks_ahead(agent: Agent, predicts: str) -> str:
    config = agent.config
    if not config.looks_ahead:
        return "The policy of this run was trained without look-ahead; showing it one is an experiment."
    asked = "The policy was trained with look-ahead and expects it."
    if config.looks_ahead_untrained:
        asked = "In this run the base looks ahead, **without** the policy adapter; that one acts without look-ahead."
    source = {
        "world_model": "The world model predicts the replies",
        "memory_first": "A memory of real replies predicts, until the world model predicts as well",
        "memory": "A memory of real replies predicts",
        "truth": "The environment tells its real replies, as a control",
        "shuffled": "The world model predicts the replies to another task, as a control",
    }[config.lookahead_source]
    stand_in = "" if config.lookahead_source == "world_model" else f"; outside lfo, {predicts} takes this place"
    return f"{asked} {source} (`lookahead_source={config.lookahead_source}`){stand_in}."


def _written_as(form: ShownForm) -> str:
    """Return how the exchange of step 3 is written for this base (`imagine.form`)."""
    if form.name == "mark":
        return f"""Write call and reply into the conversation in the format of a real exchange, with the reply marked
   `{form.text("").strip()}`."""
    how = (
        """Write the call into the conversation, and after it, as a user message instead of a tool reply, the words
   below with the predicted reply."""
        if form.by_user
        else """Write call and reply into the conversation in the format
   of a real exchange, with the reply in the words below."""
    )
    return f"{how} If the prediction is empty, the words are:\n   {form.text('')}\n  "


def _propose_and_decide(agent: Agent) -> tuple[str, str]:
    """Return who proposes the call of step 1, and what happens to the exchange after step 3."""
    before = f"""Let the policy draft its turn. If the draft is not one call of a tool that the run imagines
   (`world_model.predict={agent.config.world_model.predict}`), or uses what was imagined before, it is the turn."""
    after = f"""Let the policy write again. If it now makes a different call, the
   exchange stays, and the new call is the next draft. Otherwise take the exchange back: the first draft is the turn.
   At most {MOST_IMAGINED} exchanges stay in one conversation."""
    return before, after


def _done_by(agent: Agent, run: Path) -> str:
    """Return which commands look ahead for the caller."""
    if not agent.config.looks_ahead:
        return ""
    shown = f"`lfo run {run}` does exactly this and shows it turn by turn"
    if agent.config.looks_ahead_untrained or agent.config.lookahead_source in ("truth", "shuffled"):
        return f"{shown}. "
    endpoint = "OpenAI's chat endpoint, in front of a vLLM server too (`--upstream`)"
    return f"{shown}; `lfo serve {run}` does it behind\n{endpoint}. "


def _example() -> tuple[WorldModelState, ToolCall, str]:
    state = WorldModelState(
        task="I want my money back for order 17.",
        step=2,
        actions=(('find_order("17")', "Order 17: one lamp, delivered on May 3"),),
        collected={},
    )
    return state, ToolCall(name="refund_order", arguments={"order": "17"}), "A refund needs a photo of the lamp."


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.rstrip("\n").split("\n"))
