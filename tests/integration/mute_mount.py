"""A file system that never answers: ``python -m tests.integration.mute_mount POINT``. A process that opens
one of its files hangs in the kernel, beyond the reach of signals, until this process ends."""

from __future__ import annotations

import os
import struct
import subprocess
import sys

from kvtier_bench.engine.process import die_with_parent

_INIT = 26
_REQUEST_BYTES = 1 << 17


def main(point: str) -> None:
    """Mount it, print "mounted", and read the kernel's requests: once read, a request is uninterruptible."""
    die_with_parent()
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    mount = ["mount", "-i", "-t", "fuse", "-o", options, "kvtier-tests", point]
    subprocess.run(mount, pass_fds=[device], check=True)
    while request := os.read(device, _REQUEST_BYTES):
        _, kind, unique = struct.unpack_from("<IIQ", request)
        if kind == _INIT:
            answer = struct.pack("<4IHHIIH", 7, 31, 0, 0, 1, 1, 4096, 1, 1).ljust(64, b"\0")
            os.write(device, struct.pack("<IiQ", 16 + len(answer), 0, unique) + answer)
            print("mounted", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
