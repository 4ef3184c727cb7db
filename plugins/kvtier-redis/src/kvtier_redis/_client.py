"""redis-py clients and connections, made from the settings: redis-py connects, logs in and speaks TLS."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import redis
from pydantic import SecretStr
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError, ResponseError
from redis.retry import Retry
from redis.sentinel import Sentinel

from kvtier.tiers import conceal
from kvtier_redis.config import Address, RedisConfig

_VERIFY: Final = {"full": ("required", True), "chain": ("required", False), "none": ("none", False)}


_KEEPALIVE: Final = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
_KEPT_ALIVE: Final[Mapping[str, Any]] = {
    "socket_keepalive": True,
    "socket_keepalive_options": {
        getattr(socket, name): value for name, value in _KEEPALIVE.items() if hasattr(socket, name)
    },
}
"""A middlebox that forgets idle connections sees traffic, or the dead connection ends after a minute."""

_IDLE_S: Final = 60.0
# ``Connections`` limits the connections. redis-py 8 has a default limit of 100.
_MAX_CONNECTIONS: Final = 2**31
_COMMAND_TIMEOUT_S: Final = 30.0
_COMMAND_VALID_S: Final = 60.0
_PASSWORDS_HIDDEN: Final = 8


class PasswordError(AuthenticationError):
    """There is no usable password; the message names the setting."""


class _WithSocket:
    """A redis-py connection that makes its socket available for direct use.

    Attributes:
        made_s, used_s: monotonic times of its connect and of its last use.
    """

    sock: socket.socket
    made_s = used_s = 0.0

    def _connect(self) -> socket.socket:
        self.sock = super()._connect()  # type: ignore[misc]
        self.made_s = self.used_s = time.monotonic()
        return self.sock


class _Tcp(_WithSocket, Connection): ...


class _Tls(_WithSocket, SSLConnection): ...


class _Unix(_WithSocket, UnixDomainSocketConnection): ...


class Pool(redis.ConnectionPool):
    """The connections to one server.

    A connection that a firewall may have forgotten is replaced before use.
    """

    _renewed_s = 0.0

    def renew(self) -> None:
        """Replace each existing connection before its next use."""
        self._renewed_s = time.monotonic()

    def get_connection(self, *args: Any, **options: Any) -> Any:
        """Return a connection that was made since ``renew``, and was used within the last minute or never."""
        connection: Any = super().get_connection(*args, **options)
        if connection.made_s < self._renewed_s or connection.used_s + _IDLE_S < time.monotonic():
            connection.disconnect()
            try:
                connection.connect()
            except BaseException:
                self.release(connection)
                raise
        return connection

    def release(self, connection: Any) -> None:
        """Keep a connection for its next use."""
        connection.used_s = time.monotonic()
        super().release(connection)


class _Login(CredentialProvider):
    """The credentials of new connections. Each connection reads the password file again.

    A password from a command is used for a minute, or until the server refuses it.
    """

    def __init__(self, config: RedisConfig, prefix: str) -> None:
        self._username: str | None = getattr(config, f"{prefix}username")
        self._given: SecretStr | None = getattr(config, f"{prefix}password")
        self._file: Path | None = getattr(config, f"{prefix}password_file")
        self._command: tuple[str, ...] | None = getattr(config, f"{prefix}password_command")
        self._prefix = prefix
        self._lock = threading.Lock()
        self._valid_until_s = self._failed_s = 0.0
        self._failure = ""
        self.passwords: deque[str] = deque(maxlen=_PASSWORDS_HIDDEN)

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return the user's name, if there is one, and the password."""
        password = self._password()
        if password and password not in self.passwords:
            self.passwords.append(password)
        if self._username:
            return self._username, password or ""
        return (password,) if password else ()  # type: ignore[return-value]  # redis-py then sends no AUTH

    def renew(self) -> None:
        """Run the command again for the next connection."""
        self._valid_until_s = 0.0

    def _password(self) -> str | None:
        """Return the password.

        Raises:
            PasswordError: the file or the command provides none.
        """
        if self._file is not None:
            return self._first_line(f"password_file = {str(self._file)!r}", self._file.read_bytes)
        if self._command is None:
            return self._given.get_secret_value() if self._given is not None else None
        asked_s = time.monotonic()
        with self._lock:  # All connections share one run. If it fails, it fails for all that waited for it.
            if self._failed_s > asked_s:
                raise PasswordError(self._failure)
            if time.monotonic() >= self._valid_until_s:
                self._run_command()
            return self._printed

    def _run_command(self) -> None:
        assert self._command is not None
        try:
            self._printed = self._first_line(f"password_command = {self._command[0]!r}", self._run)
        except PasswordError as error:
            self._failure, self._failed_s = str(error), time.monotonic()
            raise
        self._valid_until_s = time.monotonic() + _COMMAND_VALID_S

    def _run(self) -> bytes:
        assert self._command is not None
        return subprocess.run(
            self._command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_COMMAND_TIMEOUT_S,
            check=True,
        ).stdout

    def _first_line(self, setting: str, read: Callable[[], bytes]) -> str:
        setting, password, why = self._prefix + setting, "", ""
        try:
            password = read().decode().partition("\n")[0].rstrip("\r")
        except OSError as error:
            why = f"cannot be {'read' if self._file else 'run'} ({error.strerror})"
        except UnicodeDecodeError:
            why = "is not UTF-8 text"
        except subprocess.CalledProcessError as error:
            why = f"failed (exit status {error.returncode})"
        except subprocess.TimeoutExpired:
            why = f"did not end within {_COMMAND_TIMEOUT_S:g} s"
        if not why and not password:
            why = "has no password on its first line"
        if why:  # unchained: the causes may show the password
            raise PasswordError(f"{setting} {why}")
        return password


