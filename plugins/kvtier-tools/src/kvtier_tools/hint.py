"""``kvtier hint``: has an engine keep, promote or give up chunks, through its OpenAI-compatible server."""

from __future__ import annotations

import json
import os
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from typing import Annotated, Any, Final, Literal
from urllib.error import HTTPError, URLError

import typer

from kvtier._cli import JsonFlag
from kvtier.errors import KVTierError
from kvtier_tools.durations import duration
from kvtier_tools.report import finish, print_line

_TIMEOUT_S: Final = 600.0
_MOST_BYTES: Final = 2**24
_MOST_SHOWN: Final = 500  # bytes of an error's text
_ID: Final = "kvtier hint"


@dataclass(frozen=True, slots=True)
class Told:
    """The outcome of an action."""

    action: str
    outcome: str  # empty if the server did not tell
    reason: str


def command(
    url: Annotated[str, typer.Argument(metavar="URL", help="A server such as http://localhost:8000.")],
    action: Annotated[Literal["prefetch", "pin", "retain", "demote", "release", "fetch"], typer.Argument()],
    prompt: Annotated[typer.FileText | None, typer.Option(help="File with a prompt; `-` is stdin.")] = None,
    session: Annotated[str | None, typer.Option(help="Name of a session.")] = None,
    blocks: Annotated[
        typer.FileText | None, typer.Option(help="File with block hashes, a JSON list of integers.")
    ] = None,
    source: Annotated[str | None, typer.Option(help="`host:port` of a NIXL peer (`fetch`).")] = None,
    ttl: Annotated[float | None, typer.Option(parser=duration, help="Such as `5m`.")] = None,
    tier: Annotated[str | None, typer.Option(help="Name of the tier to promote from (`prefetch`).")] = None,
    priority: Annotated[int | None, typer.Option(help="0 to 3 (`retain`).")] = None,
    model: Annotated[str | None, typer.Option(help="Default: the server's first one.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Send an action on the KV cache of a prompt, a session or blocks, and print its outcome.

    It generates one token. OPENAI_API_KEY is sent if it is set. Exit status 1 if nothing was done.

    Example: kvtier hint http://localhost:8000 pin --prompt system.txt --session system --ttl 12h
    """
    if not url.startswith(("http://", "https://")):
        raise typer.BadParameter(f"{url}: not an http:// or https:// address")
    if prompt is None and session is None and blocks is None:
        raise typer.BadParameter("nothing to act on: give --prompt, --session or --blocks")
    payload = {"session": session, "source_control_endpoint": source, "ttl_s": ttl, "tier": tier}
    try:
        payload |= {"priority": priority, "block_hashes": None if blocks is None else json.load(blocks)}
    except ValueError as error:
        raise typer.BadParameter(f"it is no JSON list ({error})", param_hint="--blocks") from error
    sent = {
        "action_id": _ID,
        "action_type": f"kv.{action}",
        "action_version": "1.0" if action == "fetch" else "0.1",
        "payload": {key: value for key, value in payload.items() if value is not None},
    }
    envelope = {"protocol_version": "0.1", "message_id": _ID, "actions": [sent]}
    try:
        told = _send(url.rstrip("/"), model, "." if prompt is None else prompt.read(), envelope)
    except (ValueError, LookupError, TypeError, AttributeError, HTTPException) as error:
        raise typer.BadParameter(f"{url}: not the answer of an OpenAI-compatible server ({error})") from error
    except OSError as error:
        said = f": {error.read(_MOST_SHOWN)!r}" if isinstance(error, HTTPError) else ""
        raise KVTierError(f"{url}: {error.reason if type(error) is URLError else error}{said}") from error
    outcome = Told(action, str(told.get("outcome", "")), str(told.get("reason", "")))
    finish(outcome, _show, as_json=as_json, is_healthy=outcome.outcome in ("accepted", "clipped", "deferred"))


def _send(url: str, model: str | None, prompt: str, envelope: dict[str, Any]) -> dict[str, Any]:
    """Return the outcome in the response to a request; empty if it has none."""
    body = {
        "model": model or _call(f"{url}/v1/models")["data"][0]["id"],
        "prompt": prompt,
        "max_tokens": 1,
        "kv_transfer_params": {"kvtier": {"hints": envelope}},
    }
    ours = (_call(f"{url}/v1/completions", body).get("kv_transfer_params") or {}).get("kvtier") or {}
    return next((one for one in ours.get("outcomes", ()) if one["action_id"] == _ID), {})


def _call(url: str, body: dict[str, Any] | None = None) -> Any:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        return json.loads(response.read(_MOST_BYTES))


def _show(told: Told) -> None:
    silent = "the server told no outcome: it needs kvtier's KVTierConnector"
    print_line(f"{told.action}: {told.outcome} ({told.reason})" if told.outcome else silent)
