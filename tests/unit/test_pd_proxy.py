"""The example proxy for prefill and decode engines, in front of the test's own engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.common import load_file

aiohttp = pytest.importorskip("aiohttp")
from aiohttp import web  # noqa: E402

PATIENCE_S = 60.0
BODY = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 5, "stream": True}


proxy = load_file("pd_proxy_example", Path(__file__).parents[2] / "examples" / "pd_proxy" / "proxy.py")
proxy.CONNECT_S = proxy.HEALTH_S = PATIENCE_S  # an engine that is slow on a busy machine counts as up


class Engine:
    """An engine that answers in three pieces, each on command.

    Attributes:
        asked: bodies of the received requests.
        arrived: set when a request arrives.
        aborted: set when a client leaves early.
        goes_on: while clear, the next piece of every answer is held back; so is an error.
        breaks_off: when set, an answer and its connection end after the first piece; None for never.
        crashes: whether connections end without an answer.
    """

    def __init__(self, status: int = 200, content_type: str = "text/event-stream") -> None:
        self.status = status
        self.content_type = content_type
        self.asked: list[dict[str, Any]] = []
        self.arrived = asyncio.Event()
        self.aborted = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.breaks_off: asyncio.Event | None = None
        self.crashes = False
        self.is_healthy = True
        self.is_hanging = False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        try:
            self.asked.append(await request.json())
            self.arrived.set()
            return await self._answer(request)
        except asyncio.CancelledError:
            self.aborted.set()
            raise

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.crashes:
            raise self._end(request)
        if self.status != 200:
            await self.goes_on.wait()
            return web.json_response({"error": "no"}, status=self.status)
        response = web.StreamResponse(headers={"Content-Type": self.content_type})
        await response.prepare(request)
        for piece in (b"data: one\n\n", b"data: two\n\n", b"data: [DONE]\n\n"):
            await self.goes_on.wait()
            await response.write(piece)
            if self.breaks_off is not None:
                await self.breaks_off.wait()
                raise self._end(request)
        return response

    def _end(self, request: web.Request) -> BaseException:
        assert request.transport is not None
        request.transport.close()
        return asyncio.CancelledError()

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.is_healthy else 503)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/completions", self.answer)
        app.router.add_post("/v1/chat/completions", self.answer)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        return app

    async def models(self, request: web.Request) -> web.Response:
        if self.is_hanging:
            await asyncio.Event().wait()
        return web.json_response({"data": ["m"]})


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    finally:
        await runner.cleanup()


class World:
    """A proxy in front of two prefill and two decode engines, and a client."""

    def __init__(self, url: str, session: Any, prefill: list[Engine], decode: list[Engine]) -> None:
        self.url = url
        self.session = session
        self.prefill = prefill
        self.decode = decode

    def post(self, body: Any = BODY, path: str = "/v1/completions") -> Any:
        return self.session.post(self.url + path, json=body)

    async def text(self, body: Any = BODY) -> tuple[int, str]:
        async with self.post(body) as answer:
            return answer.status, await answer.text()

    async def until_down(self, role: str) -> tuple[int, dict[str, list[bool]]]:
        """Wait until the proxy knows that an engine of a role is down; return the health of all."""
        while True:
            async with self.session.get(self.url + "/health") as answer:
                up = {pool: list(engines.values()) for pool, engines in (await answer.json()).items()}
            if not all(up[role]):
                return answer.status, up
            await asyncio.sleep(0.01)


DEAD = "http://127.0.0.1:9"  # the discard port: no server listens there


@asynccontextmanager
async def world(prefill: list[Engine], decode: list[Engine], dead_prefill: int = 0) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        urls = [
            [await stack.enter_async_context(served(it.app())) for it in some] for some in (prefill, decode)
        ]
        app = proxy.Proxy([DEAD] * bool(dead_prefill) + urls[0], urls[1], 20.0, peers=["p0:1"]).app()
        url = await stack.enter_async_context(served(app))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        async with asyncio.timeout(PATIENCE_S):
            yield World(url, session, prefill, decode)


def ready(count: int = 1, **how: Any) -> list[Engine]:
    engines = [Engine(**how) for _ in range(count)]
    for engine in engines:
        engine.goes_on.set()
    return engines


ALL = "data: one\n\ndata: two\n\ndata: [DONE]\n\n"


@pytest.mark.anyio
async def test_both_engines_are_asked() -> None:
    (prefill,), (decode,) = [Engine()], [Engine()]
    async with world([prefill], [decode]) as it, asyncio.TaskGroup() as tasks:
        answering = tasks.create_task(it.text({**BODY, "min_tokens": 3, "kv_transfer_params": {"x": 1}}))
        await prefill.arrived.wait()
        await decode.arrived.wait()  # the prefill has not ended
        prefill.goes_on.set()
        decode.goes_on.set()
        assert await answering == (200, ALL)
    (asked,) = prefill.asked
    assert (asked["max_tokens"], asked["stream"], "min_tokens" in asked) == (1, False, False)
    assert asked["kv_transfer_params"] == {"x": 1, "do_remote_decode": True}
    (asked,) = decode.asked
    assert asked["kv_transfer_params"] == {"x": 1, "kvtier": {"wait_s": 20.0, "from": ["p0:1"]}}
    assert (asked["max_tokens"], asked["stream"]) == (5, True)


@pytest.mark.anyio
async def test_engines_take_turns() -> None:
    prefill, decode = ready(2), [Engine(), Engine()]
    prefill[1].arrived = prefill[0].arrived
    async with world(prefill, decode) as it:
        for _ in range(4):
            async with asyncio.TaskGroup() as tasks:
                answering = tasks.create_task(it.text())
                await prefill[0].arrived.wait()
                prefill[0].arrived.clear()
                for engine in decode:
                    engine.goes_on.set()
                assert await answering == (200, ALL)
            for engine in decode:
                engine.goes_on.clear()
        assert [len(engine.asked) for engine in prefill + decode] == [2, 2, 2, 2]


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["dead", "failing"])
async def test_other_prefill_engine_is_asked(how: str) -> None:
    prefill = [Engine()] if how == "dead" else [*ready(status=500), Engine()]
    async with world(prefill, [Engine()], dead_prefill=how == "dead") as it:
        for _ in range(2):  # either may be first
            async with asyncio.TaskGroup() as tasks:
                answering = tasks.create_task(it.text())
                await prefill[-1].arrived.wait()
                prefill[-1].arrived.clear()
                it.decode[0].goes_on.set()
                assert await answering == (200, ALL)
                it.decode[0].goes_on.clear()
        assert ["kvtier" in asked["kv_transfer_params"] for asked in it.decode[0].asked] == [True] * 2


@pytest.mark.anyio
@pytest.mark.parametrize("status", [400, 401, 404, 429, 500])
async def test_decode_computes_failed_prefill(status: int) -> None:
    """A request whose prefill fails stops waiting."""
    prefill, decode = Engine(status), Engine()
    async with world([prefill], [decode]) as it, asyncio.TaskGroup() as tasks:
        answering = tasks.create_task(it.text())
        await decode.arrived.wait()
        prefill.goes_on.set()
        await decode.aborted.wait()
        decode.goes_on.set()
        assert await answering == (200, ALL)
        assert ["kv_transfer_params" in asked for asked in decode.asked] == [True, False]


@pytest.mark.anyio
async def test_plain_proxy_without_prefill() -> None:
    async with world([], ready()) as it:
        assert await it.text() == (200, ALL)
        assert it.decode[0].asked == [BODY]


@pytest.mark.anyio
async def test_leaving_client_aborts_both() -> None:
    async with world([Engine()], [Engine()]) as it:
        leaving = asyncio.create_task(it.text())
        await it.prefill[0].arrived.wait()
        await it.decode[0].arrived.wait()
        leaving.cancel()
        with suppress(asyncio.CancelledError):
            await leaving
        await it.prefill[0].aborted.wait()
        await it.decode[0].aborted.wait()


@pytest.mark.anyio
async def test_broken_stream_ends_with_error() -> None:
    (decode,) = ready()
    decode.breaks_off = asyncio.Event()
    async with world(ready(), [decode]) as it, it.post() as answer:
        assert answer.status == 200
        assert await answer.content.readexactly(11) == b"data: one\n\n"
        decode.breaks_off.set()
        before, _, error = (await answer.text()).partition("data: ")
    assert before == "\n\n", "within a line that broke off it would be no event"
    assert json.loads(error)["error"]["message"] == "engine broke off"


@pytest.mark.anyio
async def test_broken_answer_breaks_off() -> None:
    """A client does not mistake it for a complete answer, or an error for part of one."""
    (decode,) = ready(content_type="application/json")
    decode.breaks_off = asyncio.Event()
    async with world(ready(), [decode]) as it, it.post() as answer:
        assert await answer.content.readexactly(11) == b"data: one\n\n"
        decode.breaks_off.set()
        with pytest.raises(aiohttp.ClientError):
            await answer.read()


@pytest.mark.anyio
async def test_crashing_request_stops_at_two() -> None:
    decode = ready(4)
    for engine in decode:
        engine.crashes = True
    async with world([], decode) as it:
        assert (await it.text())[0] == 503
        assert sum(len(engine.asked) for engine in decode) == 2


@pytest.mark.anyio
async def test_decode_is_asked_even_if_down() -> None:
    (decode,) = ready()
    decode.is_healthy = False
    async with world(ready(), [decode]) as it:
        await it.until_down("decode")
        assert await it.text() == (200, ALL)


@pytest.mark.anyio
async def test_refusals_are_passed_on() -> None:
    async with world(ready(status=400), ready(status=400)) as it:
        assert (await it.text())[0] == 400


@pytest.mark.anyio
async def test_no_decode_engine_is_told() -> None:
    async with world(ready(), ready(status=500)) as it:
        status, text = await it.text()
        assert (status, json.loads(text)["error"]["message"]) == (503, "no decode engine answers")


@pytest.mark.anyio
async def test_non_object_is_refused() -> None:
    async with world(ready(), ready()) as it:
        assert (await it.text([1]))[0] == 400
        for body, kind in (("[" * 100_000, "json"), ("{}", "json; charset=unheard-of")):
            headers = {"Content-Type": f"application/{kind}"}
            async with it.session.post(it.url + "/v1/completions", data=body, headers=headers) as answer:
                assert answer.status == 400
        odd = {**BODY, "kv_transfer_params": {"kvtier": 7}}
        assert await it.text(odd) == (200, ALL)


@pytest.mark.anyio
async def test_deep_body_is_handled() -> None:
    """A body one level below the decoder's limit may exceed the encoder's."""
    statuses = []
    async with world(ready(), ready()) as it:
        for depth in (1, *range(900, 1000)):  # the limit depends on the current depth of the stack
            body = '{"x": ' + "[" * depth + "]" * depth + "}"
            async with it.session.post(it.url + "/v1/completions", data=body) as answer:
                statuses.append(answer.status)
    assert statuses[0] == 200
    assert set(statuses) <= {200, 400}


@pytest.mark.anyio
async def test_health_and_models() -> None:
    async with world(ready(), ready(), dead_prefill=1) as it:
        async with it.session.get(it.url + "/v1/models") as answer:
            assert await answer.json() == {"data": ["m"]}
        assert await it.until_down("prefill") == (200, {"prefill": [False, True], "decode": [True]})
    (decode,) = ready()
    decode.is_healthy = False
    async with world(ready(), [decode]) as it:
        assert await it.until_down("decode") == (503, {"prefill": [True], "decode": [False]})


@pytest.mark.anyio
async def test_hung_engine_hides_no_models() -> None:
    hanging, other = ready(2)
    hanging.is_hanging = True
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(served(it.app())) for it in (hanging, other)]
        url = await stack.enter_async_context(served(proxy.Proxy([], urls, health_s=2.0).app()))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        async with asyncio.timeout(PATIENCE_S):
            for _ in urls:  # each one is tried first once
                async with session.get(url + "/v1/models") as answer:
                    assert await answer.json() == {"data": ["m"]}


@pytest.mark.anyio
async def test_health_checks_survive_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "CHECK_EVERY_S", 0.01)
    asked = 0
    goes_on = asyncio.Event()
    get = aiohttp.ClientSession.get

    def fails_first(*arguments: Any, **options: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise RuntimeError("unexpected")
        goes_on.set()
        return get(*arguments, **options)

    (decode,) = ready()
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(served(decode.app()))
        monkeypatch.setattr(aiohttp.ClientSession, "get", fails_first)
        await stack.enter_async_context(served(proxy.Proxy([], [engine]).app()))
        async with asyncio.timeout(PATIENCE_S):
            await goes_on.wait()
