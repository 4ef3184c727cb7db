"""A namespace in one archive: a tar stream of proven chunks, which proves itself again when it is read.

::

    kvtier.json                     what the archive is, and the identity, spelled out
    chunks/<hash_hex>_g<group>      a chunk's bytes, then its trailer
    ...
    end.json                        how many chunks came before: an archive without it is a part of one

Nothing in an archive is a path: a chunk's place follows from its key. What is no regular file, has
another name or another length, is refused.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, cast

from kvtier.errors import TierError
from kvtier.identity import Identity, Value
from kvtier.keys import OffloadKey, content_hash, group_index, pack_key
from kvtier.tiers import seal
from kvtier.tiers.fs.layout import BLOCK_BYTES
from kvtier.tiers.seal import TRAILER_BYTES

FORMAT: Final = 1
_HEAD: Final = "kvtier.json"
_END: Final = "end.json"
_CHUNK: Final = re.compile(r"chunks/((?:[0-9a-f]{2}){1,64})_g(0|[1-9][0-9]{0,9})")
_MOST_HEAD_BYTES: Final = 4 << 20
_PIECE_BYTES: Final = 1 << 20
MOST_CHUNK_BYTES: Final = 1 << 30
"""A chunk beyond this is refused: no primary tier has slots of this length."""


class ArchiveError(TierError):
    """An archive cannot be read, or is none of kvtier's. The message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Head:
    """What an archive says of itself.

    Attributes:
        namespace: the name that the cache's directory has.
        identity: whose chunks they are.
        chunk_bytes: length of every chunk.
    """

    namespace: str
    identity: Identity
    chunk_bytes: int


class _Guarded(tarfile.TarInfo):
    """Refuses headers that would be read into memory whole and are too long for it."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Guarded:
        info = super().frombuf(buf, encoding, errors)
        if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) and info.size > _MOST_HEAD_BYTES:
            raise ArchiveError("the archive holds a header that is too long: it is refused")
        return info


class Writer:
    """Writes an archive to a stream, one chunk after the other.

    Args:
        stream: where it goes; it stays the caller's. It need not be seekable.
        head: what the archive is.
        packed: compress it with zstd, where this Python can.
    """

    def __init__(self, stream: IO[bytes], head: Head, packed: bool = False) -> None:
        self._tar = _opened(stream, "w", packed)
        self.chunks = 0
        self._add(_HEAD, _head_text(head))

    def add(self, key: OffloadKey, payload: bytes | memoryview, trailer: bytes) -> None:
        """Append a proven chunk."""
        name = f"chunks/{content_hash(key).hex()}_g{group_index(key)}"
        self._add(name, b"".join((payload, trailer)))
        self.chunks += 1

    def close(self) -> None:
        """Write the end: the archive is whole."""
        self._add(_END, json.dumps({"chunks": self.chunks}).encode() + b"\n")
        self._tar.close()

    def _add(self, name: str, content: bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        info.mode = 0o600
        self._tar.addfile(info, io.BytesIO(content))
        cast(Any, self._tar).members.clear()  # it would keep one for each chunk


class Reader:
    """Reads an archive from a stream.

    Args:
        stream: where it comes from; it stays the caller's. It need not be seekable.
        packed: it is compressed with zstd.

    Attributes:
        head: what the archive is.
        ill: chunks that were left out because their bytes are not those that were sealed.
        is_whole: whether the end was there and has told of as many chunks as came.

    Raises:
        ArchiveError: it is no archive of kvtier's.
    """

    def __init__(self, stream: IO[bytes], packed: bool = False) -> None:
        self.ill = 0
        self.is_whole = False
        self._seen = 0
        try:
            self._tar = _opened(stream, "r", packed)
            first = self._tar.next()
            self.head = _understood(self._content(first, _MOST_HEAD_BYTES)) if _is(first, _HEAD) else None
        except (tarfile.TarError, OSError, EOFError) as error:
            raise ArchiveError(f"the archive cannot be read: {error}") from error
        if self.head is None:
            raise ArchiveError(f"this is no archive of kvtier's: it does not begin with {_HEAD}")

    def chunks(self) -> Iterator[tuple[OffloadKey, memoryview]]:
        """Yield the proven chunks: key and bytes. It ends where the archive does, or breaks off.

        Raises:
            ArchiveError: there is something in it that kvtier has not put there.
        """
        with closing(self._tar):
            while (found := self._next()) is not None:
                if _is(found, _END):
                    self.is_whole = self._says(found) == self._seen
                    return
                content = self._chunk(found)
                if content is None:
                    return
                self._seen += 1
                if (chunk := self._proven(found, content)) is not None:
                    yield chunk

    def _next(self) -> tarfile.TarInfo | None:
        try:
            found = self._tar.next()
        except (tarfile.TarError, OSError, EOFError):
            return None  # it breaks off: what came before is whole
        cast(Any, self._tar).members.clear()
        return found

    def _chunk(self, found: tarfile.TarInfo) -> bytes | None:
        """Return a chunk with its trailer; None where the archive breaks off in it."""
        assert self.head is not None
        if not found.isreg() or found.issparse() or _CHUNK.fullmatch(found.name) is None:
            raise ArchiveError(f"the archive holds {found.name[:200]!r}, which is no chunk: it is refused")
        if found.size != self.head.chunk_bytes + TRAILER_BYTES:
            raise ArchiveError(
                f"the archive holds a chunk of {found.size - TRAILER_BYTES} bytes, not "
                f"{self.head.chunk_bytes}: it is refused"
            )
        try:
            content = self._content(found, found.size)
        except (tarfile.TarError, OSError, EOFError):
            return None
        return content if len(content) == found.size else None

    def _proven(self, found: tarfile.TarInfo, content: bytes) -> tuple[OffloadKey, memoryview] | None:
        assert self.head is not None
        named = _CHUNK.fullmatch(found.name)
        assert named is not None
        if int(named[2]) >= 2**32:
            raise ArchiveError(f"the archive holds {found.name[:200]!r}, which is no chunk: it is refused")
        key = pack_key(bytes.fromhex(named[1]), int(named[2]))
        payload = memoryview(content)[: self.head.chunk_bytes]
        trailer = content[self.head.chunk_bytes :]
        if seal.check(trailer, key, payload, self.head.identity.short_digest) == seal.Verdict.GOOD:
            return key, payload
        self.ill += 1
        return None

    def _says(self, found: tarfile.TarInfo) -> int | None:
        try:
            count = json.loads(self._content(found, _MOST_HEAD_BYTES))["chunks"]
        except (ValueError, KeyError, TypeError, tarfile.TarError, OSError, EOFError):
            return None
        return count if isinstance(count, int) else None

    def _content(self, found: tarfile.TarInfo | None, most_bytes: int) -> bytes:
        if found is None or not found.isreg() or found.size > most_bytes:
            raise ArchiveError("this is no archive of kvtier's")
        file = self._tar.extractfile(found)
        assert file is not None
        with file:
            return file.read()


def can_pack() -> bool:
    """Say whether this Python's standard library has zstd (3.14 and later)."""
    return "zst" in tarfile.TarFile.OPEN_METH


