"""What is seen of a process from outside is what it holds."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
import threading
from multiprocessing import shared_memory
from pathlib import Path

from tests.soak.vitals import SharedMemory, Vitals, on_disk, zombies_of

MIB = 1 << 20


def test_memory_descriptors_and_threads_are_seen(tmp_path: Path) -> None:
    gc.collect()  # or what others have left is given back between the two looks
    before = Vitals.of(os.getpid(), tmp_path)
    held = mmap.mmap(-1, 8 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # not what was freed before
    held.write(os.urandom(8 * MIB))
    end = threading.Event()
    threads = [threading.Thread(target=end.wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    with (tmp_path / "file").open("w"), open(os.devnull), open(os.devnull):
        after = Vitals.of(os.getpid(), tmp_path)
    end.set()
    for thread in threads:
        thread.join()
    assert 7 * MIB < after.memory_bytes - before.memory_bytes < 24 * MIB
    assert after.disk_files - before.disk_files == 1
    assert after.other_files - before.other_files == 2
    assert after.threads - before.threads == 3
    held.close()


def test_what_is_in_shared_memory_is_ones_own_from_when_one_was_seen_with_it_to_its_end() -> None:
    ours = SharedMemory()
    memory = shared_memory.SharedMemory(create=True, size=2 * MIB)
    try:
        assert ours.left() == (0, 0)
        assert memory.buf is not None
        memory.buf[:MIB] = os.urandom(MIB)
        ours.look([os.getpid()])
        memory.close()
        ours.look([os.getpid()])
        assert ours.left() == (1, MIB)
        assert SharedMemory().left() == (0, 0), "others begin with what is there"
    finally:
        memory.unlink()
    assert ours.left() == (0, 0)


def test_what_lies_below_a_folder_is_counted(tmp_path: Path) -> None:
    assert on_disk(tmp_path) == (0, 0)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(bytes(64 * 1024))
    count, nbytes = on_disk(tmp_path)
    assert count == 2
    assert 64 * 1024 <= nbytes < 80 * 1024
    assert on_disk(tmp_path / "missing") == (0, 0)


def test_children_that_nobody_has_waited_for_are_seen() -> None:
    before = zombies_of(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.read()  # its end
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert zombies_of(os.getpid()) == before + 1
    child.stdout.close()
    child.wait()
    assert zombies_of(os.getpid()) == before
