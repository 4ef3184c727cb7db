"""How a server is called: redis-py connects, speaks TLS and logs in; afterwards the socket is ours."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, Final

import redis
from pydantic import SecretStr
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.retry import Retry
from redis.sentinel import Sentinel

from kvtier.validation import conceal
from kvtier_redis.config import Address, RedisConfig

_VERIFY: Final = {"full": ("required", True), "chain": ("required", False), "none": ("none", False)}


class PasswordFileError(Exception):
    """A file with a password cannot be used; the message names the setting."""


class _Opened:
    """Lets a connection of redis-py be asked for its socket."""

    sock: socket.socket

    def _connect(self) -> socket.socket:
        self.sock = super()._connect()  # type: ignore[misc]
        return self.sock


class _Tcp(_Opened, Connection): ...


class _Tls(_Opened, SSLConnection): ...


class _Unix(_Opened, UnixDomainSocketConnection): ...


class Dialer:
    """Makes connections as the settings say. Nothing is tried twice here: who asks decides about that.

    Args:
        config: the settings.
        name: what the connections are called in the server's list of clients.

    Raises:
        PasswordFileError: a file with a password cannot be read.
    """

    def __init__(self, config: RedisConfig, name: str) -> None:
        self._config = config
        self._common: dict[str, Any] = {
            "socket_connect_timeout": config.connect_timeout_s,
            "socket_timeout": max(config.connect_timeout_s, config.deadline_s),
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,  # nothing is said unasked
            "client_name": name,
        }
        self._login = {"username": config.username, "password": _password(config, "password")}
        self._sentinel_login = {
            "username": config.sentinel_username,
            "password": _password(config, "sentinel_password"),
        }
        self._secrets = [self._login["password"], self._sentinel_login["password"]]

    def hide(self, text: object) -> str:
        """Take passwords out of what a server or a client has said.

        A server that does not know AUTH repeats its arguments, and so does a proxy that refuses it.
        """
        return conceal(str(text), filter(None, self._secrets))

    def options(self) -> dict[str, Any]:
        """Return how a connection of redis-py is made, its address and TLS apart."""
        return {**self._common, **self._login, "db": self._config.db}

    def connection(self, address: Address) -> _Tcp | _Tls | _Unix:
        """Make a connection that is not connected yet. Its ``connect`` blocks."""
        options = self.options()
        if address.path:
            return _Unix(path=address.path, **options)
        options |= {"host": address.host, "port": address.port}
        return _Tls(**options, **self.tls_options()) if self._config.tls else _Tcp(**options)

    def client(self, address: Address) -> redis.Redis:
        """Make a client for what is said now and then. It connects when it is used."""
        options = self.options()
        if address.path:
            return redis.Redis(unix_socket_path=address.path, **options)
        if self._config.tls:
            options |= {"ssl": True, **self.tls_options()}
        return redis.Redis(host=address.host, port=address.port, **options)

    def sentinel(self) -> Sentinel:
        """Make a client of all sentinels."""
        options = {**self._common, **self._sentinel_login}
        if self._config.tls:
            options |= {"ssl": True, **self.tls_options()}
        addresses = [(address.host, address.port) for address in self._config.parsed_addresses]
        return Sentinel(addresses, sentinel_kwargs=options)

    def tls_options(self) -> dict[str, Any]:
        """Return what redis-py is told of TLS."""
        config = self._config
        required, host_name = _VERIFY[config.tls_verify]
        return {
            "ssl_cert_reqs": required,
            "ssl_check_hostname": host_name,
            "ssl_ca_certs": _text(config.tls_ca_file),
            "ssl_certfile": _text(config.tls_cert_file),
            "ssl_keyfile": _text(config.tls_key_file),
        }


def _password(config: RedisConfig, name: str) -> str | None:
    """Return a password: a setting's value, or the first line of the file that is given instead."""
    path: Path | None = getattr(config, f"{name}_file")
    if path is None:
        given: SecretStr | None = getattr(config, name)
        return given.get_secret_value() if given is not None else None
    told = f"{name}_file = {str(path)!r}"
    try:
        with path.open(encoding="utf-8") as file:
            password = file.readline().rstrip("\r\n")
    except OSError as error:
        raise PasswordFileError(f"{told} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError:  # which shows what it has found
        raise PasswordFileError(f"{told} is no text in UTF-8") from None
    if not password:
        raise PasswordFileError(f"{told} has no password in its first line")
    return password


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
