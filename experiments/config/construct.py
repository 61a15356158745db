"""The objects that a resolved configuration names by `_target_`: only classes of the right kind, with arguments they take."""

from __future__ import annotations

import contextlib
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra.utils
from hydra.errors import HydraException

from experiments.config import validate
from experiments.config.kinds import shown
from experiments.config.schema_optimizer import OPTIMIZERS
from experiments.records import record
from experiments.workloads.files import ends_fingerprint, fingerprint, reading
from launch.base import Launcher
from launch.errors import UserError, refused
from launch.words import one_line

if TYPE_CHECKING:
    from experiments.workloads.base import Workload

WORKER = Path(__file__).resolve().parents[1] / "training" / "worker.py"


def workload(resolved: dict[str, Any]) -> Workload:
    """The workload of a resolved configuration, constructed and checked. Raises UserError."""
    from experiments.workloads.base import Workload

    made = _construct(resolved["workload"], "workload", Workload)
    with reading(resolved["data"]["path"]):
        made.check()
    return made


def data(resolved: dict[str, Any]) -> dict[str, Any]:
    """The section `data`, with fingerprints of what records keep the last component of a path of: `files`, what the workload
    reads at data.path, and `weights`, what its model begins with. Without one where that is nothing, or cannot be read, which
    the run itself will say."""
    from experiments.workloads.base import Workload

    found = dict(resolved["data"])
    with contextlib.suppress(UserError, OSError):
        made = _construct(resolved["workload"], "workload", Workload)
        if found["path"] is not None and (files := made.data_files()):
            found["files"] = fingerprint(files)
        if files := made.weight_files():
            found["weights"] = ends_fingerprint(files)
    return found


def launcher(resolved: dict[str, Any]) -> Any:
    """The launcher of a resolved configuration. Raises UserError."""
    made = _construct(resolved["cluster"], "cluster", Launcher)
    made.worker, made.on_failure = WORKER, record.write_failed
    return made


def _class(section: dict[str, Any], name: str, base: type) -> type:
    """The class that `section` names. Raises UserError unless it is there and a `base`."""
    target = section["_target_"]
    try:
        cls = pkgutil.resolve_name(target)
    except Exception as error:  # whatever a module of the user's raises while it is imported
        raise UserError(f"no class {name}._target_={shown(target)}: {one_line(str(error))}") from error
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise UserError(f"{name}._target_={shown(target)} is not a {base.__name__}")
    return cls


def _construct(section: dict[str, Any], name: str, base: type) -> Any:
    """An object of the class that `section` names. Raises UserError."""
    cls = _class(section, name, base)
    validate.arguments(cls, section, name)
    try:
        return hydra.utils.instantiate(section)
    except HydraException as error:
        if (ours := user_error(error)) is not None:
            raise ours from error
        raise UserError(f"{name}: {one_line(str(error.__cause__ or error))}") from error


def check_classes(resolved: dict[str, Any]) -> None:
    """Raises UserError unless `optimizer` and `cluster` name classes of the right kind."""
    from birder import BucketOptimizer

    _class(resolved["cluster"], "cluster", Launcher)
    section = resolved["optimizer"]
    cls = _class(section, "optimizer", BucketOptimizer)
    if section["_target_"] not in OPTIMIZERS:  # a class of the user's: its keys are known by its constructor alone
        validate.arguments(cls, {"params": (), **section}, "optimizer")
    if resolved["comm"]["topology"] == "hsdp":
        from birder.hooks import fsdp  # torch takes a second to load its own

        with refused("comm.topology=hsdp", TypeError):
            fsdp.check_method(cls)


def user_error(error: BaseException | None) -> UserError | None:
    """The UserError that a resolver or a constructor raised, from below what Hydra and OmegaConf wrap around it."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__ or error.__context__
    return error
