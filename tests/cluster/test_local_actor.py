"""Roles on worker threads: calls, refs as dependencies, errors, endings."""

import asyncio
import threading
import warnings

import pytest

from limes.cluster.local import LocalActor, RoleEnded
from limes.cluster.ref import Ref


class Diary:
    """Writes down what it was asked, in order."""

    def __init__(self) -> None:
        self.entries: list[object] = []
        self.gate = threading.Event()

    def note(self, entry: object) -> object:
        self.entries.append(entry)
        return entry

    def read(self) -> list[object]:
        return list(self.entries)

    def wait_for_gate(self, entry: object) -> object:
        assert self.gate.wait(30)
        return self.note(entry)

    async def wait_for_ever(self) -> None:
        await asyncio.Event().wait()

    async def cancel_itself(self) -> None:
        raise asyncio.CancelledError

    def thread_name(self) -> str:
        return threading.current_thread().name

    def fail(self) -> None:
        raise ValueError("no such thing")

    def die(self) -> None:
        raise SystemExit(3)


@pytest.fixture
def actor():
    actor = LocalActor("diary", Diary)
    yield actor
    assert actor.close()


def test_a_call_runs_on_the_roles_own_thread(actor: LocalActor) -> None:
    async def main() -> str:
        return await actor.call("thread_name")

    assert asyncio.run(main()) == "limes-diary"


def test_calls_start_in_the_order_they_were_made(actor: LocalActor) -> None:
    async def main() -> list[int]:
        for i in range(50):
            actor.call("note", i)
        return await actor.call("read")

    assert asyncio.run(main()) == list(range(50))


def test_a_ref_argument_is_resolved_before_the_call_starts(actor: LocalActor) -> None:
    """Critic first, then the actor with its values: a dependency, not a wait in the driver."""
    gate = threading.Event()
    critic = LocalActor("critic", Diary)

    async def main() -> tuple[bool, object, list[object]]:
        await critic.ready()
        critic._role.gate = gate
        values = critic.call("wait_for_gate", "values")
        trained = actor.call("note", values)
        started_early = await actor_is_past(trained)
        gate.set()
        return started_early, await trained, await actor.call("read")

    async def actor_is_past(ref: Ref) -> bool:
        await asyncio.sleep(0.05)
        return ref.done()

    assert asyncio.run(main()) == (False, "values", ["values"])
    assert critic.close()


def test_a_failed_dependency_fails_the_call_with_the_first_roles_name(actor: LocalActor) -> None:
    critic = LocalActor("critic", Diary)

    async def main() -> None:
        await actor.call("note", critic.call("fail"))

    with pytest.raises(ValueError, match="no such thing") as caught:
        asyncio.run(main())
    assert any("'critic'" in note for note in caught.value.__notes__)
    assert critic.close()


def test_an_error_keeps_its_type_and_names_the_role(actor: LocalActor) -> None:
    async def main() -> None:
        await actor.call("fail")

    with pytest.raises(ValueError, match="no such thing") as caught:
        asyncio.run(main())
    assert caught.value.__notes__ == ["(in role 'diary', call 'fail')"]


def test_a_ref_can_be_awaited_from_several_loops(actor: LocalActor) -> None:
    ref = actor.call("note", 7)

    async def main() -> int:
        return await ref

    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(asyncio.run(main()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [7, 7, 7]


def test_cancelling_an_await_leaves_the_call_running(actor: LocalActor) -> None:
    async def main() -> object:
        await actor.ready()
        ref = actor.call("wait_for_gate", "done")
        waiter = asyncio.create_task(_await(ref))
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        actor._role.gate.set()
        return await ref

    assert asyncio.run(main()) == "done"


async def _await(ref: Ref) -> object:
    return await ref


def test_an_async_call_runs_beside_the_calls_behind_it(actor: LocalActor) -> None:
    async def main() -> object:
        actor.call("wait_for_ever")
        return await actor.call("note", 1)

    assert asyncio.run(main()) == 1


def test_closing_fails_what_is_open_with_the_roles_name() -> None:
    actor = LocalActor("diary", Diary)

    async def main() -> None:
        ref = actor.call("wait_for_ever")
        await actor.call("note", 1)
        assert await asyncio.to_thread(actor.close)
        await ref

    with pytest.raises(RoleEnded, match=r"diary.*wait_for_ever"):
        asyncio.run(main())


def test_a_call_that_cancels_itself_is_an_error_and_not_a_hang(actor: LocalActor) -> None:
    async def main() -> None:
        await actor.call("cancel_itself")

    with pytest.raises(RoleEnded, match="cancelled"):
        asyncio.run(main())


def test_a_call_after_the_end_says_so() -> None:
    actor = LocalActor("diary", Diary)
    assert actor.close()

    async def main() -> None:
        await actor.call("note", 1)

    with pytest.raises(RoleEnded, match="'diary' has ended"):
        asyncio.run(main())


def test_a_role_that_dies_fails_its_call_and_all_later_ones() -> None:
    actor = LocalActor("diary", Diary)

    async def main(method: str) -> None:
        await actor.call(method)

    with pytest.raises(RoleEnded, match="died in 'die'"):
        asyncio.run(main("die"))
    with pytest.raises(RoleEnded, match=r"has ended .*SystemExit"):
        asyncio.run(main("read"))
    assert actor.close()


def test_a_role_that_cannot_be_built_raises_its_own_error() -> None:
    def build() -> Diary:
        raise FileNotFoundError("no model at 'x'")

    actor = LocalActor("diary", build)

    async def main() -> None:
        await actor.ready()

    with pytest.raises(FileNotFoundError, match="no model"):
        asyncio.run(main())
    assert actor.close()


def test_an_error_nobody_asked_for_is_reported_at_the_end() -> None:
    actor = LocalActor("diary", Diary)

    async def main() -> None:
        actor.call("fail")
        await actor.call("note", 1)

    asyncio.run(main())
    with pytest.warns(UserWarning, match=r"diary.fail failed and nobody asked.*no such thing"):
        actor.close()


def test_a_busy_role_is_left_behind_after_the_deadline() -> None:
    actor = LocalActor("diary", Diary)

    async def main() -> Ref:
        await actor.ready()
        return actor.call("wait_for_gate", 1)

    ref = asyncio.run(main())
    with pytest.warns(UserWarning, match="still busy after 0.01 s"):
        assert not actor.close(deadline_s=0.01)
    with pytest.raises(RoleEnded, match="closed while busy"):
        asyncio.run(_await(ref))  # type: ignore[arg-type]
    actor._role.gate.set()
    assert actor.close()


def test_no_thread_stays_behind() -> None:
    before = threading.active_count()
    actors = [LocalActor(f"role{i}", Diary) for i in range(8)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(actor.close() for actor in actors)
    assert threading.active_count() == before


def test_an_async_construction_can_be_ended_half_way() -> None:
    reached, closed = threading.Event(), threading.Event()

    async def build() -> Diary:
        try:
            reached.set()
            await asyncio.Event().wait()
            return Diary()
        finally:
            closed.set()

    actor = LocalActor("diary", build)
    assert reached.wait(30)
    assert actor.close()
    assert closed.is_set()
    with pytest.raises(RoleEnded, match="'diary' ended before 'start' did"):
        asyncio.run(_await(actor.ready()))  # type: ignore[arg-type]


def test_an_async_construction_gives_the_role() -> None:
    async def build() -> Diary:
        await asyncio.sleep(0)
        return Diary()

    actor = LocalActor("diary", build)
    assert asyncio.run(_await(actor.call("note", 3))) == 3  # type: ignore[arg-type]
    assert actor.close()
