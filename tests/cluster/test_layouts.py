"""Device slots of roles, by numbers alone; and what is refused before anything starts."""

import subprocess
import sys

import pytest

from limes.cluster.layout import ENGINE_SHARE, TRAIN_SHARE, describe, lay_out, refuse_too_few
from limes.config import Config, load_config

PPO = {"algorithm.advantage_estimator": "ppo"}


def config(**cluster: object) -> Config:
    others = {name: cluster.pop(name) for name in list(cluster) if "." in name}
    values = {"rollout.num_rollout": 1, "cluster.kind": "ray"} | others
    return load_config(None, values | {f"cluster.{name}": value for name, value in cluster.items()})


@pytest.mark.parametrize(
    ("settings", "slots", "actor", "critic", "engines"),
    [
        ({}, 1, (0,), (), ((0,),)),
        ({"actor_num_nodes": 2, "actor_num_gpus_per_node": 2}, 4, (0, 1, 2, 3), (), ((0,), (1,), (2,), (3,))),
        ({"rollout_num_gpus": 3}, 3, (0,), (), ((0,), (1,), (2,))),
        ({"actor_num_gpus_per_node": 4, "rollout_num_gpus": 2}, 4, (0, 1, 2, 3), (), ((0,), (1,))),
        ({"colocate": False}, 2, (0,), (), ((1,),)),
        ({"colocate": False, "actor_num_gpus_per_node": 2, "rollout_num_gpus": 3}, 5, (0, 1), (), ((2,), (3,), (4,))),
        (PPO, 1, (0,), (0,), ((0,),)),
        (PPO | {"colocate_critic": False}, 2, (0,), (1,), ((0,), (1,))),
        (PPO | {"colocate_critic": False, "colocate": False}, 3, (0,), (1,), ((2,),)),
        ({"debug_rollout_only": True, "rollout_num_gpus": 2}, 2, (), (), ((0,), (1,))),
        (PPO | {"debug_rollout_only": True, "colocate": False}, 1, (), (), ((0,),)),
        ({"debug_train_only": True, "load_debug_rollout_data": "runs/a"}, 1, (0,), (), ()),
    ],
)
def test_slots_of_roles(settings: dict, slots: int, actor: tuple, critic: tuple, engines: tuple) -> None:
    layout = lay_out(config(**settings))
    assert (layout.num_slots, layout.actor, layout.critic, layout.engines) == (slots, actor, critic, engines)


def test_all_that_can_share_a_slot_fits_into_it() -> None:
    assert 2 * TRAIN_SHARE + ENGINE_SHARE <= 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_num_gpus_per_engine": 2}, "rollout_num_gpus_per_engine = 2: the embedded engine runs on one device"),
        (
            {"debug_train_only": True, "debug_rollout_only": True, "load_debug_rollout_data": "x"},
            "are both true; choose one",
        ),
        ({"debug_train_only": True}, "needs both; set or leave out both"),
        ({"load_debug_rollout_data": "runs/a"}, "needs both; set or leave out both"),
        ({"kind": "local", "actor_num_nodes": 2}, "cluster.actor_num_nodes = 2 needs several processes"),
        ({"kind": "local", "rollout_num_gpus": 4}, "cluster.rollout_num_gpus = 4 needs several processes"),
        ({"kind": "local", "colocate": False}, "cluster.colocate = false needs devices of their own"),
        ({"kind": "local", "offload_rollout_level": ["weight"]}, "has no effect with cluster.kind = local"),
        ({"weights.transport": "shared"}, "weights.transport = shared needs trainer and engine in one process"),
        (
            {"weights.transport": "delta", "offload_rollout_level": ["weight"]},
            "lets go of the weights that weights.transport = delta changes",
        ),
        (
            {"weights.check_update_equal": True, "checkpoint.load": "runs/a/checkpoints/000001"},
            "checkpoint.load replaces them",
        ),
    ],
)
def test_impossible_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**settings)


@pytest.mark.parametrize("apart", [False, True])
def test_actor_and_critic_have_as_many_ranks(apart: bool) -> None:
    settings = PPO | {"actor_num_gpus_per_node": 2, "critic_num_gpus_per_node": 1, "colocate_critic": not apart}
    with pytest.raises(ValueError, match=r"critic_num_gpus_per_node = 1: .* 2; leave both out"):
        lay_out(config(**settings))


def test_a_cluster_that_is_too_small_is_refused_with_the_numbers() -> None:
    wanted = config(colocate=False, actor_num_gpus_per_node=4, rollout_num_gpus=4)
    layout = lay_out(wanted)
    with pytest.raises(ValueError, match=r"ask for 8 devices \(actor 4, engines 4\), and the cluster has 6 GPUs on 2"):
        refuse_too_few(wanted, layout, [4, 2], "GPU")
    refuse_too_few(wanted, layout, [4, 4], "GPU")
    spread = config(actor_num_nodes=2, actor_num_gpus_per_node=4)
    with pytest.raises(ValueError, match="and 1 of them with 4 GPUs or more"):
        refuse_too_few(spread, lay_out(spread), [6, 2], "GPU")


def test_shared_slots_are_counted() -> None:
    assert describe(lay_out(config(**PPO))) == "actor 1, critic 1, engines 1; 2 shared"


def test_the_way_of_the_weights_follows_the_layout() -> None:
    assert load_config(None, {"rollout.num_rollout": 1}).weight_transport() == "shared"
    assert config().weight_transport() == "ipc"
    assert config(colocate=False).weight_transport() == "broadcast"
    assert config(**{"weights.transport": "disk"}).weight_transport() == "disk"


def test_without_ray_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from limes.cluster import ray_session

    monkeypatch.setattr(ray_session.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'limes\[ray\]'"):
        ray_session.require_ray()


def test_a_local_run_never_imports_ray() -> None:
    code = "import limes.train, limes.evaluate, limes.cluster.roles, sys; print('ray' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
