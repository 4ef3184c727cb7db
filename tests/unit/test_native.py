"""The native library and its fallback give the same copies and checksums."""

from __future__ import annotations

import ctypes
import errno
import mmap
import random
import shutil
from pathlib import Path
from typing import Any

import crc32c as reference
import pytest

from kvtier import _native as native
from kvtier._native import build
from tests.common import load_file

pytestmark = pytest.mark.timeout(300)  # a busy machine needs minutes to compile
needs_library = pytest.mark.skipif(native.library is None, reason="the native library is not built")


def load_from(folder: Path) -> Any:
    """Import a second copy of the module, with the library in ``folder``, if any."""
    return load_file("second_native", folder / "__init__.py")


@pytest.fixture(params=["native", "python"])
def helper(request, monkeypatch):
    """The module with its library, and without it."""
    if request.param == "native":
        if native.library is None:
            pytest.skip("the native library is not built")
        return native
    monkeypatch.setenv("KVTIER_NATIVE", "0")
    module = load_from(Path(native.__file__).parent)
    assert module.available is False
    return module


def address_of(buffer):
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def checksum(name):
    """Return a function of the library: it continues a checksum over bytes at an address."""
    function = getattr(native.library, name)
    function.argtypes, function.restype = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_uint32
    return function


LENGTHS = [0, 1, 7, 8, 9, 255, 767, 768, 769, 12287, 12288, 12289, 100_003, 2**21]


@needs_library
@pytest.mark.parametrize("length", LENGTHS)
def test_crc32c_matches_package(length):
    data = bytearray(random.Random(length).randbytes(length + 9))
    for offset in (0, 3):
        expected = reference.crc32c(memoryview(data)[offset : offset + length], 12345)
        assert checksum("kvt_crc32c")(12345, address_of(data) + offset, length) == expected


@needs_library
@pytest.mark.parametrize("length", LENGTHS)
def test_crc32c_without_instruction(length):
    data, value = random.Random(length).randbytes(length), length * 2654435761 % 2**32
    buffer = bytearray(data + b"x")
    for name in ("kvt_crc32c_portable", "kvt_crc32c"):
        assert checksum(name)(value, address_of(buffer), len(data)) == reference.crc32c(data, value)


def test_populate_keeps_bytes(helper):
    length = 64 * mmap.PAGESIZE
    region = mmap.mmap(-1, length)
    region[5] = 99
    before = _resident_pages()
    failed = helper.populate(address_of(region), length)
    if failed and not helper.available:
        assert failed == errno.EINVAL
        pytest.skip("this kernel cannot populate, and Python must not")
    assert failed == 0
    assert _resident_pages() - before >= 48
    assert region[5] == 99
    assert region[:5] + region[6:] == bytes(length - 1)


def _resident_pages():
    return int(Path("/proc/self/statm").read_text().split()[1])


def test_unloadable_library_is_unused(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("KVTIER_NATIVE", "1")
    shutil.copy(native.__file__, tmp_path / "__init__.py")
    (tmp_path / native.LIBRARY_NAME).write_bytes(b"no library")
    module = load_from(tmp_path)
    assert module.available is False
    assert "cannot be loaded" in caplog.text


# ---------------------------------------------------------------------------------- building


@pytest.fixture
def source_folder(tmp_path):
    """A folder with the project's layout, with the source and no library."""
    folder = tmp_path / "kvtier" / "_native"
    folder.mkdir(parents=True)
    for name in ("__init__.py", *build.SOURCES, *build.HEADERS):
        shutil.copy(Path(native.__file__).with_name(name), folder)
    return folder


def _has_compiler():
    try:
        build.compiler()
    except build.BuildError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not _has_compiler(), reason="there is no C compiler")


@needs_compiler
def test_source_compiles_cleanly(source_folder, monkeypatch):
    monkeypatch.setenv("KVTIER_NATIVE", "1")
    library = build.compile_library(source_folder, ("-Werror",))
    assert [path.name for path in source_folder.glob("*.so*")] == [library.name]
    assert load_from(source_folder).available is True


@needs_compiler
def test_other_version_is_unused(source_folder, caplog, monkeypatch):
    monkeypatch.setenv("KVTIER_NATIVE", "1")
    source = source_folder / build.SOURCE
    source.write_text(source.read_text().replace("#define KVT_ABI ", "#define KVT_ABI 9"))
    build.compile_library(source_folder, ("-O0",))
    assert load_from(source_folder).available is False
    assert f"(9{native.ABI}, not {native.ABI})" in caplog.text


@needs_compiler
@pytest.mark.parametrize(
    ("file", "before", "after", "struct"),
    [
        ("kvtier_native.h", "uint32_t flags;", "uint64_t flags;", "call"),
        ("scan.c", "int64_t want_bytes;", "int32_t want_bytes;", "chunk_scan"),
        ("kvtier_native.c", "int64_t failed; ", "int32_t failed; ", "tree_sums"),
    ],
)
def test_other_layout_is_unused(source_folder, caplog, monkeypatch, file, before, after, struct):
    monkeypatch.setenv("KVTIER_NATIVE", "1")
    text = (source_folder / file).read_text()
    assert before in text
    (source_folder / file).write_text(text.replace(before, after))
    build.compile_library(source_folder, ("-O0",))
    loaded = load_from(source_folder)
    assert loaded.available is False
    assert f"(struct {struct} differs)" in loaded.missing_because
    assert f"native library not loaded ({loaded.missing_because})" in caplog.text


@needs_compiler
def test_failed_compile_leaves_nothing(source_folder, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    (source_folder / build.SOURCE).write_text("int main(")
    with pytest.raises(build.BuildError, match="ended with 1"):
        build.compile_library(source_folder)
    assert list(source_folder.glob("*.so*")) == []


def test_missing_compiler_is_named(source_folder, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(build.BuildError, match="no C compiler"):
        build.compile_library(source_folder)
    monkeypatch.setenv("CC", "/nowhere/cc -m64")
    with pytest.raises(build.BuildError, match="/nowhere/cc cannot be run"):
        build.compile_library(source_folder)


class Application:
    """The application object that hatchling passes to a hook for its output."""

    def __init__(self):
        self.warnings = []

    def display_warning(self, text):
        self.warnings.append(text)


def run_hook(root):
    """Run the build hook. Return its changes to the build, and its warnings."""
    pytest.importorskip("hatchling")
    application = Application()
    make_hook: Any = build.CustomBuildHook  # the test does not need hatchling's own objects
    hook = make_hook(str(root), {}, None, None, "", "wheel", application)
    data = {"artifacts": [], "pure_python": True, "infer_tag": False, "tag": ""}
    hook.initialize("standard", data)
    return data, application.warnings


def test_wheel_without_helper_is_pure(source_folder, monkeypatch):
    monkeypatch.setenv("CC", "/nowhere/cc")
    data, warnings = run_hook(source_folder.parent.parent)
    assert (data["artifacts"], data["pure_python"], data["tag"]) == ([], True, "")
    assert len(warnings) == 1
    assert "/nowhere/cc" in warnings[0]
