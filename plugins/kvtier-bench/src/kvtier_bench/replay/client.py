"""Streamed completions of an OpenAI-compatible server."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import aiohttp
import msgspec

from kvtier.errors import KVTierError
from kvtier_bench.engine.compared import make_prompt

_ANSWER_S: Final = 600.0
_CONNECT_S: Final = 30.0
_FAILURES: Final = (aiohttp.ClientError, TimeoutError, ValueError, msgspec.MsgspecError)
_WARM_UPS: Final = 2
_WARM_UP_TOKENS: Final = 64
# Each attempt omits more of the fields that a server may not know.
_DIALECTS: Final[Sequence[tuple[str, Mapping[str, Any]]]] = (
    ("token ids", {"ignore_eos": True, "stream_options": {"include_usage": True}}),
    ("text", {"ignore_eos": True, "stream_options": {"include_usage": True}}),
    ("text", {}),
)


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: Annotated[list[_Model], msgspec.Meta(min_length=1)]


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Piece(msgspec.Struct):
    choices: list[Any] = []
    usage: _Usage | None = None
    error: Any = None


@dataclass
class RequestOutcome:
    """The outcome of one request.

    Attributes:
        late_s: seconds between the due time and the sending of the request.
        ttft_s: seconds from the sending to the first piece of the answer.
        gaps_s: seconds between pieces.
        tokens: number of tokens in the answer.
        first_at: monotonic time of the first piece.
        error: reason of a failure.
    """

    late_s: float
    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    tokens: int = 0
    first_at: float = 0.0
    error: str | None = None


class Client:
    """Sends completions to one server. Made by ``connect``.

    Attributes:
        url: address of the server.
        prompts: form of the prompts: token ids, or text with one word per token.
        longest: maximum number of tokens in a request, if the server reports it.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._fields: Mapping[str, Any] = {}
        self._model = ""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.prompts = ""
        self.longest: int | None = None

    async def connect(self) -> None:
        """Find the model and the form of prompts that the server accepts. These requests also warm it up.

        Raises:
            KVTierError: the server does not answer or does not accept completions.
        """
        try:
            async with self._session.get(f"{self.url}/v1/models") as response:
                response.raise_for_status()
                model = msgspec.json.decode(await response.read(), type=_Models).data[0]
        except _FAILURES as error:
            raise KVTierError(
                f"{self.url}/v1/models does not name a model: {error!r}; give the URL of an OpenAI-compatible"
                " server, and its key in OPENAI_API_KEY if it needs one"
            ) from error
        self._model, self.longest = model.id, model.max_model_len
        failure: str | None = None
        for self.prompts, self._fields in _DIALECTS:
            for number in range(_WARM_UPS):
                failure = (await self.complete(make_prompt(f"warm up {number}", _WARM_UP_TOKENS), 2)).error
            if failure is None:
                return
        raise KVTierError(f"{self.url} does not answer a completion: {failure}")

    async def metrics(self) -> str | None:
        """Return the server's metrics page, if there is one."""
        try:
            async with self._session.get(f"{self.url}/metrics") as response:
                return await response.text() if response.status == 200 else None
        except _FAILURES:
            return None

    async def complete(self, prompt: Sequence[int], tokens: int, due: float | None = None) -> RequestOutcome:
        """Send one request and return its complete answer. An error is recorded in the answer.

        Args:
            due: monotonic time when the request is due.
        """
        sent = time.monotonic()
        answer = RequestOutcome(0.0 if due is None else sent - due)
        words = list(prompt) if self.prompts == "token ids" else " ".join(map(str, prompt))
        order = {"model": self._model, "prompt": words, "max_tokens": tokens, "temperature": 0.0}
        body = msgspec.json.encode({**order, "stream": True, **self._fields})
        try:
            async with self._session.post(f"{self.url}/v1/completions", data=body) as response:
                if response.status != 200:
                    answer.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                else:
                    await _read(response, answer, sent)
        except _FAILURES as error:
            answer.error = type(error).__name__
        return answer


async def _read(response: aiohttp.ClientResponse, answer: RequestOutcome, sent: float) -> None:
    """Read a stream of pieces and record them in an answer."""
    last = sent
    usage: _Usage | None = None
    async for line in response.content:
        if not line.startswith(b"data:") or (data := line[5:].strip()) == b"[DONE]":
            continue
        piece = msgspec.json.decode(data, type=_Piece)
        if piece.error is not None:
            answer.error = f"in the stream: {str(piece.error)[:200]}"
            return
        usage = piece.usage or usage
        if piece.choices:
            now = time.monotonic()
            if answer.tokens:
                answer.gaps_s.append(now - last)
            else:
                answer.ttft_s, answer.first_at = now - sent, now
            answer.tokens += 1
            last = now
    if not answer.tokens:
        answer.error = "no token"
    elif usage is not None:
        answer.tokens = usage.completion_tokens


def session() -> aiohttp.ClientSession:
    """Return an HTTP session without a limit on its connections."""
    key = os.environ.get("OPENAI_API_KEY")
    return aiohttp.ClientSession(
        headers={"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {}),
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=_ANSWER_S, sock_connect=_CONNECT_S),
    )
