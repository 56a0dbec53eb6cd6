"""How the driver calls verl's processes, with none of them running: what a failed start leaves, what is asked."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from lfo.config import from_mapping
from lfo.engines.verl.settings import PLATFORM, SAMPLER, prepare_environment
from lfo.engines.verl.starting import Stages
from lfo.errors import WorkError

pytest.importorskip("verl", reason="verl is not installed: pip install -e '.[verl]'")
pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]  # verl's and Ray's own, while they are imported


@pytest.fixture(autouse=True)
def a_cpu_for_verl() -> None:
    prepare_environment(from_mapping({"engine": "verl", "model": "tiny", "device": "cpu"}))
    importlib.import_module(PLATFORM)  # by itself, where another test has imported verl before


def test_a_part_that_failed_is_not_told_like_one_that_is_done(capsys):
    stages = Stages()
    stages._console = Console(stderr=True, force_terminal=False)
    stages.begin("Ray")
    stages.begin("trainer ranks")
    stages.end(failed=True)
    stages.end(failed=True)  # nothing is under way any more
    told = [line.rsplit(" ", 2)[0] for line in capsys.readouterr().err.splitlines() if line.endswith(" s")]
    assert told == ["starting: Ray, done in", "starting: trainer ranks, failed after"]


@pytest.mark.parametrize("error", [ValueError("too few GPUs"), RuntimeError("no server"), KeyboardInterrupt()])
def test_a_start_that_fails_gives_back_what_it_took(monkeypatch, error: BaseException):
    from lfo.engines.verl import cluster

    pool = SimpleNamespace(pgs=["group"], world_size=1)

    class Processes:
        def __init__(self, config: Any) -> None:
            self.resource_pool_manager = SimpleNamespace(resource_pool_dict={"pool": pool})

        def init(self) -> None:
            self.actor_rollout_wg = SimpleNamespace(workers=["rank"])
            cluster._Servers.last = SimpleNamespace(rollout_replicas=[SimpleNamespace(servers=["server"])])
            raise error

    ended: list[Any] = []
    loops = SimpleNamespace(agent_loop_workers=["loop"])
    monkeypatch.setattr(cluster, "_logs_of_this_session", lambda: "logs")
    monkeypatch.setattr(cluster, "_queue_runs", lambda: False)
    monkeypatch.setattr(cluster, "get_router_handle", lambda **_: "balancer")
    monkeypatch.setattr(cluster, "LLMServerClient", lambda **_: "client")
    monkeypatch.setattr(cluster, "_Processes", Processes)
    monkeypatch.setattr(cluster.Cluster, "_start_loops", lambda self: loops)
    monkeypatch.setattr(cluster, "remove_placement_group", ended.append)
    monkeypatch.setattr(cluster.ray, "kill", ended.append)
    monkeypatch.setattr(cluster.ray, "available_resources", lambda: {"GPU": 1})
    monkeypatch.setattr(cluster.tq, "close", lambda: ended.append("queue"))
    monkeypatch.setattr(cluster.trainer_base, "LLMServerManager", None)
    options = SimpleNamespace(router_config_path=None, full_determinism=False)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=options))
    with pytest.raises(WorkError if isinstance(error, ValueError) else type(error)):
        cluster.Cluster(config)
    assert sorted(ended) == sorted(["balancer", "loop", "server", "rank", "group", "queue"])


def test_the_world_model_is_told_where_to_end():
    from lfo.engines.verl.cluster import Cluster

    asked: list[dict[str, Any]] = []

    class Client:
        async def generate(self, name: str, *, prompt_ids: list[int], sampling_params: Any, adapter: str) -> Any:
            asked.append(sampling_params)
            return SimpleNamespace(token_ids=[*prompt_ids, 2])

    one: Any = object.__new__(Cluster)
    one._client = Client()
    options = SimpleNamespace(name="vllm", full_determinism=False)
    one._config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=options))
    assert one.complete([[5], [6, 7]], None, limit=40, ends=(2, 3)) == [(5, 2), (6, 7, 2)]
    assert [each["stop_token_ids"] for each in asked] == [[2, 3], [2, 3]]


def test_two_runs_have_two_sockets_to_their_servers(monkeypatch):
    """Each has its own Ray, in which it is job number one."""
    from lfo.engines.verl import worker

    monkeypatch.setattr(worker.ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "01000000"))
    address = "ipc:///tmp/rl-colocate-zmq-01000000-replica-0-rank-0.sock"  # as verl makes it
    runs = [SimpleNamespace(engine_kwargs={SAMPLER: {"servers": name}}) for name in ("lfo-aa", "lfo-bb")]
    assert [worker.own_socket(address, run) for run in runs] == [
        "ipc:///tmp/rl-colocate-zmq-lfo-aa-replica-0-rank-0.sock",
        "ipc:///tmp/rl-colocate-zmq-lfo-bb-replica-0-rank-0.sock",
    ]
