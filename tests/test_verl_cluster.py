"""How the driver calls verl's processes, with none of them running: what a failed start leaves, what is asked."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
import importlib.util
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from lfo.config import from_mapping
from lfo.engines.verl.config import PLATFORM, SAMPLER, prepare_environment
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


OPTIONS = SimpleNamespace(router_config_path=None, full_determinism=False)
CONFIG = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=OPTIONS), transfer_queue=None)


def without_ray(monkeypatch, ended: list[Any]) -> None:
    """Replace what `Cluster` calls of Ray and of the queue; `ended` gets what it ends."""
    from lfo.engines.verl import cluster

    monkeypatch.setattr(cluster, "_logs_of_this_session", lambda: "logs")
    monkeypatch.setattr(cluster, "_queue_runs", lambda: False)
    monkeypatch.setattr(cluster, "get_router_handle", lambda **_: "balancer")
    monkeypatch.setattr(cluster, "remove_placement_group", ended.append)
    monkeypatch.setattr(cluster.ray, "kill", ended.append)
    monkeypatch.setattr(cluster.ray, "available_resources", lambda: {"GPU": 1})
    monkeypatch.setattr(cluster.tq, "close", lambda: ended.append("queue"))
    monkeypatch.setattr(cluster.trainer_base, "RayWorkerGroup", None)
    monkeypatch.setattr(cluster.trainer_base, "LLMServerManager", None)


@pytest.mark.parametrize("error", [ValueError("too few GPUs"), RuntimeError("no server"), KeyboardInterrupt()])
def test_a_start_that_fails_gives_back_what_it_took(monkeypatch, error: BaseException):
    from lfo.engines.verl import cluster

    pool = SimpleNamespace(pgs=["group"], world_size=1)

    class Processes:
        def __init__(self, config: Any) -> None:
            self.resource_pool_manager = SimpleNamespace(resource_pool_dict={"pool": pool})

        def init(self) -> None:
            group = cluster.trainer_base.RayWorkerGroup(resource_pool=pool, ray_cls_with_init=None, device_name="cpu")
            assert group.workers == ["rank"]
            assert started.wait(10), "servers start beside the ranks"
            raise error

    class Servers:
        def __init__(self, config: Any, worker_group: Any) -> None:
            self.group, self.rollout_replicas = worker_group, []

        async def start(self) -> None:
            self.rollout_replicas = [SimpleNamespace(servers=["server"])]
            started.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wrap_future(self.group.loaded)  # ranks that do not come
            ended.append("start of the servers")

    ended: list[Any] = []
    started = threading.Event()
    place = SimpleNamespace(address="here", port="1")
    loops = SimpleNamespace(agent_loop_workers=["loop"])
    without_ray(monkeypatch, ended)
    monkeypatch.setattr(cluster, "_Processes", Processes)
    monkeypatch.setattr(cluster, "_Servers", Servers)
    monkeypatch.setattr(cluster, "places_of", lambda pool, device: [place])
    monkeypatch.setattr(cluster, "RayWorkerGroup", lambda **_: SimpleNamespace(workers=["rank"]))
    monkeypatch.setattr(cluster.Cluster, "_start_loops", lambda self: loops)
    with pytest.raises(WorkError if isinstance(error, ValueError) else type(error)):
        cluster.Cluster(CONFIG)
    assert set(ended) == {"balancer", "loop", "server", "rank", "group", "queue", "start of the servers"}


def test_the_balancer_ends_if_nobody_can_be_its_client(monkeypatch):
    """In a Ray session of another program it would stay alive."""
    from lfo.engines.verl import cluster

    class Processes:
        def __init__(self, config: Any) -> None:
            self.actor_rollout_wg = "ranks"

        def init(self) -> None:
            pass

    def client(**_: Any) -> None:
        raise RuntimeError("no client")

    ended: list[Any] = []
    without_ray(monkeypatch, ended)
    monkeypatch.setattr(cluster, "_Processes", Processes)
    monkeypatch.setattr(cluster, "LLMServerClient", client)
    with pytest.raises(RuntimeError, match="no client"):
        cluster.Cluster(CONFIG)
    assert ended == ["balancer", "queue"]


def test_a_queue_that_died_is_noticed_while_its_answer_is_awaited(monkeypatch):
    """The call that waits for it never returns."""
    from lfo.engines.verl import cluster

    def actor(name: str) -> Any:
        return SimpleNamespace(__ray_ready__=SimpleNamespace(remote=lambda: name))

    def answers(asked: list[str]) -> None:
        if "storage" in asked:
            raise RuntimeError("the storage is dead")

    never = threading.Event()
    one: Any = object.__new__(cluster.Cluster)
    one._loops = SimpleNamespace(agent_loop_workers=[actor("loop")])
    monkeypatch.setattr(cluster, "ALIVE_SECONDS", 0.01)
    monkeypatch.setattr(cluster.queue, "_TQ_CONTROLLER", actor("busy"))
    monkeypatch.setattr(cluster.queue, "_TQ_STORAGE", {"SimpleStorage": {"unit": actor("storage")}})
    monkeypatch.setattr(cluster.ray, "wait", lambda asked, **_: ([name for name in asked if name != "busy"], ["busy"]))
    monkeypatch.setattr(cluster.ray, "get", answers)
    with pytest.raises(RuntimeError, match="the storage is dead"):
        one._queued(never.wait)
    monkeypatch.setattr(cluster.ray, "get", lambda asked: None)  # alive, and perhaps slower than ALIVE_SECONDS
    assert one._queued(dict, step=3) == {"step": 3}
    never.set()


def test_servers_load_when_the_ranks_have(monkeypatch):
    """And start before that."""
    from lfo.engines.verl import cluster

    done: list[str] = []

    class Servers:
        def __init__(self, config: Any, worker_group: Any) -> None:
            self.group = worker_group

        async def start(self) -> None:
            done.append("processes")
            started.set()
            await asyncio.wrap_future(self.group.loaded)
            done.append("loaded")

    started = threading.Event()
    place = SimpleNamespace(address="here", port="1")
    monkeypatch.setattr(cluster, "_Servers", Servers)
    monkeypatch.setattr(cluster, "places_of", lambda pool, device: [place])
    monkeypatch.setattr(cluster, "RayWorkerGroup", lambda **_: SimpleNamespace(workers=["rank"]))
    rollout = SimpleNamespace(name=SAMPLER)
    together = cluster._Together(SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)), "balancer")
    together.begin(resource_pool="pool", ray_cls_with_init=None, device_name="cpu")
    assert started.wait(10)
    assert done == ["processes"]
    assert together.create().balancer == "balancer"
    assert done == ["processes", "loaded"]


def test_all_that_verl_asks_of_a_vllm_server_is_passed_on():
    """Read from verl's source, since its module imports vLLM."""
    from lfo.engines.verl.replicas import VllmServer

    spec = importlib.util.find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "workers" / "rollout" / "vllm_rollout" / "vllm_async_server.py"
    (server,) = [
        each
        for each in ast.parse(source.read_text()).body
        if isinstance(each, ast.ClassDef) and each.name == "vLLMHttpServer"
    ]
    methods = {
        each.name
        for each in server.body
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and not each.decorator_list
    }
    inner = {"set_pd_peer", "run_server", "run_headless"}  # for roles that we do not have, and called by itself
    assert {name for name in methods if not name.startswith("_")} - inner == {
        name for name in vars(VllmServer) if not name.startswith("_")
    }


