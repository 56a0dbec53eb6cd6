"""Look-ahead that begins with a memory and hands over to the world model.

A memory (`ReplyStore`) predicts from the first reply on, but only what it has received before. A world model needs some
hundred replies, and then also predicts replies to situations that are unlike all earlier ones. So every new reply that
look-ahead asks about tests both, before they learn it. When the world model has been right about as often, it answers
from then on, and the memory is dropped. After a change of rules the memory begins again, because it learns faster.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lfo.errors import DataError
from lfo.play.look_ahead import Predictor, Question
from lfo.play.reply_store import ReplyStore, damaged
from lfo.protocol.world_model import observed_calls
from lfo.types import Rollout

WINDOW = 64  # the last tested replies, which decide
CLOSE = 0.05  # by how much less of them the world model may predict: it is better on what they do not show

Judge = Callable[[str, str], bool]  # whether a predicted reply means the true one


@dataclass(kw_only=True)
class MemoryFirst:
    """A memory that answers look-ahead until the world model predicts new replies as well."""

    store: ReplyStore
    world_model: Predictor
    judge: Judge
    handed_over: bool = False
    tested: list[tuple[bool, bool]] = field(default_factory=list)  # whether memory and world model were right

    def __len__(self) -> int:
        return len(self.store)

    def answer(self, questions: Sequence[Question]) -> Sequence[str]:
        if self.handed_over:
            return self.world_model(questions)
        return self.store.answer(questions)

    def observe(self, rollouts: Iterable[Rollout], step: int = 0) -> None:
        if self.handed_over:
            return
        rollouts = list(rollouts)
        self._test(rollouts)
        self.store.observe(rollouts, step)
        if self.world_model_is_as_good:
            self.handed_over = True
            self.store.replies.clear()

    def forget(self, before: int) -> None:
        """Begin again with what the memory has received since this step."""
        self.handed_over = False
        self.tested.clear()
        self.store.forget(before)

    def age(self) -> None:
        self.store.age()

    def _test(self, rollouts: Iterable[Rollout]) -> None:
        calls = [call for rollout in rollouts for call in observed_calls(rollout) if call.asked]
        questions = [Question(task=None, state=call.state, call=call.call, messages=()) for call in calls]
        distinct = {question.key: (question, call.reply) for question, call in zip(questions, calls, strict=True)}
        asked, replies = [question for question, _ in distinct.values()], [reply for _, reply in distinct.values()]
        said = zip(replies, self.answer(asked), self.world_model(asked), strict=True)
        self.tested += [(self.judge(memory, reply), self.judge(world, reply)) for reply, memory, world in said]
        del self.tested[:-WINDOW]

    @property
    def world_model_is_as_good(self) -> bool:
        memory, world_model = (sum(right) for right in zip(*self.tested, strict=True)) if self.tested else (0, 0)
        return len(self.tested) >= WINDOW and world_model >= memory - CLOSE * WINDOW

    def save(self, path: Path) -> None:
        saved = {"replies": self.store.records, "handed_over": self.handed_over, "tested": self.tested}
        path.write_text(json.dumps(saved), encoding="utf-8")

    def load(self, path: Path) -> None:
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            self.handed_over = bool(saved["handed_over"])
            self.tested = [(bool(memory), bool(world_model)) for memory, world_model in saved["tested"]]
            records = saved["replies"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DataError(damaged(path)) from error
        self.store.replies.clear()
        self.store.add_records(records, path)
