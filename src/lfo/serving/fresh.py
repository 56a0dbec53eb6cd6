"""Whether the predictions of a served agent are still right: what its clients' tools really replied beside what the
world model expects, once the client has its answer.

    lfo_fresh_replies_total 240      replies that were compared
    lfo_fresh_right_total 201        of them predicted; in part, if the environment does not describe its replies
    lfo_fresh_doubt 1                likelihood ratio; the alarm rings at 10000 (lfo.runs.rule_change)
    lfo_rules_changed_total 0        alarms
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from lfo.env.interface import Environment
from lfo.errors import LfoError
from lfo.play.fresh import agreement
from lfo.play.look_ahead import LookAhead, Question
from lfo.protocol.world_model import state_of
from lfo.runs.rule_change import Watch
from lfo.serving.conversations import Context

logger = logging.getLogger(__name__)


class Listener:
    """Compares replies; used by the thread of the batcher, read by others."""

    def __init__(self, lookahead: LookAhead | None, judge: Environment) -> None:
        self._lookahead, self._judge = lookahead, judge
        self._watch, self.replies, self.right, self.alarms = Watch(), 0, 0.0, 0

    def hear(self, contexts: Sequence[Context]) -> None:
        """Compare the last reply in each conversation, if it is one to a call that look-ahead could imagine."""
        pairs = [pair for context in contexts for pair in self._question(context)]
        if self._lookahead is None or not pairs:
            return
        try:
            predicted = self._lookahead.predictor([question for question, _ in pairs])
            right = [agreement(self._judge, *each) for each in zip(predicted, (said for _, said in pairs), strict=True)]
        except LfoError as error:  # of an upstream server, or of the environment; clients have their answers
            logger.warning("replies were not compared with predictions: %s", error)
            return
        for each in right:
            self.replies, self.right = self.replies + 1, self.right + each
            noticed = self._watch.hear(step=self.replies, tasks=1, right=each)
            if noticed is not None:
                self.alarms += 1
                logger.warning("%s; retrain the world model: lfo serve RUN --logs FILE", noticed.words)

    def _question(self, context: Context) -> Iterator[tuple[Question, str]]:
        turn = context.turns[-1] if context.turns else None
        if self._lookahead is None or turn is None or turn.call is None or turn.predicted or not turn.observation:
            return
        if self._lookahead.tools is None or turn.call.name in self._lookahead.tools:
            state = state_of(context.opening, context.turns[:-1])
            yield Question(task=None, state=state, call=turn.call, messages=()), turn.observation

    def figures(self) -> str:
        """Return the figures in Prometheus' format."""
        return (
            f"lfo_fresh_replies_total {self.replies}\n"
            f"lfo_fresh_right_total {self.right:g}\n"
            f"lfo_fresh_doubt {self._watch.doubt:g}\n"
            f"lfo_rules_changed_total {self.alarms}\n"
        )
