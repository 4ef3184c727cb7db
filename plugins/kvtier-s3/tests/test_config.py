"""Settings: invalid ones are refused by name, no secret is shown, and obstore receives the settings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import AzureStore, GCSStore, S3Store
from proxy import Faults, Proxy

from kvtier import TieringConfig
from kvtier._reasons import TRANSFER
from kvtier.errors import ConfigError, TierError
from kvtier.tiers import _registry as registry
from kvtier_s3 import S3Config
from kvtier_s3._errors import REASONS, classify
from kvtier_s3._store import make_store
from kvtier_tools.settings_tables import own_table

README = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
S3 = {"type": "s3", "bucket": "b"}
GCS = {**S3, "provider": "gcs"}
AZURE = {**S3, "provider": "azure", "account": "acme", "bucket": "chunks"}
SECRETS = {"access_key_id": "AK-hidden", "secret_access_key": "SK-hidden", "session_token": "ST-hidden"}


def made(raw: dict[str, Any]) -> S3Config:
    config = registry.validate(raw)
    assert isinstance(config, S3Config)
    return config


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"type": "s3"}, ["bucket is missing"]),
        ({**S3, "bukcet": "b"}, ["bukcet is not a setting", "did you mean bucket?"]),
        ({**S3, "bucket": "s3://b/x"}, ["bucket", "bare name"]),
        ({**S3, "prefix": "a//b"}, ["prefix", "single slashes"]),
        ({**S3, "prefix": "a/../b"}, ["prefix"]),
        ({**S3, "endpoint": "minio:9000"}, ["endpoint", "begins with https://"]),
        ({**S3, "endpoint": "http://minio"}, ["endpoint has no TLS", "set allow_http to true"]),
        ({**S3, "endpoint": "https://me:hidden@minio"}, ["endpoint", "credentials", "@minio"]),
        ({**S3, "endpoint": "https://minio?key=hidden"}, ["endpoint", "queries"]),
        ({**S3, "endpoint": "https://10.0.0.5:9000", "addressing": "virtual"}, ["has an IP address"]),
        ({**S3, "endpoint": "https://[::1]", "addressing": "virtual"}, ["set addressing to path"]),
        ({**S3, "verify": False, "ca_file": "/x"}, ["ca_file", "remove one"]),
        ({**S3, "access_key_id": "AK-hidden"}, ["access_key_id and secret_access_key go together"]),
        ({**S3, "session_token": "ST-hidden"}, ["session_token needs access_key_id"]),
        ({**S3, **SECRETS, "profile": "p"}, ["profile and access_key_id", "remove one"]),
        ({**S3, "account": "a"}, ["account belongs to provider azure, and provider is s3"]),
        ({**GCS, "region": "eu"}, ["region belongs to provider s3, and provider is gcs"]),
        ({**AZURE, **SECRETS}, ["access_key_id belongs to provider s3"]),
        ({**S3, "provider": "azure"}, ["account is missing"]),
        ({**AZURE, "bucket": "kv"}, ["bucket = 'kv'", "an Azure container has 3 to 63"]),
        ({**AZURE, "bucket": "kv--cache"}, ["bucket = 'kv--cache'", "single hyphens"]),
        ({**AZURE, "account_key": "K", "sas_token": "T"}, ["account_key and sas_token", "remove one"]),
    ],
)
def test_invalid_settings_are_named(raw: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        registry.validate(raw, "secondary_tiers[0]")
    message = str(caught.value)
    assert "secondary_tiers[0]" in message
    assert not [word for word in words if word not in message], message
    assert "hidden" not in message


def test_secrets_stay_hidden() -> None:
    config = made({**S3, **SECRETS})
    whole = TieringConfig.from_mapping({"cpu_bytes_to_use": "1GiB", "secondary_tiers": [{**S3, **SECRETS}]})
    for text in (repr(config), str(config), config.model_dump_json(), repr(whole), whole.model_dump_json()):
        assert "hidden" not in text


def test_readme_lists_settings_and_reasons() -> None:
    table = own_table("s3")
    assert table in README, f"copy this table:\n{table}"
    for reason in REASONS:
        assert f"`{reason}`" in README, f"README.md does not say what {reason} means"


def test_readme_configurations_work() -> None:
    blocks = [json.loads(block) for block in re.findall(r"^```json\n(.*?)^```", README, re.M | re.S)]
    tiers = [made(block) for block in blocks if "type" in block]
    assert {tier.provider for tier in tiers} == {"s3", "gcs", "azure"}


@pytest.mark.parametrize(
    ("raw", "kind", "expected"),
    [
        (
            {**S3, **SECRETS, "region": "eu-west-1", "endpoint": "https://s3.example"},
            S3Store,
            {"region": "eu-west-1", "endpoint": "https://s3.example"},
        ),
        (
            {**S3, "endpoint": "https://s3.example:444", "addressing": "virtual"},
            S3Store,
            {"endpoint": "https://b.s3.example:444", "virtual_hosted_style_request": "true"},
        ),
        ({**S3, "bulk_delete": False}, S3Store, {"disable_bulk_delete": "true", "unsigned_payload": "false"}),
        ({**GCS, "endpoint": "https://gcs.example"}, GCSStore, {"base_url": "https://gcs.example"}),
        ({**AZURE, "account_key": "aGlkZGVu"}, AzureStore, {"account_name": "acme"}),
        ({**AZURE, "sas_token": "?sv=1&sig=2"}, AzureStore, {"account_name": "acme"}),
    ],
)
def test_obstore_gets_settings(raw: dict[str, Any], kind: type, expected: dict[str, str]) -> None:
    store = make_store(made(raw))
    assert isinstance(store, kind)
    config = {name: str(value).lower() for name, value in store.config.items()}
    assert {name: config.get(name) for name in expected} == expected


def test_obstore_gets_timeouts_and_tls() -> None:
    store = make_store(made({**S3, "timeout_s": 7, "connect_timeout_s": 3, "verify": False}))
    options = store.client_options
    assert options is not None
    assert (options["timeout"], options["connect_timeout"]) == ("7s", "3s")
    assert str(options["allow_invalid_certificates"]).lower() == "true"
    assert store.retry_config is not None
    assert store.retry_config["max_retries"] == 0  # kvtier retries


def test_invalid_credentials_named(tmp_path: Path) -> None:
    file = tmp_path / "account.json"
    with pytest.raises(TierError, match=f"service_account_file {file} does not exist"):
        make_store(made({**GCS, "service_account_file": str(file)}))
    file.write_text(json.dumps({"private_key": "hidden"}))
    with pytest.raises(TierError, match="service_account_file") as caught:
        make_store(made({**GCS, "service_account_file": str(file)}))
    assert "hidden" not in str(caught.value)
    with pytest.raises(TierError, match="check account_key") as caught:
        make_store(made({**AZURE, "account_key": "!!hidden"}))
    assert "hidden" not in str(caught.value)
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        (503, "SlowDown", "throttled"),
        (503, "ServerBusy", "throttled"),
        (429, "TooManyRequests", "throttled"),
        (500, "InternalError", "server"),
        (501, "NotImplemented", "server"),
        (403, "AccessDenied", "forbidden"),
        (401, "NoAuthenticationInformation", "forbidden"),
        (403, "RequestTimeTooSkewed", "clock"),
        (403, "QuotaExceeded", "full"),
        (507, "InsufficientStorage", "full"),
        (404, "NoSuchBucket", "no_bucket"),
        (404, "ContainerNotFound", "no_bucket"),
        (409, "ConditionalRequestConflict", "conflict"),
        (301, "PermanentRedirect", "region"),
        (400, "InvalidRequest", "request"),
    ],
)
def test_store_errors_are_classified(proxy_alone: Proxy, status: int, code: str, reason: str) -> None:
    settings = {**S3, **SECRETS, "endpoint": proxy_alone.endpoint, "allow_http": True}
    store = make_store(made(settings))
    proxy_alone.be(Faults(refused=True, status=status, code=code))
    with pytest.raises(Exception) as caught:
        obstore.put(store, "a", b"b", use_multipart=False)
    failure = classify(caught.value)
    assert failure.reason == reason
    assert reason in REASONS or reason in TRANSFER
    assert "hidden" not in str(failure)


@pytest.fixture(scope="module")
def proxy_alone() -> Any:
    """A proxy without a server, which answers by itself."""
    with Proxy(1) as proxy:
        yield proxy
