"""A proxy with one OpenAI-compatible address for prefill and decode engines that share a tier of kvtier.

Each request goes to a prefill engine, for one token, and at the same time to a decode engine, with a hint to
wait for the chunks of its prompt. Chunks are transferred while the prefill runs. If the prefill fails, the
proxy repeats the request to the decode engine without the hint, and the engine computes the prompt itself.

    pip install aiohttp
    python examples/pd_proxy/proxy.py --prefill http://p0:8000 http://p1:8000 --decode http://d0:8000

An example to read and to experiment with. See docs/disaggregation.md for production routers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import aiohttp
from aiohttp import web

CHECK_EVERY_S = 2.0
CONNECT_S = 2.0
KEEP_ALIVE_S = 2.0  # vLLM's server closes idle connections after 5 s; a request on one that closes would fail
ATTEMPTS = 2  # Number of engines of a role that a single request can crash.
ENGINE_ERROR = 500  # From this status on the engine is at fault, below it the request.
STREAM_END = (aiohttp.ClientError, asyncio.TimeoutError)
NOT_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)

logger = logging.getLogger("pd_proxy")

Body = dict[str, Any]


class NoEngine(Exception):
    """No engine of a role has answered, or ``ATTEMPTS`` of them have failed on the request."""


class Pool:
    """The engines of one role, used in turn. A failed engine is skipped while another is healthy."""

    def __init__(self, role: str, urls: Sequence[str]) -> None:
        self.role = role
        self.up = dict.fromkeys((url.rstrip("/") for url in urls), True)
        self._turn = 0

    def in_turn(self) -> list[str]:
        """Return the engines to try, in order."""
        urls = [url for url, is_up in self.up.items() if is_up] or list(self.up)
        self._turn += 1
        start = self._turn % len(urls) if urls else 0
        return urls[start:] + urls[:start]

    def note(self, url: str, is_up: bool, why: object = "") -> None:
        """Record whether an engine answers."""
        if self.up[url] is not is_up:
            logger.warning("%s engine %s is %s%s", self.role, url, "up" if is_up else "down: ", why)
        self.up[url] = is_up


class Proxy:
    """Sends each request to a prefill and to a decode engine.

    Args:
        prefill: addresses of the engines that compute prompts; there may be none.
        decode: addresses of the engines that answer.
        wait_s: how long a decode engine waits for the chunks of a prompt before it computes it.
        health_s: how long an engine may take to answer a health check.
        peers: addresses of the prefill engines' NIXL tiers; decode engines ask these first.
    """

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        wait_s: float = 30.0,
        health_s: float = 5.0,
        peers: Sequence[str] = (),
    ) -> None:
        self.prefill = Pool("prefill", prefill)
        self.decode = Pool("decode", decode)
        self._hints = {"wait_s": wait_s, **({"from": list(peers)} if peers else {})}
        self._health_s = aiohttp.ClientTimeout(health_s)

    def app(self) -> web.Application:
        """Return the application.

        Serve it with ``handler_cancellation``, so that a client's disconnect aborts its request.
        """
        app = web.Application(client_max_size=64 * 2**20)
        app.cleanup_ctx.append(self._running)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        return app

    async def _running(self, _: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as self._session:
            checks = asyncio.create_task(self._check())
            yield
            checks.cancel()
            with suppress(asyncio.CancelledError):
                await checks

    async def _check(self) -> None:
        """Check continuously which engines answer."""
        while True:
            pools = (self.prefill, self.decode)
            await asyncio.gather(*(self._check_one(pool, url) for pool in pools for url in pool.up))
            await asyncio.sleep(CHECK_EVERY_S)

    async def _check_one(self, pool: Pool, url: str) -> None:
        try:
            async with self._session.get(f"{url}/health", timeout=self._health_s) as answer:
                pool.note(url, answer.status < ENGINE_ERROR, answer.status)
        except Exception as error:  # The checks continue after any error.
            pool.note(url, False, repr(error))

    # --- requests --------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = None
        with suppress(ValueError, LookupError, RecursionError):  # not JSON, no charset, or nested too deeply
            body = await request.json()
        if not isinstance(body, dict):
            return _error(400, "the body must be a JSON object")
        prefill = asyncio.create_task(self._prefill(request.path, body))
        answer = None
        try:
            answer, first = await self._begin(request.path, body, prefill)
            return await _forward(request, answer, first)
        except NoEngine as error:
            return _error(503, str(error))
        except RecursionError:  # A decoded body can be nested too deeply to encode.
            return _error(400, "the body is nested too deeply")
        finally:  # Also if the client disconnected, because engines abort answers that are not read.
            prefill.cancel()
            if answer is not None:
                answer.close()

    async def _begin(
        self, path: str, body: Body, prefill: asyncio.Task[str]
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """Return the answer of a decode engine once it has started, and its first bytes."""
        if not any(self.prefill.up.values()):
            return await self._post(self.decode, path, body)
        waiting = asyncio.create_task(self._post(self.decode, path, _with_hints(body, self._hints)))
        try:
            await asyncio.wait({waiting, prefill}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done() or not prefill.result():
                return await waiting
        finally:
            waiting.cancel()
        logger.warning("prefill failed (%s); the prompt is computed where it is decoded", prefill.result())
        return await self._post(self.decode, path, body)

    async def _prefill(self, path: str, body: Body) -> str:
        """Send a prompt to be computed; return the reason of a failure, or an empty string."""
        if not any(self.prefill.up.values()):
            return "no prefill engine is up"
        try:
            answer, _ = await self._post(self.prefill, path, _for_prefill(body), whole=True)
        except NoEngine as error:
            return str(error)
        return "" if answer.status == 200 else f"{answer.url.origin()} answers {answer.status}"

    async def _post(
        self, pool: Pool, path: str, body: Body, *, whole: bool = False
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """Return the answer of the first engine that answers, and its first bytes or all of it.

        Raises NoEngine.
        """
        attempts = 0
        for url in pool.in_turn():
            answer, is_good = None, False
            try:
                answer = await self._session.post(url + path, json=body)
                first = await answer.read() if whole else await answer.content.readany()
                if is_good := answer.status < ENGINE_ERROR:
                    return answer, first
                logger.warning("%s engine %s answers %d", pool.role, url, answer.status)
                attempts += 1
            except STREAM_END as error:
                pool.note(url, False, repr(error))
                attempts += not isinstance(error, NOT_SENT)
            finally:
                if answer is not None and not is_good:
                    answer.close()
            if attempts == ATTEMPTS:
                break
        raise NoEngine(f"no {pool.role} engine answers")

    async def _models(self, _: web.Request) -> web.Response:
        for url in self.decode.in_turn():
            with suppress(*STREAM_END, ValueError):
                async with self._session.get(f"{url}/v1/models", timeout=self._health_s) as answer:
                    return web.json_response(await answer.json(), status=answer.status)
        return _error(503, "no decode engine answers")

    async def _health(self, _: web.Request) -> web.Response:
        """Return which engines are up, with status 503 if no decode engine is."""
        pools = {pool.role: pool.up for pool in (self.prefill, self.decode)}
        return web.json_response(pools, status=200 if any(self.decode.up.values()) else 503)


def _for_prefill(body: Body) -> Body:
    """Return the request for the prefill engine: one token, not streamed."""
    left_out = ("stream_options", "min_tokens", "max_completion_tokens", "best_of")
    rest = {key: value for key, value in body.items() if key not in left_out}
    params = {**_object(body.get("kv_transfer_params")), "do_remote_decode": True}
    return {**rest, "max_tokens": 1, "n": 1, "stream": False, "kv_transfer_params": params}


def _with_hints(body: Body, hints: Body) -> Body:
    """Return the request for the decode engine, which waits for the chunks of its prompt."""
    params = _object(body.get("kv_transfer_params"))
    return {**body, "kv_transfer_params": {**params, "kvtier": {**_object(params.get("kvtier")), **hints}}}


def _object(value: object) -> Body:
    return value if isinstance(value, dict) else {}


async def _forward(request: web.Request, answer: aiohttp.ClientResponse, first: bytes) -> web.StreamResponse:
    """Pass an answer on as it arrives.

    If it breaks off, a stream ends with an error; other answers break off, too.
    """
    response = web.StreamResponse(status=answer.status)
    response.content_type = answer.content_type
    try:
        await response.prepare(request)
        await response.write(first)
        async for piece in answer.content.iter_any():
            await response.write(piece)
    except ConnectionResetError:
        logger.info("the client has left")
    except STREAM_END as error:
        logger.warning("decode engine %s broke off: %r", answer.url.origin(), error)
        if response.content_type == "text/event-stream":
            with suppress(ConnectionResetError):  # The answer may have broken off within a line.
                await response.write(b"\n\ndata: %s\n\n" % json.dumps(_message("engine broke off")).encode())
        elif request.transport is not None:
            request.transport.abort()
    return response


def _message(text: str) -> Body:
    return {"error": {"message": text, "type": "proxy_error"}}


def _error(status: int, text: str) -> web.Response:
    return web.json_response(_message(text), status=status)


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description="A proxy for prefill and decode engines.")
    parser.add_argument("--prefill", nargs="*", default=[], metavar="URL")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--wait-s", type=float, default=30.0, help="time for a prefill")
    parser.add_argument("--peers", nargs="*", default=[], help="where prefill engines' NIXL tiers listen")
    parser.add_argument("--health-s", type=float, default=5.0, help="time for an engine's /health")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    app = Proxy(given.prefill, given.decode, given.wait_s, given.health_s, given.peers).app()
    web.run_app(app, host=given.host, port=given.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
