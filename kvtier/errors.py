"""The errors of kvtier. Each one says what is wrong and what to do about it."""

from __future__ import annotations


class KVTierError(Exception):
    """Base of all errors that kvtier raises on purpose."""


class ConfigError(KVTierError):
    """A setting is wrong. The message names the field, its value and the remedy."""


class TierError(KVTierError):
    """A tier cannot be loaded or opened. The message names the tier."""


class IdentityError(KVTierError):
    """Stored data belongs to another cache. The message lists what differs."""


class RegionError(KVTierError):
    """The primary tier's region cannot be made. The message names needed and free bytes."""


class IsolationError(KVTierError):
    """No process of the tiers can be started here. The message says why."""


class StateError(KVTierError):
    """A move that the state tables do not allow: a bug in kvtier or in its caller."""


class TransferError(KVTierError):
    """A copy between the device and the primary tier failed, and so did its repetition."""


class DeviceLostError(TransferError):
    """The device does no more work for this process. The message says how that was found."""


class DeviceStuckError(DeviceLostError):
    """A copy has not ended by its deadline. Its bytes may still move: what it touches is not free."""


class AuditError(TransferError):
    """A copy has not brought the bytes that it was to bring, and has not failed either."""


class DamagedSlotError(AuditError):
    """A slot does not hold any more what was brought into it: to copy it once more is of no use."""
