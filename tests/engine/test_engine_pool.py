"""Several engines behind one face."""

import asyncio

import pytest
from rollout_fakes import HANG, FakeEngine

from limes.engine.pool import EnginePool, all_of
from limes.engine.protocol import EngineError, GenerateRequest, SampleKey, SamplingParams


def request(name: str, prompt: list[int], first_position: int = 0) -> GenerateRequest:
    return GenerateRequest(name, prompt, SamplingParams(8), SampleKey(0, 0, 0), first_position)


def names(engine: FakeEngine) -> list[str]:
    return [asked.request_id for asked in engine.requests]


def test_a_groups_answers_go_to_one_engine_and_groups_to_the_least_loaded() -> None:
    engines = [FakeEngine(lambda asked: HANG) for _ in range(2)]
    pool = EnginePool(engines)

    async def main() -> None:
        groups = {"a": 4, "b": 2, "c": 1, "d": 1}
        tasks = [
            asyncio.create_task(pool.generate(request(f"{name}{i}", [ord(name)])))
            for name, num in groups.items()
            for i in range(num)
        ]
        await asyncio.sleep(0)
        await pool.abort()
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert names(engines[0]) == ["a0", "a1", "a2", "a3"]
    assert names(engines[1]) == ["b0", "b1", "c0", "d0"]


def test_an_answer_that_goes_on_stays_with_its_prompt() -> None:
    engines = [FakeEngine(lambda asked: HANG) for _ in range(2)]
    pool = EnginePool(engines)

    async def main() -> None:
        asked = [request("x", [1, 2]), request("y", [9]), request("z", [1, 2, 30, 31], first_position=2)]
        tasks = [asyncio.create_task(pool.generate(one)) for one in asked]
        await asyncio.sleep(0)
        await pool.abort()
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert names(engines[0]) == ["x", "z"]


def test_load_is_forgotten_when_answers_end_well_or_not() -> None:
    engines = [FakeEngine(lambda asked: EngineError("gone")), FakeEngine()]
    pool = EnginePool(engines)

    async def main() -> None:
        for _ in range(3):
            with pytest.raises(EngineError, match="gone"):
                await pool.generate(request("x", [1]))

    asyncio.run(main())
    assert len(engines[0].requests) == 3
    assert pool._homes == {}


def test_the_rest_reaches_every_engine() -> None:
    engines = [FakeEngine() for _ in range(3)]
    engines[1].version = 4
    pool = EnginePool(engines)

    async def main() -> None:
        await pool.pause("in_place")
        await pool.resume()
        await pool.flush_cache()
        await pool.offload(tag for tag in ["kv_cache"])
        health = await pool.health()
        assert (health.alive, health.resident) == (True, frozenset({"weights", "cuda_graph"}))
        assert health.kv_tokens_total == 3000
        await pool.onload(["kv_cache"])
        assert await pool.weight_version() == 0
        engines[2].error = "lost"
        health = await pool.health()
        assert (health.alive, health.error) == (False, "engine 2: lost")
        await pool.close()

    asyncio.run(main())
    wanted = ["pause in_place", "resume", "flush_cache", "offload ['kv_cache']", "onload ['kv_cache']", "close"]
    assert [engine.calls for engine in engines] == [wanted] * 3


def test_a_fault_of_one_is_raised_after_all_have_been_asked() -> None:
    done = []

    async def work(name: str, fails: bool) -> str:
        await asyncio.sleep(0)
        done.append(name)
        if fails:
            raise EngineError(name)
        return name

    with pytest.raises(EngineError, match="a"):
        asyncio.run(all_of([work("a", True), work("b", False)]))
    assert done == ["a", "b"]
