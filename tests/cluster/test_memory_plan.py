"""What leaves a device, what comes back, and what is refused in between."""

from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from limes.cluster.memory import DeviceMemory, MemoryPlan, Parking, Residency, Vacated, memory_plan, optimizer_state
from limes.config import load_config
from limes.config.trainer import TrainerConfig
from limes.training.optimizer import PolicyOptimizer

TAGS = ("weights", "kv_cache", "cuda_graph")
MB = 1 << 20


def plan(**cluster: object) -> MemoryPlan:
    values = {f"cluster.{name}": value for name, value in cluster.items()}
    return memory_plan(load_config(None, {"rollout.num_rollout": 1, "model.device": "cpu"} | values))


def test_the_plan_follows_the_layout() -> None:
    assert plan() == MemoryPlan(("cuda_graph", "kv_cache"), False)
    assert plan(kind="ray", offload_rollout_level=["weight", "kv_cache"]).rollout_tags == (
        "cuda_graph",
        "kv_cache",
        "weights",
    )
    assert plan(kind="ray", offload_rollout_level=[]).rollout_tags == ("cuda_graph",)
    assert plan(kind="ray", colocate=False) == MemoryPlan((), False)
    assert plan(kind="ray", colocate=False, offload_rollout=True).offload_rollout
    assert not plan(offload_rollout=False).offload_rollout
    assert plan(offload_train=True).offload_train


@given(st.lists(st.tuples(st.sampled_from(["off", "on", "update"]), st.sets(st.sampled_from(TAGS), min_size=1))))
def test_only_legal_moves_are_made(moves: list) -> None:
    """Against a model of its own: nothing leaves or comes twice, graphs come last and onto weights that are new."""
    memory = Residency("engine", TAGS, on_top=["cuda_graph"])
    there, stale = set(TAGS), False
    for move, tags in moves:
        if move == "off":
            legal = tags <= there
        elif move == "on":
            whole = there | tags == set(TAGS) and not stale and "weights" not in tags
            legal = not tags & there and ("cuda_graph" not in tags or whole)
        else:
            legal = "weights" in there
        try:
            if move == "update":
                memory.updated()
            else:
                (memory.offload if move == "off" else memory.onload)(tags)
        except ValueError:
            assert not legal
        else:
            assert legal
            there = there - tags if move == "off" else there | tags if move == "on" else there
            stale = False if move == "update" else stale or (move == "on" and "weights" in tags)
        assert (memory.resident, memory.is_stale) == (there, stale)


def test_refusals_name_owner_and_tags() -> None:
    memory = Residency("engine", TAGS, on_top=["cuda_graph"])
    memory.offload(TAGS)
    with pytest.raises(ValueError, match=r"engine: \['kv_cache'\] are offloaded already"):
        memory.offload(["kv_cache"])
    with pytest.raises(ValueError, match=r"cannot onload \['cuda_graph'\] while \['kv_cache', 'weights'\] are"):
        memory.onload(["cuda_graph"])
    with pytest.raises(ValueError, match="cannot update weights while"):
        memory.updated()
    memory.onload(["weights"])
    memory.onload(["kv_cache"])
    with pytest.raises(ValueError, match="before the weights that came back were updated"):
        memory.onload(["cuda_graph"])
    with pytest.raises(ValueError, match=r"unknown memory tags \['vram'\]"):
        memory.offload(["vram"])


def test_parked_memory_is_given_back_and_the_tensors_stay_what_they_were(tmp_path: Path) -> None:
    tensors = [torch.randn(8 * MB), torch.randn(8 * MB, dtype=torch.bfloat16), torch.arange(3)]
    copies, view = [tensor.clone() for tensor in tensors], tensors[0][5:9]
    parking, process = Parking(tmp_path), psutil.Process()
    before = process.memory_info().rss
    assert parking.park([*tensors, view]) == 48 * MB + 24
    assert before - process.memory_info().rss > 44 * MB
    assert list(tmp_path.iterdir()) == []  # a file without a name goes with the process
    parking.restore(keep=True)
    assert all(map(torch.equal, tensors, copies))
    parking.release()
    assert before - process.memory_info().rss > 44 * MB
    parking.restore()
    assert all(map(torch.equal, tensors, copies))
    assert torch.equal(view, copies[0][5:9])
    assert parking.is_empty


def test_weights_on_memory_that_is_not_torchs_leave_too(tmp_path: Path) -> None:
    """As those that are mapped from a model file: afterwards they are on memory of their own."""
    foreign = torch.nn.Parameter(torch.frombuffer(bytearray(range(64)), dtype=torch.float32))
    copy, parking = foreign.detach().clone(), Parking(tmp_path)
    assert parking.park([foreign]) == 64
    assert foreign.untyped_storage().nbytes() == 0
    parking.restore()
    assert torch.equal(foreign, copy)


def optimizer_after(num_steps: int, sleep: Path | None, dtype: torch.dtype) -> tuple[PolicyOptimizer, list]:
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 32).to(dtype)
    optimizer = PolicyOptimizer(layer.named_parameters(), TrainerConfig(lr=0.1))
    memory = None if sleep is None else DeviceMemory("actor", optimizer, sleep, shares_weights=False)
    for step in range(num_steps):
        if memory is not None:
            memory.onload()
        torch.manual_seed(step)
        layer(torch.randn(4, 64, dtype=dtype)).square().sum().backward()
        optimizer.accumulate()
        optimizer.step(0.1)
        if memory is not None:
            memory.offload()
            assert all(parameter.untyped_storage().nbytes() == 0 for parameter in layer.parameters())
            assert all(tensor.untyped_storage().nbytes() == 0 for tensor in optimizer_state(optimizer))
            assert memory.offload() == 0  # asleep already
            memory.lend_weights()
            assert torch.isfinite(layer.weight).all()
            memory.take_weights()
    if memory is not None:
        memory.onload()
    return optimizer, [parameter.detach().clone() for parameter in layer.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trainer_that_sleeps_between_steps_takes_the_same_steps(tmp_path: Path, dtype: torch.dtype) -> None:
    plain, slept = (optimizer_after(3, place, dtype) for place in (None, tmp_path))
    assert all(map(torch.equal, plain[1], slept[1]))
    states = [optimizer.state_dict() for optimizer, _ in (plain, slept)]
    for name, state in states[0].items():
        assert all(torch.equal(value, states[1][name][key]) for key, value in state.items())


def test_weights_that_an_engine_uses_stay(tmp_path: Path) -> None:
    layer = torch.nn.Linear(8, 8)
    optimizer = PolicyOptimizer(layer.named_parameters(), TrainerConfig())
    kept = layer.weight.detach().clone()
    memory = DeviceMemory("actor", optimizer, tmp_path, shares_weights=True)
    memory.offload()
    assert torch.equal(layer.weight, kept)


def test_vacated_weights_come_back_in_shape() -> None:
    layer = torch.nn.Linear(8, 4).bfloat16()
    vacated = Vacated(layer.parameters())
    vacated.release()
    assert sum(parameter.numel() for parameter in layer.parameters()) == 0
    vacated.take()
    assert [(p.shape, p.dtype) for p in layer.parameters()] == [((4, 8), torch.bfloat16), ((4,), torch.bfloat16)]
