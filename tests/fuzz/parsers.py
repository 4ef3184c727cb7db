"""Every parser of external bytes, each as a function of bytes that fails if the parser does.

Such a function returns if the parser rejected the bytes in the documented way, or accepted sound bytes. It
raises for anything else: another exception, damaged data accepted as sound, two implementations that
disagree. Random edits do not survive a checksum, so bytes after one are tried twice: unchanged, and with a
corrected checksum.
"""

from __future__ import annotations

import functools
import json
import math
import os
import tempfile
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import crc32c
from msgspec.msgpack import Decoder

from kvtier import HeapMemory, Identity
from kvtier._isolation import wire
from kvtier.errors import IdentityError
from kvtier.keys import pack_key
from kvtier.tiers import TierContext
from kvtier.tiers import _seal as seal
from kvtier.tiers._seal import Integrity, Sealed
from kvtier.tiers.fs import FsConfig
from kvtier.tiers.fs import _layout as layout
from kvtier.tiers.fs import _namespace as namespace
from kvtier.tiers.fs._checking import FileChecker
from kvtier.tiers.fs._files.chunk_files import require_library
from kvtier.tiers.fs._files.native_call import FileCall, Flag, Place, Result
from kvtier.tiers.fs._quota import ledger
from kvtier.tiers.fs._quota.accounts import FileSystem
from kvtier_tools.root.contents import RootView, read_ledger

CORPUS = Path(__file__).parent / "corpus"