class ClientFactory:
    """Makes redis-py objects from the settings. They never retry, because the caller decides whether to.

    Args:
        name: the name of the connections in CLIENT LIST.
    """

    def __init__(self, config: RedisConfig, name: str) -> None:
        self._config = config
        self._name = name
        self._login = _Login(config, "")
        self._sentinel_login = _Login(config, "sentinel_")

    def redact(self, text: object) -> str:
        """Return ``text`` without passwords. Servers and proxies repeat the arguments of a refused AUTH."""
        return conceal(str(text), (*self._login.passwords, *self._sentinel_login.passwords))

    def options(self) -> dict[str, Any]:
        """Return redis-py's options of a connection, without the address.

        They also suit its asyncio classes.
        """
        return {**self._options(self._login), "db": self._config.db, **_tls_options(self._config)}

    def pool(self, address: Address) -> Pool:
        """Return a pool of connections to one server. It connects when a connection is taken."""
        options = {
            **self.options(),
            "redis_connect_func": partial(_greet, self._login, self._name),
            "max_connections": _MAX_CONNECTIONS,
        }
        if address.path:
            return Pool(_Unix, path=address.path, **options)
        kind = _Tls if self._config.tls else _Tcp
        return Pool(kind, host=address.host, port=address.port, **options, **_KEPT_ALIVE)

    def client(self, address: Address) -> redis.Redis:
        """Return a client of one server. It connects when it is first used."""
        return redis.Redis.from_pool(self.pool(address))

    def sentinel(self) -> Sentinel:
        """Return a client of all sentinels."""
        options = {
            **self._options(self._sentinel_login),
            **_tls_options(self._config),
            "redis_connect_func": partial(_greet, self._sentinel_login, self._name),
            "ssl": self._config.tls,
        }
        addresses = [(address.host, address.port) for address in self._config.parsed_addresses]
        return Sentinel(addresses, sentinel_kwargs=options)

    def _options(self, login: _Login) -> dict[str, Any]:
        config = self._config
        return {
            "socket_connect_timeout": config.connect_timeout_s,
            "socket_timeout": max(config.connect_timeout_s, config.deadline_s),
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,  # RESP 2 has no push messages
            "credential_provider": login,
        }


def _greet(login: _Login, name: str, connection: Any) -> None:
    """Log in on a new connection. A server may refuse the connection's name, which is only for operators."""
    try:
        connection.on_connect()
    except AuthenticationError:
        login.renew()
        raise
    with suppress(ResponseError):
        connection.send_command("CLIENT", "SETNAME", name)
        connection.read_response()


def _tls_options(config: RedisConfig) -> dict[str, Any]:
    if not config.tls:
        return {}
    cert_reqs, check_hostname = _VERIFY[config.tls_verify]
    files = {
        "ssl_ca_certs": config.tls_ca_file,
        "ssl_certfile": config.tls_cert_file,
        "ssl_keyfile": config.tls_key_file,
    }
    return {
        "ssl_cert_reqs": cert_reqs,
        "ssl_check_hostname": check_hostname,
        **{name: str(path) for name, path in files.items() if path is not None},
    }