LOG = """\
(VllmServer pid=4711) INFO 11-16 12:31:07 [async_llm.py:120] Initializing a V1 LLM engine
(EngineCore pid=4985) ERROR 11-16 12:31:40 [core.py:1108] EngineCore failed to start.
(EngineCore pid=4985) ERROR 11-16 12:31:40 [core.py:1108] Traceback (most recent call last):
(EngineCore pid=4985) ERROR 11-16 12:31:40 [core.py:1108]     raise ValueError(
(EngineCore pid=4985) ERROR 11-16 12:31:40 [core.py:1108] ValueError: Free memory on device cuda:0 (26.48/139.8 GiB) \
on startup is less than desired GPU memory utilization (0.5, 69.9 GiB). Decrease GPU memory utilization or reduce GPU \
memory used by other processes.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


@pytest.mark.parametrize("in_log", [True, False])
def test_why_vllm_did_not_start_is_told(tmp_path: Path, in_log: bool):
    """It stands in a log alone; what Ray brings names no cause."""
    from ray.exceptions import RayTaskError

    from lfo.engines.verl.failures import in_one_sentence

    (tmp_path / "worker-aa-01000000-4711.err").write_text(LOG if in_log else "nothing\n")
    (tmp_path / "raylet.err").write_text("KeyError: another process")
    told = RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")
    with pytest.raises(WorkError) as raised, in_one_sentence("runs/x", lambda: str(tmp_path)):
        raise RayTaskError("launch_server", str(told), told)
    assert ("(ValueError: Free memory on device cuda:0 (26.48/139.8 GiB)" in str(raised.value)) is in_log
    assert ("lower verl.actor_rollout_ref.rollout.gpu_memory_utilization" in str(raised.value)) is in_log
    assert (str(tmp_path) in str(raised.value)) is not in_log
    assert "lfo train --resume runs/x" in str(raised.value)


@pytest.mark.parametrize("full", [True, False])
def test_a_full_disk_is_reported_while_the_world_model_is_written_for_vllm(full):
    """As on the GPU machine: safetensors raises in the process of a rank."""
    from ray.exceptions import RayTaskError
    from safetensors import SafetensorError

    from lfo.engines.verl.failures import in_one_sentence

    number = 28 if full else 5
    told: Any = SafetensorError(f"Error while serializing: I/O error: words (os error {number})")
    with pytest.raises(WorkError) as raised, in_one_sentence("runs/x", lambda: "/ray/logs"):
        raise RayTaskError("update_weights", str(told), told)
    assert str(raised.value).startswith("the disk is full: ") is full
    assert "lfo train --resume runs/x" in str(raised.value)


@pytest.mark.parametrize("cache", [None, 1 << 30])
def test_vllm_waits_for_the_ranks_only_if_it_must_measure_the_free_memory(monkeypatch, cache):
    from lfo.engines.verl import replicas

    done: list[str] = []

    class Call:
        def __init__(self, name: str, answer: Any) -> None:
            self.name, self.answer = name, answer

        async def remote(self, *_: Any) -> Any:
            done.append(self.name)
            return self.answer

    server = SimpleNamespace(
        get_master_address=Call("address", ("here", 1, 2)),
        launch_server=Call("launch", None),
        get_server_address=Call("server", ("here", 1)),
    )
    actor = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda **_: server))
    monkeypatch.setattr(replicas.ray, "remote", lambda kind: actor)
    replica: Any = object.__new__(replicas.VllmReplica)
    replica.servers, replica.workers, replica.nnodes, replica.gpus_per_replica_node = [], ["rank"], 1, 1
    replica.replica_rank, replica.rollout_mode, replica.model_config = 0, "hybrid", None
    replica.places, replica.ranks_loaded = [SimpleNamespace(node="node", device="0")], Future()
    replica.at = lambda node: {}
    replica.config = SimpleNamespace(engine_kwargs={"vllm": {"kv_cache_memory_bytes": cache}})

    async def start() -> list[str]:
        starting = asyncio.create_task(replica.launch_servers())
        await asyncio.sleep(0.1)
        before = list(done)
        replica.ranks_loaded.set_result(None)
        await starting
        return before

    assert asyncio.run(start()) == (["address", "launch", "server"] if cache else ["address"])
    assert done == ["address", "launch", "server"]


def test_a_lost_process_is_told_with_its_log_and_the_way_on():
    from lfo.engines.verl.failures import Lost, in_one_sentence

    with pytest.raises(WorkError) as raised, in_one_sentence("runs/x", lambda: "/ray/logs"):
        raise Lost("a server failed")
    assert str(raised.value) == (
        "a server failed; see its log in /ray/logs; continue from the last checkpoint with: lfo train --resume runs/x"
    )


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
    assert one.complete([[5], [6, 7]], limit=40, ends=(2, 3)) == [(5, 2), (6, 7, 2)]
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