IDENTITY = Identity.make("model", {"dtype": "float16", "groups": [{"block": 16}], "layers": 2})
DIGEST = IDENTITY.short_digest
KEY = pack_key(b"a" * 64, 1)  # the maximum length
CHUNK_BYTES = layout.BLOCK_BYTES
PAYLOAD = bytes(range(256)) * (CHUNK_BYTES // 256)
TRAILER = seal.seal(KEY, memoryview(PAYLOAD), DIGEST)

_MOST_CHARACTERS = 10_000  # of a message, regardless of the input
_DISK = FileSystem(total=1 << 40, used=1 << 20, free=(1 << 40) - (1 << 20))
_FOUND = {
    Result.OK: Integrity.SOUND,
    Result.TORN: Integrity.TORN,
    Result.FOREIGN: Integrity.FOREIGN,
    Result.CHECKSUM: Integrity.CHECKSUM,
}


def _with_checksum(trailer: bytes) -> bytes:
    """Correct a trailer's own checksum, whatever the trailer holds."""
    body = trailer.ljust(seal.TRAILER_BYTES, b"\0")[: seal.TRAILER_BYTES - 4]
    return body + crc32c.crc32c(body).to_bytes(4, "little")


def trailer(data: bytes) -> None:
    """The seal of a chunk proves only the sealed bytes."""
    expected = Sealed(KEY, DIGEST, len(PAYLOAD), crc32c.crc32c(PAYLOAD))
    for one in (data, _with_checksum(data)):
        sealed = seal.read(one)
        verdict = seal.check(one, KEY, memoryview(PAYLOAD), DIGEST)
        assert (verdict is Integrity.SOUND) == (sealed == expected), (verdict, sealed)
        assert (verdict is Integrity.TORN) == (sealed is None), (verdict, sealed)


def chunk_file(data: bytes) -> None:
    """Engines and tools read a chunk's file alike, and never accept other bytes as sound.

    The first byte: bit 0, whether the trailer's own checksum is corrected; bit 1, whether the file ends
    early. Then follow 128 bytes of trailer, and the first bytes of the payload.
    """
    how, given, over = (data[0] if data else 0), data[1 : 1 + seal.TRAILER_BYTES], data[129:][:CHUNK_BYTES]
    block = (_with_checksum(given) if how & 1 else given).ljust(layout.BLOCK_BYTES, b"\0")
    text = over + PAYLOAD[len(over) :] + block
    if how & 2:
        text = text[: len(data) * 37 % len(text)]
    path = _scratch() / layout.chunk_path("data", KEY)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    with _opened(_scratch()) as root_fd:
        result = _get(root_fd)
        finding = FileChecker(root_fd, DIGEST.hex()).check(layout.chunk_path("data", KEY), KEY).finding
    assert result in _FOUND
    if len(text) == CHUNK_BYTES + layout.BLOCK_BYTES:
        assert finding is _FOUND[Result(result)], (finding, result)


def _get(root_fd: int) -> int:
    memory = HeapMemory(1, CHUNK_BYTES)
    place = Place(root_fd, "data", "tmp", DIGEST, CHUNK_BYTES, Flag.NONE)
    call = FileCall(place, [KEY], array("q", [0]), memory)
    require_library().kvt_files_get(call.address, 0, 1)
    (result,) = call.results
    assert result != Result.OK or bytes(memory.view(0)) == PAYLOAD, "damaged bytes are taken as sound"
    return result


def manifest(data: bytes) -> None:
    """The manifest of another cache is refused in a short readable message."""
    text = data.decode(errors="replace")
    try:
        IDENTITY.require(text, "here")
    except IdentityError as error:
        message = str(error)
        assert len(message) <= _MOST_CHARACTERS
        assert message.isprintable()
    else:
        assert json.dumps(json.loads(text), sort_keys=True) == json.dumps(IDENTITY.fields, sort_keys=True)
    with _home() as home:
        (home / layout.MANIFEST).write_bytes(data)
        (home / "epoch").write_bytes(b"0\n")
        with RootView(home.parent) as root:
            found = root.namespace(home.name)
            assert found.manifest.digest in (None, IDENTITY.digest)
            assert isinstance(found.problem, str)


def epoch(data: bytes) -> None:
    """An unreadable epoch is replaced by one above all traces; tools and engines agree."""
    with _home() as home:
        (home / "epoch").write_bytes(data)
        (home / layout.MANIFEST).write_text(IDENTITY.manifest)
        (home / "users.e7.lock").touch()
        with RootView(home.parent) as root:
            shown = root.namespace(home.name).epoch
        opened, joined = namespace.OpenNamespace.open(
            FsConfig(type="fs", root_dir=home.parent), TierContext("fs", IDENTITY, CHUNK_BYTES)
        )
        joined.retire()
        opened.close()
        assert joined.number == (shown if shown is not None and shown >= 7 else 8), (joined.number, shown)


def quota_ledger(data: bytes) -> None:
    """An unreadable ledger is replaced; a readable ledger's numbers can be added up."""
    body = data.partition(b"\n")[0].partition(b" ")[2]
    for text in (data, b"%08x %s\n" % (crc32c.crc32c(body), body)):
        with _home() as home, _opened(home) as root_fd:
            (home / ledger.FOLDER).mkdir()
            (home / ledger.FOLDER / "ledger").write_bytes(text)
            read_ledger(root_fd)
            shared = ledger.SharedLedger(root_fd, lambda: _DISK)
            with shared.change() as accounts:
                assert min(accounts.used, accounts.unconfirmed, accounts.leased) >= 0, accounts
                assert accounts.used + accounts.leased < 2**64, accounts
                assert math.isfinite(accounts.counted_at)
            shared.close()


def frames(data: bytes) -> None:
    """A stream is cut into the same frames however it arrives, and an oversized frame is refused."""
    assert _frames([data]) == _frames([data[at : at + 1] for at in range(len(data))])


def _frames(pieces: list[bytes]) -> tuple[list[bytes], bool]:
    cutter, found = wire.Frames(), list[bytes]()
    try:
        for piece in pieces:
            found += cutter.feed(piece)
    except wire.WireError:
        return found, True
    return found, False


def _messages(decoder: Decoder[Any], data: bytes) -> None:
    """A frame is refused, or it is parsed and survives a round trip."""
    try:
        found = wire.unpack(decoder, data)
    except wire.WireError:
        return
    again = wire.pack(found)[wire.LENGTH_BYTES :]
    assert wire.pack(wire.unpack(decoder, again))[wire.LENGTH_BYTES :] == again


PARSERS: Mapping[str, Callable[[bytes], None]] = {
    "trailer": trailer,
    "chunk_file": chunk_file,
    "manifest": manifest,
    "epoch": epoch,
    "ledger": quota_ledger,
    "frames": frames,
    "orders": functools.partial(_messages, wire.ORDERS),
    "reports": functools.partial(_messages, wire.REPORTS),
    "hello": functools.partial(_messages, wire.HELLO),
}
"""By the name of their folder in the corpus."""


# ------------------------------------------------------------------------------------- places


@functools.cache
def _scratch_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kvtier-fuzz-", ignore_cleanup_errors=True)


def _scratch() -> Path:
    return Path(_scratch_folder().name)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _home() -> Iterator[Path]:
    """Yield a cache's directory below a root."""
    with tempfile.TemporaryDirectory(dir=_scratch()) as root:
        home = Path(root) / IDENTITY.namespace
        home.mkdir()
        yield home
