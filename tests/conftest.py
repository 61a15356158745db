"""For all tests: one thread each, a cache of kernels for each worker of pytest-xdist, and which tests stay on one worker."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pickle
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Ranks outnumber the cores. A thread that sends wakes the one that receives, which takes its core while it still holds the
# lock of the connection, and gloo's own thread spins until the sender runs again. Batch jobs do not preempt each other.
with contextlib.suppress(AttributeError, OSError):  # Linux has it, a sandbox may forbid it
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
gc.disable()  # until all tests are collected: what is imported and collected stays, and is looked through in vain
# Before torch and numba are imported. Workers that share two cores gain nothing by more threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # a process of a test that aborts says where each of its threads was
# numba's files of compiled kernels are not made for several writers: a worker, which inherits this, begins with a copy.
kernels = Path(os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache/numba")))
worker = os.environ.get("PYTEST_XDIST_WORKER")
if worker and kernels.name != worker:
    if kernels.is_dir() and not (kernels / worker).exists():
        shutil.copytree(kernels, kernels / worker, ignore=shutil.ignore_patterns("gw*", "*.tmp.*"))
    os.environ["NUMBA_CACHE_DIR"] = str(kernels / worker)

from hydra._internal.config_repository import ConfigRepository  # noqa: E402
from omegaconf import DictConfig  # noqa: E402

from experiments.config import compose  # noqa: E402
from experiments.tracking import wandb_run  # noqa: E402
from launch.base import Launcher  # noqa: E402

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a background job inherits it, and would hand it on
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.pop("COLUMNS", None)  # tables are as wide as in a pipe
os.environ["WANDB_MODE"] = "disabled"  # what wandb=auto, the default, goes by; tests of W&B choose a mode themselves
os.environ["WANDB__SERVICE_WAIT"] = "600"  # for its service process, 30 s otherwise: a busy machine needs longer
wandb_run.INIT_S = wandb_run.FINISH_S = 600.0
# The same examples in every run: one that is found once in a hundred runs is to be found on purpose.
EVERY = list(hypothesis.HealthCheck)  # how long examples take to make, for one
hypothesis.settings.register_profile(
    "same", derandomize=True, deadline=None, database=None, suppress_health_check=EVERY
)
hypothesis.settings.load_profile("same")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(wrapper=True)  # before pytest-xdist, which reads the marks in this hook too, and would come first
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Tests of a file that share something dear run on one worker, and so do those of the group "sandbox".

    Dear: a fixture of the module, or what a function of the file keeps (functools.cache).
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None and isinstance(item, pytest.Function) and _shares(item):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    yield
    grouped = [item for item in items if item.get_closest_marker("xdist_group")]
    if getattr(config.option, "loadgroup", False) and any("@" not in item.nodeid for item in grouped):
        raise pytest.UsageError("this pytest-xdist does not group tests under this pytest: pytest<9.2 does")
    items.sort(key=functools.partial(_place, _groups(items)))  # of equal ones the order stays random


def _groups(items: Sequence[pytest.Item]) -> dict[str, tuple[bool, int]]:
    """Of each group of tests that stay on one worker: whether it holds a long one, and how many they are."""
    found: dict[str, tuple[bool, int]] = {}
    for item in items:
        long, count = found.get(name := _group(item), (False, 0))
        found[name] = (long or any(map(item.get_closest_marker, ("long", "cluster"))), count + 1)
    return found


def _group(item: pytest.Item) -> str:
    mark = item.get_closest_marker("xdist_group")
    return item.nodeid if mark is None else f"@{mark.args[0]}"


def _place(groups: dict[str, tuple[bool, int]], item: pytest.Item) -> tuple[bool, int]:
    """Long groups begin, then large ones: no worker shall be left with one at the end."""
    long, count = groups[_group(item)]
    return not long, -count


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """How to have the same order again."""
    seed = getattr(config.option, "randomly_seed", None)
    if seed is not None and (terminalreporter.stats.get("failed") or terminalreporter.stats.get("error")):
        terminalreporter.write_line(f"this order: --randomly-seed={seed}")


def _shares(item: pytest.Function) -> bool:
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    of_module = any(d.scope == "module" and d.baseid == item.nodeid.partition("::")[0] for ds in fixtures for d in ds)
    return of_module or _keeps(item.module)


@functools.cache
def _keeps(module: object) -> bool:
    return any(hasattr(value, "cache_info") for value in vars(module).values())


@pytest.fixture(scope="session", autouse=True)
def composed_once() -> Iterator[None]:
    """Hydra composes each list of overrides of conf/ once, and reads each file of it once; later calls get a copy."""
    made: dict[tuple[str, ...], bytes] = {}
    read: dict[tuple[str, ...], bytes] = {}
    plain, load = compose._compose, ConfigRepository.load_config

    def loaded(self: ConfigRepository, config_path: str) -> Any:
        key = (config_path, *(source.path for source in self.sources))
        if key not in read:
            read[key] = pickle.dumps(load(self, config_path))
        return pickle.loads(read[key])

    def kept(overrides: Sequence[str], config_dir: Path) -> DictConfig:
        if config_dir != compose.CONF:
            return plain(overrides, config_dir)
        key = tuple(overrides)
        if key not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ConfigRepository, "load_config", loaded)
                made[key] = pickle.dumps(plain(overrides, config_dir))
        return pickle.loads(made[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "_compose", kept)
        yield


@pytest.fixture(autouse=True)
def draws_do_not_depend_on_the_tests_before() -> None:
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def launchers_start_ranks_of_this_project(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that a test makes by hand starts what one from the configuration starts."""
    monkeypatch.setattr(Launcher, "worker", compose.WORKER, raising=False)
