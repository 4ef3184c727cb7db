"""The credentials of a profile in ``~/.aws``, from boto3, without waiting long for them.

A profile may name a program, and boto3 waits for it without a limit. obstore's timeouts do not include that,
and a put holds its slots until it ends.
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

_VALID_S: Final = 600.0  # boto3 renews expiring ones 10 minutes before; obstore asks 5 minutes early
_KEPT_VALID_S: Final = 60.0  # less than those 5 minutes: obstore asks again for its next request
T = TypeVar("T")


class ProfileCredentials:
    """A provider of credentials for obstore, which asks from one thread at a time.

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
        """Return the credentials: the last ones if new ones do not come in time.

        Raises:
            TimeoutError: none came in time, and there are none from before.
        """
        wait_s = 0.0  # only the first request waits for a program that hangs
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
    except Exception as error:  # of boto3, or anything that a credential process raises
        raise TierError(
            f"profile {config.profile!r} has no usable credentials ({type(error).__name__}): see "
            "`aws configure list`"
        ) from error


def _started(function: Callable[[], T]) -> Future[T]:
    """Call a function in a thread, which is abandoned if it hangs."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="kvtier-s3-credentials", daemon=True).start()
    return future
