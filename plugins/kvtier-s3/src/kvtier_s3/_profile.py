"""The credentials of a profile in ``~/.aws``, from boto3, without waiting long for them.

A profile may name a program, and boto3 waits for it without a limit. obstore's timeouts do not cover this
wait, and a put holds its slots until it ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, TypeVar

from kvtier.errors import TierError
from kvtier_s3.config import S3Config

if TYPE_CHECKING:
    from obstore.auth.boto3 import Boto3CredentialProvider
    from obstore.store import S3Credential

# boto3 renews credentials 10 minutes before they expire; obstore asks 5 minutes before.
_VALID_S: Final = 600.0
_KEPT_VALID_S: Final = 60.0  # Less than those 5 minutes, so that obstore asks again at its next request.
T = TypeVar("T")


class ProfileCredentials:
    """A provider of credentials for obstore, which calls it from one thread at a time.

    Raises:
        TierError: boto3 is missing, or the profile has no usable credentials.
    """

    def __init__(self, config: S3Config) -> None:
        self._timeout_s = config.timeout_s
        self._provider = _first(config)
        self.config = self._provider.config
        self._asking: Future[S3Credential] | None = None
        self._last: S3Credential | None = None

    def __call__(self) -> S3Credential:
        """Return the credentials, or the previous ones if new ones do not arrive in time.

        Raises:
            TimeoutError: none arrived in time, and there are no previous ones.
        """
        wait_s = 0.0  # Only the first request waits for a hanging program.
        if self._asking is None or self._asking.done():
            self._asking, wait_s = _started(self._provider), self._timeout_s
        try:
            self._last = self._asking.result(wait_s)
        except TimeoutError:
            if self._last is None:
                raise
            return {**self._last, "expires_at": datetime.now(UTC) + timedelta(seconds=_KEPT_VALID_S)}
        return self._last


def _first(config: S3Config) -> Boto3CredentialProvider:
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise TierError("profile needs boto3: pip install boto3") from error

    def make() -> Boto3CredentialProvider:
        session = boto3.Session(profile_name=config.profile)
        return Boto3CredentialProvider(session, ttl=timedelta(seconds=_VALID_S))

    try:
        return _started(make).result(config.open_timeout_s)
    except TimeoutError:
        raise TierError(
            f"profile {config.profile!r} gave no credentials within open_timeout_s "
            f"({config.open_timeout_s:g}): see its credential_process"
        ) from None
    except Exception as error:  # any exception of boto3 or of a credential process
        raise TierError(
            f"profile {config.profile!r} has no usable credentials ({type(error).__name__}): see "
            "`aws configure list`"
        ) from error


def _started(function: Callable[[], T]) -> Future[T]:
    """Call a function in a thread. The thread is abandoned if it hangs."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="kvtier-s3-credentials", daemon=True).start()
    return future