def is_packed(path: Path) -> bool:
    """Say whether a name asks for zstd.

    Raises:
        ArchiveError: it does, and this Python has none.
    """
    if path.suffix not in (".zst", ".zstd"):
        return False
    if not can_pack():
        raise ArchiveError(
            f"{path.name}: this Python has no zstd (3.14 has); name it .tar, or pipe through zstd: - is "
            "standard output or input"
        )
    return True


def _opened(stream: IO[bytes], mode: str, packed: bool) -> tarfile.TarFile:
    open_tar = cast(Any, tarfile.open)  # whose types do not know that it takes a TarFile's arguments
    made: tarfile.TarFile = open_tar(
        fileobj=stream,
        mode=f"{mode}|{'zst' if packed else ''}",
        bufsize=_PIECE_BYTES,
        copybufsize=_PIECE_BYTES,
        format=tarfile.PAX_FORMAT,
        tarinfo=_Guarded,
    )
    return made


def _is(found: tarfile.TarInfo | None, name: str) -> bool:
    return found is not None and found.name == name and found.isreg()


def _head_text(head: Head) -> bytes:
    fields = {
        "archive_format": FORMAT,
        "namespace": head.namespace,
        "chunk_bytes": head.chunk_bytes,
        "identity": head.identity.fields,
    }
    return json.dumps(fields, indent=2).encode() + b"\n"


def _understood(text: bytes) -> Head:
    try:
        found = json.loads(text)
        if found["archive_format"] != FORMAT:
            raise ArchiveError(
                f"the archive has format {found['archive_format']!r}, and this kvtier reads {FORMAT}"
            )
        namespace, fields, chunk_bytes = found["namespace"], found["identity"], found["chunk_bytes"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArchiveError(f"the archive's {_HEAD} is damaged") from error
    if not isinstance(fields, dict) or type(chunk_bytes) is not int:
        raise ArchiveError(f"the archive's {_HEAD} is damaged")
    if not 0 < chunk_bytes <= MOST_CHUNK_BYTES or chunk_bytes % BLOCK_BYTES:
        raise ArchiveError(f"the archive's chunks have {chunk_bytes} bytes: that cannot be")
    identity = identity_of(fields)
    if identity.namespace != namespace:
        raise ArchiveError(
            f"the archive calls itself {str(namespace)[:200]!r}, and its identity {identity.namespace!r}: "
            "it is refused"
        )
    return Head(namespace, identity, chunk_bytes)


def identity_of(fields: Mapping[str, Value]) -> Identity:
    """Return the identity that a manifest spells out.

    Raises:
        ArchiveError: it does not name its model.
    """
    model = fields.get("model")
    if not isinstance(model, str):
        raise ArchiveError("the identity does not name its model")
    return Identity(model, fields)
