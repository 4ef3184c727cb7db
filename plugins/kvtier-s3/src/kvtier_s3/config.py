"""Settings of the tier."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, StrictBool, field_validator, model_validator

from kvtier.quantities import Size
from kvtier.tiers.base import TierConfig

Provider = Literal["s3", "gcs", "azure"]

_SMALLEST_PART: Final = 5 * 2**20
_PREFIX: Final = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,221}")
_CONTAINER: Final = re.compile(r"(?=.{3,63}$)[a-z0-9]+(-[a-z0-9]+)*")
_BELONGS_TO: Final[Mapping[str, Provider]] = MappingProxyType(
    {
        "region": "s3",
        "addressing": "s3",
        "access_key_id": "s3",
        "secret_access_key": "s3",
        "session_token": "s3",
        "profile": "s3",
        "bulk_delete": "s3",
        "service_account_file": "gcs",
        "account": "azure",
        "account_key": "azure",
        "sas_token": "azure",
    }
)


class S3Config(TierConfig):
    """Settings of a tier that keeps each chunk as one object of an object store."""

    type: str = Field(default="s3", description="Name of the tier's entry point in the group kvtier.tiers.")
    provider: Provider = Field(
        default="s3",
        description="What the store speaks: s3 (AWS and all that is compatible), gcs or azure.",
    )
    bucket: str = Field(description="Bucket, or container of Azure. It must exist.")
    prefix: str = Field(
        default="kvtier", description="What the names of all objects begin with; may have slashes inside."
    )
    endpoint: str | None = Field(
        default=None,
        description="URL of the store, without the bucket. Default: the provider's own.",
    )
    region: str | None = Field(
        default=None, description="Region that requests are signed for. Default: AWS_REGION, or us-east-1."
    )
    addressing: Literal["path", "virtual"] = Field(
        default="path",
        description="Where the bucket is named: path (https://host/bucket) or virtual (https://bucket.host).",
    )

    access_key_id: SecretStr | None = Field(
        default=None,
        description="Access key. Default: AWS_ACCESS_KEY_ID, else a web identity, a container's or the "
        "instance's role.",
    )
    secret_access_key: SecretStr | None = Field(
        default=None, description="Secret of access_key_id. Default: AWS_SECRET_ACCESS_KEY."
    )
    session_token: SecretStr | None = Field(
        default=None, description="Token of temporary keys. Default: AWS_SESSION_TOKEN."
    )
    profile: str | None = Field(
        default=None,
        description="Profile of ~/.aws that has the keys; needs boto3 (pip install kvtier-s3[profiles]).",
    )
    service_account_file: Path | None = Field(
        default=None,
        description="JSON file of a service account. Default: GOOGLE_APPLICATION_CREDENTIALS, else the "
        "machine's account.",
    )
    account: str | None = Field(default=None, description="Storage account of Azure.")
    account_key: SecretStr | None = Field(
        default=None,
        description="Key of account. Default: AZURE_STORAGE_ACCOUNT_KEY, else a client's secret, "
        "a workload's or the machine's identity.",
    )
    sas_token: SecretStr | None = Field(
        default=None, description="Shared access signature, in place of account_key."
    )

    allow_http: StrictBool = Field(
        default=False,
        description="Allow an endpoint without TLS: whoever listens can read what is put.",
    )
    verify: StrictBool = Field(
        default=True, description="Check the store's certificate. Without, anybody can pose as the store."
    )
    ca_file: Path | None = Field(
        default=None, description="PEM file of authorities that are trusted besides the system's."
    )

    connect_timeout_s: float = Field(default=2.0, gt=0, le=60, description="Seconds to connect at most.")
    timeout_s: float = Field(
        default=5.0,
        gt=0,
        le=600,
        description="Seconds that one request may take, its body included. A put holds its slot so long, at "
        "most, after it was given up.",
    )
    open_timeout_s: float = Field(
        default=15.0, gt=0, le=600, description="Seconds that opening may take, credentials included."
    )
    max_requests: int = Field(
        default=32,
        ge=1,
        le=1024,
        description="Requests that read which may be under way at once, and as many that write.",
    )
    part_bytes: Size = Field(
        default=64 * 2**20,
        ge=_SMALLEST_PART,
        description="Chunks larger than this are put in parts of this size.",
    )
    conditional_puts: Literal["auto"] | StrictBool = Field(
        default="auto",
        description="Whether a put says that it must not replace an object (If-None-Match). auto: try at "
        "opening whether the store knows that.",
    )
    bulk_delete: StrictBool = Field(
        default=True, description="Delete many objects with one request. False for stores that cannot."
    )
    index_keys: int = Field(
        default=1_000_000,
        ge=0,
        description="Chunks at most that are known to be there without a request. 0: none.",
    )
    list_every_s: float = Field(
        default=3600.0,
        gt=0,
        description="Seconds between two listings, which learn what others put and what has expired.",
    )
    max_bytes: Size | None = Field(
        default=None,
        ge=0,
        description="Bytes of chunks below prefix beyond which puts are refused. Default: no bound here; "
        "let a lifecycle rule of the bucket expire chunks.",
    )

    @field_validator("bucket")
    @classmethod
    def _is_a_bucket(cls, value: str) -> str:
        if not _BUCKET.fullmatch(value):
            raise ValueError("a bucket's bare name is needed, without scheme or slashes")
        return value

    @field_validator("prefix")
    @classmethod
    def _is_a_prefix(cls, value: str) -> str:
        bare = value.strip("/")
        if not _PREFIX.fullmatch(bare) or {".", ".."} & set(bare.split("/")):
            raise ValueError("letters, digits and ._- are possible, in parts divided by single slashes")
        return bare

    @field_validator("endpoint")
    @classmethod
    def _is_an_endpoint(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("a URL is needed that begins with https:// or http://")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ValueError("credentials, queries and fragments do not belong into it")
        return value.rstrip("/")

    @field_validator("ca_file", "service_account_file")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser().absolute()

    @model_validator(mode="after")
    def _fits_the_provider(self) -> S3Config:
        for name in sorted(self.model_fields_set & _BELONGS_TO.keys()):
            if getattr(self, name) is not None and _BELONGS_TO[name] != self.provider:
                raise ValueError(
                    f"{name} belongs to provider {_BELONGS_TO[name]}, and provider is {self.provider}: "
                    "remove the one or change the other"
                )
        if self.provider == "azure" and self.account is None:
            raise ValueError("account is missing: provider azure needs the storage account's name")
        if self.provider == "azure" and not _CONTAINER.fullmatch(self.bucket):
            raise ValueError(
                f"bucket = {self.bucket!r}: a container of Azure has 3 to 63 small letters and digits, with "
                "single hyphens between them"
            )
        return self

    @model_validator(mode="after")
    def _has_one_set_of_credentials(self) -> S3Config:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id and secret_access_key go together: give both or neither")
        if self.session_token is not None and self.access_key_id is None:
            raise ValueError("session_token needs access_key_id and secret_access_key")
        if self.profile is not None and self.access_key_id is not None:
            raise ValueError("profile and access_key_id are two sets of credentials: remove one of them")
        if self.account_key is not None and self.sas_token is not None:
            raise ValueError("account_key and sas_token are two sets of credentials: remove one of them")
        return self

    @model_validator(mode="after")
    def _means_the_transport(self) -> S3Config:
        if self.endpoint is not None and self.endpoint.startswith("http://") and not self.allow_http:
            raise ValueError("endpoint has no TLS: use https://, or set allow_http to true")
        if not self.verify and self.ca_file is not None:
            raise ValueError("ca_file has no meaning where verify is false: remove one of them")
        return self


__all__ = ["Provider", "S3Config"]
