"""The world for a policy that cannot speak: the script is played, and every other rollout is rewarded."""

from lfo.env.interface import Environment
from lfo.env.scripted import ScriptedCalls
from lfo.types import Message, ToolCall


def test_whatever_is_said_the_script_is_played_to_its_end():
    rewards = []
    for task in ScriptedCalls(levels=(2,)).tasks("val")[:4]:
        environment = ScriptedCalls(levels=(2,))
        assert isinstance(environment, Environment)
        environment.reset(task)
        results = []
        while not (results and results[-1].done):
            assert len(results) < 12, "it does not end"
            results.append(environment.step("!!! noise"))
        assert environment.done_errands == len(task.errands), "the script knows the rules"
        assert task.company_name in results[0].observation
        rewards.append(results[-1].reward)
    assert rewards in ([0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0])


def test_lookahead_asks_once_about_a_call_of_the_script():
    environment = ScriptedCalls(levels=(2,))
    opening = list(environment.reset(environment.tasks("val")[0]))
    after = [*opening, Message(role="assistant", content="noise"), Message(role="tool", content="The directory.")]
    assert environment.lookahead_query(opening) is None
    call = environment.lookahead_query(after)
    assert isinstance(call, ToolCall)
    assert call.name == "make_phone_call"
    imagined = Message(role="tool", content="It may be so.", predicted=True)
    assert environment.lookahead_query([*after, imagined]) is None
