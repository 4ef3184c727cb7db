"""Creates obstore's store from the settings, and names settings in error messages."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from obstore.store import AzureStore, GCSStore, S3Store
from pydantic import SecretStr

from kvtier.errors import TierError
from kvtier_s3._errors import Failure
from kvtier_s3._profile import ProfileCredentials
from kvtier_s3.config import S3Config

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, GCSConfig, RetryConfig
    from obstore.store import S3Config as ClientS3Config

Store = S3Store | GCSStore | AzureStore

_NO_RETRIES: Final[RetryConfig] = {"max_retries": 0, "retry_timeout": timedelta(0)}  # kvtier retries
_IDLE_S: Final = 60.0


def make_store(config: S3Config) -> Store:
    """Return the store. Blocks, because it reads files.

    Raises:
        TierError: a file cannot be read, boto3 is missing, or obstore rejects a setting.
    """
    try:
        common: dict[str, Any] = {"client_options": _client(config), "retry_config": _NO_RETRIES}
        if config.provider == "s3":
            credentials = ProfileCredentials(config) if config.profile is not None else None
            return S3Store(config.bucket, config=_s3(config), credential_provider=credentials, **common)
        if config.provider == "gcs":
            return GCSStore(config.bucket, config=_gcs(config), **common)
        return AzureStore(config.bucket, config=_azure(config), **common)
    except TierError:
        raise
    except Exception as error:
        # Neither its text nor its cause is shown: they may contain a value given as a key.
        kind = type(error).__name__
    suspects = ("ca_file", "endpoint", "service_account_file", *_secret_names(config))
    given = ", ".join(name for name in suspects if getattr(config, name) is not None)
    raise TierError(
        f"obstore rejects the settings ({kind}): check {given or 'the environment variables of the provider'}"
    )


def _client(config: S3Config) -> ClientConfig:
    client: ClientConfig = {
        "allow_http": config.allow_http,
        "allow_invalid_certificates": not config.verify,
        "connect_timeout": timedelta(seconds=config.connect_timeout_s),
        "timeout": timedelta(seconds=config.timeout_s),
        "pool_idle_timeout": timedelta(seconds=_IDLE_S),
        "user_agent": "kvtier-s3",
    }
    if config.ca_file is not None:
        try:
            client["root_certificate"] = config.ca_file.read_bytes()
        except OSError as error:
            raise TierError(f"ca_file {config.ca_file} cannot be read: {error.strerror}") from error
    return client


def _s3(config: S3Config) -> ClientS3Config:
    # A put is signed with the digest of its bytes. The store rejects it if they changed on the way, for
    # example if obstore still reads a slot that was reused.
    settings: ClientS3Config = {
        "unsigned_payload": False,
        "virtual_hosted_style_request": config.addressing == "virtual",
        "disable_bulk_delete": not config.bulk_delete,
    }
    if config.endpoint is not None:
        settings["endpoint"] = _endpoint(config, config.endpoint)
        # otherwise AWS_ENDPOINT_URL_S3 takes precedence
        settings["aws_endpoint_url_s3"] = settings["endpoint"]
    if config.region is not None:
        settings["region"] = config.region
    for name in ("access_key_id", "secret_access_key", "session_token"):
        secret: SecretStr | None = getattr(config, name)
        if secret is not None:
            settings[name] = secret.get_secret_value()
    return settings


def _endpoint(config: S3Config, endpoint: str) -> str:
    """Return the endpoint, with the bucket in the host name for virtual addressing."""
    parts = urlsplit(endpoint)
    if config.addressing == "path" or parts.netloc.startswith(f"{config.bucket}."):
        return endpoint
    return parts._replace(netloc=f"{config.bucket}.{parts.netloc}").geturl()


def _gcs(config: S3Config) -> GCSConfig:
    settings: GCSConfig = {}
    if config.endpoint is not None:
        settings["base_url"] = config.endpoint
    if config.service_account_file is not None:
        if not config.service_account_file.is_file():
            raise TierError(f"service_account_file {config.service_account_file} does not exist")
        settings["service_account"] = str(config.service_account_file)
    return settings


def _azure(config: S3Config) -> AzureConfig:
    settings: AzureConfig = {}
    if config.account is not None:
        settings["account_name"] = config.account
    if config.endpoint is not None:
        settings["endpoint"] = config.endpoint
    if config.account_key is not None:
        settings["account_key"] = config.account_key.get_secret_value()
    if config.sas_token is not None:
        settings["sas_key"] = config.sas_token.get_secret_value().removeprefix("?")
    return settings


def describe(config: S3Config) -> str:
    """Return the bucket and the endpoint, for messages."""
    at = f" at {config.endpoint}" if config.endpoint else ""
    return f"{config.provider} bucket {config.bucket}{at}"


def remedy(config: S3Config, failure: Failure) -> str:
    """Return the setting to correct after a failure, and the remedy."""
    endpoint = f"endpoint is {config.endpoint or 'not set, so it is the provider itself'}"
    if _contains_bucket(config) and failure.reason in ("request", "no_bucket", "forbidden", "server"):
        return f"{endpoint}, which contains the bucket: write it without {config.bucket}"
    return {
        "forbidden": f"{_credentials(config)}, and that they allow to list, read and write below prefix "
        f"{config.prefix!r}",
        "clock": "set this machine's clock (NTP): requests are signed with the time",
        "no_bucket": f"create the bucket, or correct bucket ({config.bucket}) or endpoint",
        "region": f"correct region ({config.region or 'not set'}) or endpoint",
        "tls": f"{endpoint}; set ca_file to the store's authority, or correct https:// in endpoint",
        "credentials": f"set {_credential_names(config)}",
        "timeout": f"{endpoint}; check that it can be reached from here, or raise connect_timeout_s "
        f"({config.connect_timeout_s:g}) or timeout_s ({config.timeout_s:g})",
        "connection": f"{endpoint}; check that it is correct and can be reached from here",
        "throttled": "the store is overloaded or limits this account: try again later",
        "server": "see the store's own log",
    }.get(failure.reason, f"{endpoint}; check that it is a store of provider {config.provider}")


def _contains_bucket(config: S3Config) -> bool:
    """Return whether the endpoint seems to contain the bucket. The client would add it a second time."""
    parts = urlsplit(config.endpoint or "")
    in_host = config.addressing == "path" and parts.netloc.startswith(f"{config.bucket}.")
    return in_host or config.bucket in parts.path.split("/")


def _credentials(config: S3Config) -> str:
    names = ("access_key_id", "profile", "service_account_file", "account_key", "sas_token")
    given = [name for name in names if getattr(config, name) is not None]
    if given:
        return f"check {' and '.join(given)}"
    return f"check the credentials of the environment, or set {_credential_names(config)}"


def _credential_names(config: S3Config) -> str:
    return {
        "s3": "profile, or access_key_id and secret_access_key, or AWS_ACCESS_KEY_ID and its secret",
        "gcs": "service_account_file (or GOOGLE_APPLICATION_CREDENTIALS)",
        "azure": "account_key or sas_token (or AZURE_STORAGE_ACCOUNT_KEY)",
    }[config.provider]


def _secret_names(config: S3Config) -> list[str]:
    return [name for name in type(config).model_fields if isinstance(getattr(config, name), SecretStr)]
