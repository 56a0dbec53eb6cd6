"""The scripted environment: the script is played, and every other rollout is rewarded."""

from benchmarks.scripted import ScriptedCalls
from lfo.env.interface import Environment
from lfo.protocol.hermes import read_tool_call


def test_whatever_is_said_the_script_is_played_to_its_end():
    rewards = []
    for task in ScriptedCalls(levels=(2,)).tasks("val")[:4]:
        environment = ScriptedCalls(levels=(2,))
        assert isinstance(environment, Environment)
        environment.reset(task)
        results, words = [], []
        while not (results and results[-1].done):
            assert len(results) < 12, "it does not end"
            words.append(environment.scripted_words())
            results.append(environment.step("!!! noise"))
        assert environment.done_errands == len(task.errands), "the script knows the rules"
        assert task.company_name in results[0].observation
        calls = [read_tool_call(each) for each in words]
        assert [call.name for call in calls if call][:3] == ["search_company", "auth_info_form", "make_phone_call"]
        rewards.append(results[-1].reward)
    assert rewards in ([0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0])
