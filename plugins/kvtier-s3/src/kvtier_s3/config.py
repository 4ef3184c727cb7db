"""Settings of the S3 tier."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, StrictBool, field_validator, model_validator

from kvtier.tiers import Size, TierConfig

Provider = Literal["s3", "gcs", "azure"]

_PREFIX: Final = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,221}")
_CONTAINER: Final = re.compile(r"(?=.{3,63}$)[a-z0-9]+(-[a-z0-9]+)*")
_PROVIDER_OF: Final[Mapping[str, Provider]] = MappingProxyType(
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
    """Settings of the S3 tier, which stores each chunk as one object."""

    type: str = Field(default="s3", description="Name of the tier's entry point in the group kvtier.tiers.")
    provider: Provider = Field(
        default="s3",
        description="Protocol of the store: `s3` (AWS and all compatible stores), `gcs` or `azure`. Settings "
        "of another provider are refused.",
    )
    bucket: str = Field(description="Bucket, or Azure container. It must exist.")
    prefix: str = Field(
        default="kvtier",
        description="Prefix of all object names; slashes are allowed. Engines with the same prefix share.",
    )
    endpoint: str | None = Field(
        default=None, description="URL of the store, without the bucket. Default: the provider's."
    )
    region: str | None = Field(
        default=None,
        description="s3: region that requests are signed for. Default: `AWS_REGION`, else `us-east-1`.",
    )
    addressing: Literal["path", "virtual"] = Field(
        default="path",
        description="s3: how the bucket is addressed: `path` (`https://host/bucket`) or `virtual` "
        "(`https://bucket.host`).",
    )

    access_key_id: SecretStr | None = Field(
        default=None,
        description="s3: access key. Default: `AWS_ACCESS_KEY_ID`, else a web identity, the container's or "
        "the instance's role.",
    )
    secret_access_key: SecretStr | None = Field(
        default=None, description="s3: secret of `access_key_id`. Default: `AWS_SECRET_ACCESS_KEY`."
    )
    session_token: SecretStr | None = Field(
        default=None,
        description="s3: session token of temporary keys, which are not renewed: see `profile`. Default: "
        "`AWS_SESSION_TOKEN`.",
    )
    profile: str | None = Field(
        default=None,
        description="s3: profile in `~/.aws` with the credentials, or a `credential_process` that prints "
        "them; needs `pip install boto3`.",
    )
    service_account_file: Path | None = Field(
        default=None,
        description="gcs: JSON file of a service account. Default: `GOOGLE_APPLICATION_CREDENTIALS`, else "
        "the machine's account.",
    )
    account: str | None = Field(default=None, description="azure: storage account; required.")
    account_key: SecretStr | None = Field(
        default=None,
        description="azure: key of `account`. Default: `AZURE_STORAGE_ACCOUNT_KEY`, else a client secret, a "
        "workload or managed identity.",
    )
    sas_token: SecretStr | None = Field(
        default=None, description="azure: shared access signature, instead of `account_key`."
    )

    allow_http: StrictBool = Field(
        default=False, description="Allow an endpoint without TLS: chunks travel unencrypted."
    )
    verify: StrictBool = Field(
        default=True, description="Verify the store's certificate. Otherwise anyone can pose as the store."
    )
    ca_file: Path | None = Field(
        default=None, description="PEM file of authorities trusted in addition to the system's."
    )

    connect_timeout_s: float = Field(default=2.0, gt=0, le=60, description="Connect timeout, in seconds.")
    timeout_s: float = Field(
        default=5.0,
        gt=0,
        le=600,
        description="Timeout of one request including its body, in seconds. A cancelled put holds its slot "
        "for at most this long.",
    )
    open_timeout_s: float = Field(
        default=15.0, gt=0, le=600, description="Timeout of opening the tier, credentials included."
    )
    max_requests: int = Field(
        default=32, ge=1, le=1024, description="Concurrent read requests, and as many write requests."
    )
    conditional_puts: Literal["auto"] | StrictBool = Field(
        default="auto",
        description="A put does not replace an object (`If-None-Match`). `auto`: if the store supports it, "
        "which is tested when the tier opens.",
    )
    bulk_delete: StrictBool = Field(
        default=True,
        description="s3: delete up to 1,000 objects with one request; `false` for stores that cannot.",
    )
    index_keys: int = Field(
        default=1_000_000,
        ge=0,
        description="Maximum number of chunks remembered as present, about 130 bytes each; 0: none.",
    )
    list_every_s: float = Field(
        default=3600.0,
        gt=0,
        description="Seconds between two listings, which find what others put and what has expired.",
    )
    max_bytes: Size | None = Field(
        default=None,
        ge=0,
        description="Refuse puts while the chunks below `prefix` take more bytes. Default: no bound; expire "
        "chunks with a lifecycle rule of the bucket.",
    )

    @field_validator("bucket")
    @classmethod
    def _check_bucket(cls, value: str) -> str:
        if not _BUCKET.fullmatch(value):
            raise ValueError("must be the bare name of a bucket, without scheme or slashes")
        return value

    @field_validator("prefix")
    @classmethod
    def _check_prefix(cls, value: str) -> str:
        bare = value.strip("/")
        if not _PREFIX.fullmatch(bare) or {".", ".."} & set(bare.split("/")):
            raise ValueError("must be letters, digits and ._- in parts separated by single slashes")
        return bare

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be a URL that begins with https:// or http://")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ValueError("must not contain credentials, queries or fragments")
        return value.rstrip("/")

    @field_validator("ca_file", "service_account_file")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser().absolute()

    @model_validator(mode="after")
    def _check_provider(self) -> S3Config:
        for name in sorted(self.model_fields_set & _PROVIDER_OF.keys()):
            if getattr(self, name) is not None and _PROVIDER_OF[name] != self.provider:
                raise ValueError(
                    f"{name} belongs to provider {_PROVIDER_OF[name]}, and provider is {self.provider}: "
                    "remove one or change the other"
                )
        if self.provider == "azure" and self.account is None:
            raise ValueError("account is missing: provider azure needs the storage account's name")
        if self.provider == "azure" and not _CONTAINER.fullmatch(self.bucket):
            raise ValueError(
                f"bucket = {self.bucket!r}: an Azure container has 3 to 63 lower-case letters and digits, "
                "with single hyphens between them"
            )
        return self

    @model_validator(mode="after")
    def _check_credentials(self) -> S3Config:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id and secret_access_key go together: set both or neither")
        if self.session_token is not None and self.access_key_id is None:
            raise ValueError("session_token needs access_key_id and secret_access_key")
        if self.profile is not None and self.access_key_id is not None:
            raise ValueError("profile and access_key_id are two sets of credentials: remove one")
        if self.account_key is not None and self.sas_token is not None:
            raise ValueError("account_key and sas_token are two sets of credentials: remove one")
        return self

    @model_validator(mode="after")
    def _check_transport(self) -> S3Config:
        if self.endpoint is not None and self.endpoint.startswith("http://") and not self.allow_http:
            raise ValueError("endpoint has no TLS: use https://, or set allow_http to true")
        host = urlsplit(self.endpoint or "").hostname or ""
        if self.addressing == "virtual" and (":" in host or host.replace(".", "").isdecimal()):
            raise ValueError(
                f"addressing is virtual, and endpoint {self.endpoint} has an IP address: no host name can "
                "begin with the bucket; set addressing to path, or give endpoint a host name"
            )
        if not self.verify and self.ca_file is not None:
            raise ValueError("ca_file has no effect when verify is false: remove one")
        return self
