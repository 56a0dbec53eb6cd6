"""Find out by playing what the tools of an environment are good for: which calls tell something about a task, and which
call succeeds where another one was refused.

    explore(make_environment, tasks, limits, seed=0) -> Experience

Tasks of train are played at random. Then, in each task, tools that do not end it are called with names from its opening
until they tell something (*look-ups*). After the look-ups a random decisive call is made; if it fails, the task is
played again up to there, and the arguments that its reply names are tried, until one succeeds. A reply to that, if it
fails too, may name the next value. Every rollout is counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from lfo.env.answers import checked_step, id_of, legal_moves, opening_of, tools_of
from lfo.env.interface import EnvironmentFactory, NamesMoves
from lfo.env.patience import EnvironmentTimedOut, call_all
from lfo.env.random_play import random_call
from lfo.env.seeds import stream
from lfo.errors import EnvironmentFailed, WorkError
from lfo.protocol.hermes import format_tool_call
from lfo.tools.pretrain.lessons import Experience, Lesson, Step
from lfo.tools.pretrain.relevance import in_order, relevant
from lfo.tools.pretrain.values import (
    Names,
    looks_like_name,
    names,
    options,
    resolved,
    runs,
    shape,
    swapper,
    wording,
    words_in,
)
from lfo.types import ToolCall

MOST_TASKS = 48
RANDOM_ROLLOUTS = 3  # of a task
MAX_TURNS = 16
LOOKS = 12  # calls of look-ups in one rollout
MOST_MISTAKES = 5  # in one rollout: environments end after a few
CURIOUS = 4  # rollouts of a task that try look-ups
TRIES = 16  # rollouts of a task that try what a reply names
ENOUGH = 2  # successes of a task
REFUSALS = 2  # decisive calls of a task that are made at random
MISTAKES = 4  # decisive calls that the environment does not understand, in a row
CHAIN = 3  # refusals before a success, at most
MOST_BROKEN = 4  # tasks that fail at the beginning
HOLD = 0.8  # least share of lessons that must hold without the look-ups that do not matter
USUAL = 0.2  # least share of lessons that have the look-ups which all should have
OFTEN = 0.1  # least share of a tool's calls that end a task


def explore(make_environment: EnvironmentFactory, tasks: Sequence[Any], *, timeout: float, seed: int) -> Experience:
    """Play these tasks, at most `MOST_TASKS` of them, and return what was found out."""
    chosen = stream(seed, "explore").sample(list(tasks), min(MOST_TASKS, len(tasks)))
    explorer = Explorer(make_environment, seed)

    def inside(call: Any) -> Any:
        (outcome,) = call_all([call], timeout=timeout, retries=0, workers=1, what="practice in the environment")
        return outcome

    failures: list[EnvironmentFailed] = []
    for phase in (explorer.play_randomly, explorer.look, explorer.look_again, explorer.decide):
        for index, task in enumerate(chosen):
            outcome = inside(partial(phase, index, task))
            failures += [outcome] if isinstance(outcome, EnvironmentFailed) else []
            _refuse_dead(failures, index + 1)
        explorer.compare()
    found = explorer.experience
    _keep_what_matters(explorer, inside)
    found.used, found.broken = {id_of(task) for task in chosen}, len(failures)
    return found


def _keep_what_matters(explorer: Explorer, inside: Callable[[Any], Any]) -> None:
    """Leave out look-ups that do not matter, if some surely do and nearly all lessons hold without the others; and
    lessons that lack look-ups which most have."""
    found = explorer.experience
    kept = relevant(found.lessons)
    if kept and not kept >= set(found.looks):
        pairs = zip(found.lessons, explorer.played, strict=True)
        shorter = [inside(partial(explorer.without, lesson, task, kept)) for lesson, task in pairs]
        held = [each for each in shorter if isinstance(each, Lesson)]
        if len(held) >= HOLD * len(found.lessons):
            found.lessons = held
    usual = Counter(tuple(sorted({step.call.name for step in lesson.looked})) for lesson in found.explained)
    if usual:
        most = max((names for names, count in usual.items() if count >= USUAL * usual.total()), key=len, default=())
        found.lessons = [lesson for lesson in found.lessons if {step.call.name for step in lesson.looked} >= set(most)]


def _refuse_dead(failures: Sequence[EnvironmentFailed], played: int) -> None:
    """Raise if the environment failed in all of the first tasks; one that hangs costs much time, so sooner."""
    late = failures and isinstance(failures[-1], EnvironmentTimedOut)
    if len(failures) == played and played >= (2 if late else MOST_BROKEN):
        raise WorkError(f"practice failed in the first {played} tasks: {failures[0]}; find out more with lfo check-env")


class Explorer:
    """Plays task after task; what it has seen in some decides what it tries in others."""

    def __init__(self, make_environment: EnvironmentFactory, seed: int) -> None:
        self._make, self._seed = make_environment, seed
        self._tools = tools_of(make_environment())
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self._tools}
        self.experience = Experience(names=Names(()), schemas=schemas)
        self.played: list[Any] = []  # the task of each lesson
        self._openings: dict[int, str] = {}
        self._looked: dict[int, list[Step]] = defaultdict(list)  # what told something, by task
        self._calls: Counter[str] = Counter()
        self._ends: Counter[str] = Counter()
        self._wins: Counter[str] = Counter()
        self._templates: dict[str, dict[str, dict[int, set[str]]]] = defaultdict(lambda: defaultdict(dict))
        self._says_nothing: dict[str, set[str]] = defaultdict(set)  # tool -> templates of replies
        self._last_replies: list[str] = []
        self._common: frozenset[str] = frozenset()
        self._worked: Counter[str] = Counter()  # decisive tools
        self._shapes: Counter[tuple[str, str, str]] = Counter()  # of values that worked: tool, parameter, shape

    # --- random play -------------------------------------------------------------------------------------------

    def play_randomly(self, index: int, task: Any) -> None:
        for number in range(RANDOM_ROLLOUTS):
            game, random = self._begin(task), stream(self._seed, "random", index, number)
            if number == 0:
                self._openings[index] = game.text
            while not game.done and len(game.steps) < MAX_TURNS:
                call = random_call(self._tools, transcript=game.text, random=random, moves=game.moves())
                self._count(index, game, call)
            if game.steps and game.reward < 1:
                self._last_replies.append(game.steps[-1].reply)

    def _count(self, index: int, game: _Game, call: ToolCall) -> None:
        game.make(call)
        self._calls[call.name] += 1
        self._wins[call.name] += game.reward >= 1
        self._ends[call.name] += game.done and not game.mistaken
        self._note(index, call, game.steps[-1].reply)

    def _note(self, index: int, call: ToolCall, reply: str) -> None:
        template = _template(call, reply)
        self._templates[call.name][template].setdefault(index, set()).add(format_tool_call(call))

    def compare(self) -> None:
        """Find wording, and the replies that say nothing: the same to different calls, or in nearly every task."""
        found, played = self.experience, max(1, len(self._openings))
        found.names = Names(list(self._openings.values()))
        self._common = wording(self._last_replies)
        for tool, templates in self._templates.items():
            for template, calls in templates.items():
                many = sum(len(each) > 1 for each in calls.values())
                if many > 1 or many == played == 1 or (len(calls) > 0.6 * played and played > 2):
                    self._says_nothing[tool].add(template)

    @property
    def decisive(self) -> list[str]:
        return [name for name in self.experience.schemas if self._decides(name)] or list(self.experience.schemas)

    def _decides(self, name: str) -> bool:
        """Whether calls of this tool often end a task, or bring success."""
        return self._wins[name] > 0 or self._ends[name] >= max(1, OFTEN * self._calls[name])

    # --- look-ups ----------------------------------------------------------------------------------------------

    def look(self, index: int, task: Any) -> None:
        """Call tools that do not end this task, until they tell something."""
        if len(self._tools) == 1:
            return
        for number in range(CURIOUS):
            asked = [name for name in self.experience.schemas if not self._decides(name)]
            before = len(self._looked[index])
            self._curious(index, task, asked, stream(self._seed, "look", index, number))
            found = self._looked[index]
            if {step.call.name for step in found} >= set(asked) or (number > 1 and len(found) == before > 0):
                return

    def look_again(self, index: int, task: Any) -> None:
        """Call the tools that told something in most other tasks, but not in this one."""
        told = Counter(name for steps in self._looked.values() for name in {step.call.name for step in steps})
        usual = [name for name, count in told.items() if count >= 0.5 * len(self._openings)]
        for number in range(CURIOUS):
            missing = sorted(set(usual) - {step.call.name for step in self._looked[index]})
            if missing:
                self._curious(index, task, missing, stream(self._seed, "again", index, number))

    def _curious(self, index: int, task: Any, asked: list[str], random: Random) -> None:
        """Play the task once and add the calls that told something, each tool once."""
        game, found = self._begin(task), self._looked[index]
        for step in found:
            game.make(step.call)
        tried, mistakes = Counter[str](), 0
        for _ in range(LOOKS):
            told = {step.call.name for step in found}
            left = [name for name in asked if name not in told and tried[name] < 3]
            if game.done or not left or mistakes >= MOST_MISTAKES:
                return
            name = random.choice(left)
            tried[name] += 1
            call = self._from_text(name, game, random)
            self._count(index, game, call)
            mistakes += game.mistaken
            step = game.steps[-1]
            nothing = self._says_nothing[name] & {_template(call, step.reply), step.reply}
            if not (game.done or game.mistaken or nothing):
                found.append(step)
                self._remember(call)

    def decide(self, index: int, task: Any) -> None:
        """Make decisive calls after the look-ups."""
        looked = in_order(self._looked[index], self._openings[index], list(self.experience.schemas))
        self._decide(index, task, [step.call for step in looked], stream(self._seed, "try", index))

    def _remember(self, call: ToolCall) -> None:
        self._shapes.update((call.name, name, shape(value)) for name, value in call.arguments.items())

    def _pick(self, tool: str, name: str, values: Sequence[Any], random: Random) -> Any:
        """Return one of these values for a parameter; most likely one of a shape that has worked, and the first."""
        weights = [
            (1 + 20 * self._shapes[tool, name, shape(value)]) * (1 + (not at)) for at, value in enumerate(values)
        ]
        return random.choices(values, weights)[0]

    def _from_text(self, name: str, game: _Game, random: Random) -> ToolCall:
        """Return a random call whose words are names from the text."""
        call = random_call([self._schema(name)], transcript=game.text, random=random)
        properties = self.experience.schemas[name].get("properties", {})
        arguments = dict(call.arguments)
        is_name = self.experience.names.is_name
        rare = runs(game.text, is_name) + runs(game.text, looks_like_name)
        rare = list(dict.fromkeys(rare + [word for word in words_in(game.text) if is_name(word)]))
        for key in arguments:
            kind = resolved(properties.get(key, {}))
            if kind.get("type", "string") == "string" and "enum" not in kind and rare:
                arguments[key] = self._pick(name, key, rare, random)
            elif kind.get("type") in ("integer", "number") and random.random() < 0.7:
                numbers = options(kind, game.text, known=(), common=())
                arguments[key] = self._pick(name, key, numbers, random) if numbers else arguments[key]
        return ToolCall(name=name, arguments=arguments)

    def _schema(self, name: str) -> Mapping[str, Any]:
        return next(tool for tool in self._tools if tool["function"]["name"] == name)

    # --- decisive calls ----------------------------------------------------------------------------------------

    def _decide(self, index: int, task: Any, looked: list[ToolCall], random: Random) -> None:
        """Make decisive calls at random after the look-ups; try what the replies to the failed ones name."""
        lessons: list[Lesson] = []
        for _ in range(REFUSALS):
            lesson = self._refused(task, looked, random)
            if lesson is not None:
                lessons.append(lesson)
        solved: list[Lesson] = []
        for _ in range(TRIES if lessons else 0):
            number = random.randrange(len(lessons))
            tried = self._try(task, lessons[number], random)
            if tried is None:
                continue
            if tried.success is not None:
                solved.append(tried)
                if len(solved) >= ENOUGH:
                    break
            elif len(tried.refused) < CHAIN:
                lessons.append(tried)
        self.experience.solved += bool(solved)
        if not solved:
            solved = [named for lesson in lessons if (named := self._named(lesson)) is not None]
        for lesson in solved or lessons[:1]:
            self.experience.lessons.append(lesson)
            self.played.append(task)

    def _refused(self, task: Any, looked: list[ToolCall], random: Random) -> Lesson | None:
        game = self._begin(task)
        for call in looked:
            game.make(call)
        if game.done:
            return None
        steps, decisive = tuple(game.steps), self.decisive
        name = random.choices(decisive, [1 + 4 * self._worked[each] for each in decisive])[0]
        tools = [self._schema(name)]
        call = random_call(tools, transcript=game.text, random=random, moves=game.moves())
        for _ in range(MISTAKES):
            game.make(call)
            if not game.mistaken or game.done:
                break
            # It says what is wrong with the call, so it may name a value that fits.
            self.experience.fragile.add(call.name)
            last = Lesson(opening=game.opening, looked=steps, refused=(game.steps[-1],), success=None)
            call = self._informed(last, random) or call
        else:
            return None
        if len(game.steps) > len(steps) + 1:
            game = self._begin(task)
            for each in (*looked, call):
                game.make(each)
        if game.reward >= 1 or game.mistaken or not game.steps[-1].reply.strip():
            return None
        return Lesson(
            opening=game.opening, looked=steps, refused=(game.steps[-1],), success=None, goes_on=not game.done
        )

    def _try(self, task: Any, lesson: Lesson, random: Random) -> Lesson | None:
        """Play a task again, with a call that uses what the refusals name; return what followed, if it is worth it."""
        call = self._informed(lesson, random)
        if call is None or any(call == step.call for step in lesson.refused):
            return None
        game = self._begin(task)
        for step in lesson.looked:
            game.make(step.call)
        if game.done:
            return None
        game.make(call)
        if game.reward >= 1 and game.done:
            self._worked[call.name] += 1
            self._remember(call)
            if not _explained(lesson, call):
                return None
            return _with(lesson, success=call, verified=True)
        last = game.steps[-1]
        new = set(words_in(last.reply)) - {word for step in lesson.refused for word in words_in(step.reply)}
        if game.mistaken or not new - self._common or not _explained(lesson, call):
            return None
        return _with(lesson, refused=(*lesson.refused, last))

    def _informed(self, lesson: Lesson, random: Random) -> ToolCall | None:
        """Return the last refused call with some arguments that its reply names."""
        last = lesson.refused[-1]
        arguments, changed = dict(last.call.arguments), False
        for name, found in self._named_values(lesson).items():
            if found and random.random() < 0.8:
                value = self._pick(last.call.name, name, found, random)
                changed |= value != arguments.get(name)
                arguments[name] = value
        return ToolCall(name=last.call.name, arguments=arguments) if changed else None

    def _named(self, lesson: Lesson) -> Lesson | None:
        """The fallback: a call that was not rewarded, if the reply names one new value at most for each parameter.

        A word may be only wording, so without a success only members of enums, numbers and codes count.
        """
        last = lesson.refused[-1]
        arguments, changed = dict(last.call.arguments), False
        for name, found in self._named_values(lesson).items():
            sure = "enum" in resolved(self.experience.schemas[last.call.name]["properties"][name])
            others = [
                value for value in found if value != arguments.get(name) and (sure or any(map(str.isdigit, str(value))))
            ]
            if len(set(map(str, others))) > 1:
                return None
            if others:
                arguments[name], changed = others[0], True
        call = ToolCall(name=last.call.name, arguments=arguments)
        return _with(lesson, success=call) if changed and _explained(lesson, call) else None

    def _named_values(self, lesson: Lesson) -> dict[str, list[Any]]:
        last = lesson.refused[-1]
        before = [*(each.content for each in lesson.opening), *(step.reply for step in lesson.looked)]
        known = {word for text in before for word in words_in(text)}
        properties = self.experience.schemas[last.call.name].get("properties", {})
        return {
            name: options(schema, last.reply, known=known, common=self._common) for name, schema in properties.items()
        }

    # --- what matters ------------------------------------------------------------------------------------------

    def without(self, lesson: Lesson, task: Any, kept: set[str]) -> Lesson | None:
        """Return the lesson with these look-ups only, if they say the same and the call still succeeds."""
        looked = [step for step in lesson.looked if step.call.name in kept]
        calls = [step.call for step in looked] + ([] if lesson.success is None else [lesson.success])
        game = self._begin(task)
        for call in calls:
            game.make(call)
        same = game.steps[: len(looked)] == looked
        return replace(lesson, looked=tuple(looked)) if same and (game.reward >= 1 or not lesson.verified) else None

    def _begin(self, task: Any) -> _Game:
        self.experience.rollouts += 1
        return _Game(self._make(), task)


class _Game:
    """One rollout."""

    def __init__(self, environment: Any, task: Any) -> None:
        self._environment = environment
        self.opening = opening_of(environment, task)
        self.steps: list[Step] = []
        self.reward, self.done, self.mistaken = 0.0, False, False

    @property
    def text(self) -> str:
        return "\n".join([*(each.content for each in self.opening), *(step.reply for step in self.steps)])

    def moves(self) -> Sequence[ToolCall]:
        return legal_moves(self._environment) if isinstance(self._environment, NamesMoves) else ()

    def make(self, call: ToolCall) -> None:
        if self.done:
            return
        result = checked_step(self._environment, format_tool_call(call))
        self.steps.append(Step(call=call, reply=result.observation))
        self.reward, self.done = self.reward + result.reward, result.done
        self.mistaken = bool(result.info.get("mistake"))


def _with(lesson: Lesson, **changes: Any) -> Lesson:
    return replace(lesson, **changes)


def _template(call: ToolCall, reply: str) -> str:
    """Return a reply without the words of the call: what is left is the same for all calls that failed alike."""
    said = {word for value in call.arguments.values() for word in words_in(str(value))}
    return swapper(dict.fromkeys(said, "_"))(reply)


def _explained(lesson: Lesson, call: ToolCall) -> bool:
    """Whether the refusals, the refused call and the texts before name every argument, the last one a new one."""
    last = lesson.refused[-1]
    told = "\n".join(step.reply for step in lesson.refused)
    before = "\n".join([*(each.content for each in lesson.opening), *(step.reply for step in lesson.looked)])
    new = False
    for name, value in call.arguments.items():
        if value == last.call.arguments.get(name):
            continue
        if names(last.reply, value):
            new = True
        elif not names(told, value) and not names(before, value):
            return False
    return new
