"""The process around a role on Ray, without Ray: order of calls, failures, what it says."""

import asyncio
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from limes.cluster.ray_host import Failure, HostSettings, RemoteTraceback, RoleFailed, RoleHost, Surroundings, portable
from limes.cluster.relay import Event, Outbox, RelayConsole, Replay
from limes.engine.protocol import EngineError
from limes.run import Console


class Role:
    def __init__(self, around: Surroundings) -> None:
        self.around = around
        self.diary: list[str] = []

    async def note(self, word: str) -> list[str]:
        self.diary.append(word)
        return list(self.diary)

    def fail(self, kind: type[Exception]) -> None:
        raise kind("as asked")

    def not_ours(self) -> None:
        int("three")

    def close(self) -> None:
        self.around.console.notice("closed")


def in_host(tmp_path: Path, body: Callable) -> None:
    """Run `body(host)` with a role that is built."""

    async def main() -> None:
        host = RoleHost("role", HostSettings(tmp_path, str(tmp_path), (), 1))
        assert await host.build(Role, (), {}) is None
        await body(host)
        assert [event.text for event in await host.close()] == ["closed"]

    asyncio.run(main())


def test_calls_start_in_the_order_of_their_numbers_whatever_comes_first(tmp_path: Path) -> None:
    async def body(host: RoleHost) -> None:
        order = [2, 0, 1]
        calls = [asyncio.create_task(host.call("me", number, False, "note", (), str(number))) for number in order]
        await asyncio.gather(*calls)
        assert await host.call("another", 0, False, "note", ["word"], "x") == (None, ["0", "1", "2", "x"])

    in_host(tmp_path, body)


def test_a_failed_argument_fails_the_call_and_not_the_next(tmp_path: Path) -> None:
    async def body(host: RoleHost) -> None:
        failure, value = await host.call("me", 0, False, "note", (), Failure(EngineError("upstream")))
        assert failure is value
        assert failure is not None
        assert str(failure.error) == "upstream"
        assert await host.call("me", 1, False, "note", (), "next") == (None, ["next"])

    in_host(tmp_path, body)


@pytest.mark.parametrize("kind", [EngineError, RuntimeError])
def test_errors_keep_their_type_and_bring_the_traceback(tmp_path: Path, kind: type[Exception]) -> None:
    async def body(host: RoleHost) -> None:
        failure, _ = await host.call("me", 0, False, "fail", (), kind)
        assert failure is not None
        error = pickle.loads(pickle.dumps(failure)).error
        assert type(error) is kind
        assert isinstance(failure.error.__cause__, RemoteTraceback)
        assert "in fail" in str(failure.error.__cause__)

    in_host(tmp_path, body)


def test_a_value_error_of_others_is_no_message_for_users(tmp_path: Path) -> None:
    async def body(host: RoleHost) -> None:
        failure, _ = await host.call("me", 0, False, "not_ours", ())
        assert failure is not None
        assert isinstance(failure.error, RoleFailed)
        assert "invalid literal" in str(failure.error)

    in_host(tmp_path, body)


def test_what_cannot_travel_is_told_in_words() -> None:
    class Local(Exception):
        pass

    error = portable(Local("secret"), "role", "work")
    assert isinstance(error, RoleFailed)
    assert "secret" in str(error)


def test_a_role_that_cannot_be_built_says_why(tmp_path: Path) -> None:
    def build(around: Surroundings) -> Role:
        raise FileNotFoundError("no model")

    async def main() -> None:
        host = RoleHost("role", HostSettings(tmp_path, str(tmp_path), (), 1))
        failure = await host.build(build, (), {})
        assert failure is not None
        assert isinstance(failure.error, FileNotFoundError)
        await host.close()

    asyncio.run(main())


def test_what_a_role_says_is_shown_on_the_drivers_console() -> None:
    outbox, err = Outbox(), io.StringIO()
    console = RelayConsole(outbox)
    replay = Replay(Console(out=io.StringIO(), err=err))
    with console.phase("load", 3, detail="it") as phase:
        console.notice("hello")
        for _ in range(3):
            phase.advance()
    console.warn("odd")
    replay.show(pickle.loads(pickle.dumps(outbox.take())))
    lines = err.getvalue().splitlines()
    assert lines[:2] == ["load it: started, 3 to do", "hello"]
    assert lines[2].startswith("load it: done, 3/3 in ")
    assert lines[3] == "warning: odd"
    assert outbox.take() == []


def test_of_progress_only_the_latest_is_kept() -> None:
    outbox = Outbox()
    with RelayConsole(outbox).phase("count", 1000) as phase:
        for _ in range(999):
            phase.advance()
        events = outbox.take()
    assert [(event.kind, event.done) for event in events] == [("begin", 0), ("changed", 999)]


def test_a_role_that_died_leaves_no_open_phase() -> None:
    err = io.StringIO()
    replay = Replay(Console(out=io.StringIO(), err=err))
    replay.show([Event("begin", "load", key=1)])
    replay.close()
    assert err.getvalue().splitlines()[1].startswith("load: stopped")


def test_a_listener_wakes_up_when_something_is_said() -> None:
    outbox = Outbox()

    async def main() -> list[Event]:
        listening = asyncio.create_task(outbox.fetch())
        await asyncio.sleep(0)
        await asyncio.to_thread(outbox.add, Event("notice", "now"))
        return await listening

    assert [event.text for event in asyncio.run(main())] == ["now"]
