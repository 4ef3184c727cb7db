"""The Redis tier of kvtier: KV cache chunks in Redis or Valkey."""

from kvtier_redis.config import RedisConfig
from kvtier_redis.tier import RedisTier

__all__ = ["RedisConfig", "RedisTier"]
