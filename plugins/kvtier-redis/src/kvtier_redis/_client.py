"""redis-py clients and connections, made from the settings: redis-py connects, logs in and speaks TLS."""

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

from kvtier.tiers import conceal
from kvtier_redis.config import Address, RedisConfig

_VERIFY: Final = {"full": ("required", True), "chain": ("required", False), "none": ("none", False)}


class PasswordFileError(Exception):
    """A password file is unusable; the message names the setting."""


class _WithSocket:
    """A redis-py connection that keeps its socket where it can be used directly."""

    sock: socket.socket

    def _connect(self) -> socket.socket:
        self.sock = super()._connect()  # type: ignore[misc]
        return self.sock


class _Tcp(_WithSocket, Connection): ...


class _Tls(_WithSocket, SSLConnection): ...


class _Unix(_WithSocket, UnixDomainSocketConnection): ...


class ClientFactory:
    """Makes redis-py objects from the settings. They never retry: the caller decides about that.

    Args:
        name: what CLIENT LIST shows as the name of the connections.

    Raises:
        PasswordFileError: a password file cannot be read.
    """

    def __init__(self, config: RedisConfig, name: str) -> None:
        self._config = config
        self._common: dict[str, Any] = {
            "socket_connect_timeout": config.connect_timeout_s,
            "socket_timeout": max(config.connect_timeout_s, config.deadline_s),
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,  # RESP 2 has no push messages
            "client_name": name,
            **_tls_options(config),
        }
        self._login = {"username": config.username, "password": _password(config, "password")}
        self._sentinel_login = {
            "username": config.sentinel_username,
            "password": _password(config, "sentinel_password"),
        }

    def redact(self, text: object) -> str:
        """Return ``text`` without passwords: servers and proxies repeat the arguments of a refused AUTH."""
        passwords = (self._login["password"], self._sentinel_login["password"])
        return conceal(str(text), filter(None, passwords))

    def options(self) -> dict[str, Any]:
        """Return redis-py's options of a connection, its address apart."""
        return {**self._common, **self._login, "db": self._config.db}

    def pool(self, address: Address) -> redis.ConnectionPool:
        """Return a pool of connections to one server. It connects when one is taken."""
        if address.path:
            return redis.ConnectionPool(_Unix, path=address.path, **self.options())
        kind = _Tls if self._config.tls else _Tcp
        return redis.ConnectionPool(kind, host=address.host, port=address.port, **self.options())

    def client(self, address: Address) -> redis.Redis:
        """Return a client of one server. It connects when it is first used."""
        if address.path:
            return redis.Redis(unix_socket_path=address.path, **self.options())
        return redis.Redis(host=address.host, port=address.port, ssl=self._config.tls, **self.options())

    def sentinel(self) -> Sentinel:
        """Return a client of all sentinels."""
        options = {**self._common, **self._sentinel_login, "ssl": self._config.tls}
        addresses = [(address.host, address.port) for address in self._config.parsed_addresses]
        return Sentinel(addresses, sentinel_kwargs=options)


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


def _password(config: RedisConfig, name: str) -> str | None:
    """Return a password: the setting's value, or the first line of its file."""
    path: Path | None = getattr(config, f"{name}_file")
    if path is None:
        given: SecretStr | None = getattr(config, name)
        return given.get_secret_value() if given is not None else None
    setting = f"{name}_file = {str(path)!r}"
    try:
        with path.open(encoding="utf-8") as file:
            password = file.readline().rstrip("\r\n")
    except OSError as error:
        raise PasswordFileError(f"{setting} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError:  # its text would show the password
        raise PasswordFileError(f"{setting} is not UTF-8 text") from None
    if not password:
        raise PasswordFileError(f"{setting} has no password on its first line")
    return password
