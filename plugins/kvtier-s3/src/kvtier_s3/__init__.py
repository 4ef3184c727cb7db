"""The S3 tier of kvtier: KV cache chunks in object stores."""

from kvtier_s3.config import S3Config
from kvtier_s3.tier import S3Tier

__all__ = ["S3Config", "S3Tier"]
