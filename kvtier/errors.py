"""The errors of kvtier. Each message says what is wrong and how to fix it."""

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
    """No tier process can be started. The message says why."""


class StateError(KVTierError):
    """A call that the object's state does not allow: a bug in kvtier or in its caller."""


class TransferError(KVTierError):
    """A copy between device and primary tier failed, and so did its retry; or a reset overtook a load."""


class DeviceLostError(TransferError):
    """The device no longer works for this process. The message names the failed operation."""


class DeviceStuckError(DeviceLostError):
    """A copy did not end by its deadline. It may still run, so its blocks and slots stay reserved."""


class AuditError(TransferError):
    """A copy reported success, but the bytes differ."""


class BlocksChangedError(TransferError):
    """The engine wrote to the blocks of a store before their copy had ended, so nothing of it is stored."""


class DamagedSlotError(AuditError):
    """A slot changed after it was filled, so copying it again does not help."""
