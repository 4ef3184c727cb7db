"""The tier ``s3``: chunks of KV cache in object stores. See README.md for its settings."""

from kvtier_s3.config import S3Config
from kvtier_s3.tier import S3Tier

__all__ = ["S3Config", "S3Tier"]
