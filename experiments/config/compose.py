"""From the command line to a checked `RunSpec`: the only place that knows Hydra's composed configuration.

Importing this module registers the source of conf/hparams (hparams.py) and the resolvers that conf/ uses:

${scaled:key}    the value of `key` in `scales.<scale.name>` of the workload's file
${lr_rule:0.1}   0.1 * batch / 256, the batch being that of one GPU or of all, as `train.lr_batch` says
${auto_scale:}   "paper" where there are a GPU and data at `data.path`, else "quick"
"""

from __future__ import annotations

import contextlib
import difflib
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra.utils
import omegaconf
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf

from experiments.config import hparams, same_run, schedules, validate
from experiments.records import record
from launch import hosts
from launch.errors import UserError
from launch.spec import RunSpec

if TYPE_CHECKING:
    from experiments.workloads.base import Workload

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
WORKER = ROOT / "experiments" / "training" / "worker.py"
CONFIG_ERRORS = (HydraException, omegaconf.errors.OmegaConfBaseException)


@dataclass(frozen=True)
class Composed:
    """One composed configuration.

    config:    as Hydra composed it, not yet resolved, without the `hydra` node.
    choices:   the chosen file of each group, e.g. {"optimizer": "birder", ...}.
    overrides: what was typed, in order.
    """

    config: DictConfig
    choices: dict[str, str]
    overrides: list[str]


def compose(overrides: Sequence[str], config_dir: Path = CONF) -> Composed:
    """Composes conf/config.yaml with `overrides`. Raises UserError for whatever Hydra cannot make of them."""
    overrides = quote_hosts(overrides)
    try:
        full = _compose(overrides, config_dir)
    except CONFIG_ERRORS as error:
        raise explain(error, overrides, config_dir) from error
    return from_hydra(full, list(overrides))


def quote_hosts(overrides: Sequence[str]) -> list[str]:
    """`overrides` with the value of cluster.hosts=a,b,c in quotes: Hydra would take it for three runs."""
    return [re.sub(r"""^(\+*cluster\.hosts=)(?!\[|"|null$)'?(.+?)'?$""", r'\1"\2"', o) for o in overrides]


def from_hydra(full: DictConfig, overrides: Sequence[str]) -> Composed:
    """Splits a configuration that holds the `hydra` node."""
    choices = {k: v for k, v in full.hydra.runtime.choices.items() if v is not None}
    with omegaconf.open_dict(full):
        config = full.copy()
        config.pop("hydra")
    return Composed(config, choices, list(overrides))


def check(composed: Composed, *, rank_zero: bool = True) -> Workload:
    """Checks everything that can be known before a process starts, the cheapest first. Raises UserError.

    Returns the workload, constructed and checked. `rank_zero`: also check the folders that only rank 0 writes.
    """
    resolved = resolve(composed)
    if rank_zero:
        for key in ("output_dir", "results_dir"):
            validate.check_writable(key, Path(resolved[key]))
    return workload(resolved)


def resolve(composed: Composed) -> dict[str, Any]:
    """The configuration as plain dicts, lists and scalars, every key within its range. Raises UserError."""
    config = composed.config

    def get(key: str) -> Any:
        value = OmegaConf.select(config, key, throw_on_missing=True)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value

    def has(key: str) -> bool:
        parent, _, last = key.rpartition(".")
        section = OmegaConf.select(config, parent) if parent else config
        return isinstance(section, DictConfig) and last in section.keys()  # noqa: SIM118 "in section" skips missing

    try:
        _count_hosts(composed)
        validate.check(get, has, validate.FIRST)
        validate.check(get, has, validate.REST)
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except CONFIG_ERRORS as error:
        raise explain(error, composed.overrides) from error
    assert isinstance(plain, dict)
    resolved = {str(k): v for k, v in plain.items() if k not in ("compare", "tune")}  # no part of this run
    schedules.check(resolved["train"]["lr_schedule"])
    validate.check_hook(resolved)
    if resolved["run_name"] is not None:
        validate.check_name("run_name", resolved["run_name"])
    elif resolved["resume"] == "auto":
        raise UserError("resume=auto needs run_name=NAME, the name of the run to go on with")
    return resolved


def workload(resolved: dict[str, Any]) -> Workload:
    """The workload of a resolved configuration, constructed and checked. Raises UserError."""
    section = resolved["workload"]
    try:
        made = hydra.utils.instantiate(section)
    except HydraException as error:
        raise _from_constructor(error, section["_target_"], "workload") from error
    made.check()
    return made


def launcher(resolved: dict[str, Any]) -> Any:
    """The launcher of a resolved configuration. Raises UserError."""
    section = resolved["cluster"]
    try:
        made = hydra.utils.instantiate(section)
    except HydraException as error:
        raise _from_constructor(error, section["_target_"], "cluster") from error
    made.worker, made.on_failure = WORKER, record.write_failed
    return made


def make_spec(composed: Composed, *, command: str, group: str | None = None) -> RunSpec:
    """The description of one run. Writes nothing. Raises UserError.

    A run with `run_name` lives in the directory of that name; with resume=auto it keeps the id it was given first.
    """
    resolved = resolve(composed)
    exp = str(resolved["exp"])
    validate.check_name("exp", exp)
    optimizer = composed.choices.get("optimizer") or resolved["optimizer"]["_target_"].rpartition(".")[2].lower()
    run_id = f"{new_stamp()}-{exp}-{optimizer}-{secrets.token_hex(2)}"
    run_dir = Path(resolved["output_dir"]) / exp / (resolved["run_name"] or run_id)
    if (run_dir / "spec.yaml").exists():
        if resolved["resume"] != "auto":
            raise UserError(f"{run_dir} holds a run already: go on with it (resume=auto) or choose another run_name")
        run_id = same_run.go_on(run_dir, resolved)
    return RunSpec(
        id=run_id,
        group=group,
        exp=exp,
        command=command,
        overrides=list(composed.overrides),
        config=resolved,
        run_dir=str(run_dir),
    )


def new_stamp() -> str:
    """The time as names of runs and groups begin with it: UTC, yyyymmdd-hhmmss."""
    return datetime.now(UTC).strftime("%Y%m%d-%H%M%S")


def explain(error: Exception, overrides: Sequence[str], config_dir: Path = CONF) -> UserError:
    """What an error of Hydra or OmegaConf means to the user, as one line."""
    text = str(error)
    if (ours := _user_error(error)) is not None:
        return ours
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        files = error.options or [p.stem for p in (config_dir / group).glob("*.yaml")]
        there = ", ".join(sorted(files)) or "none"
        words = {"exp": "experiment"}.get(group, group)
        return UserError(f"no {words} '{name}'; there are: {there}") if group else UserError(_first_line(text))
    if isinstance(error, OverrideParseException):
        return UserError(f"cannot read the override '{error.override}': write key=value, and quote special characters")
    if isinstance(error, ConfigCompositionException):
        if match := re.match(r"Could not (?:override|delete from config)[.]? '([^']+)'", text):
            return _unknown_key(match[1], overrides, config_dir)
        return UserError(_first_line(text))
    if isinstance(error, omegaconf.errors.MissingMandatoryValue):
        key = error.full_key or text.rpartition(" ")[2]
        return UserError(f"{key} has no value: set it with {key}=VALUE")
    # OmegaConf writes "<what happened>\n    full_key: <where>\n    object_type=..."
    where = re.search(r"full_key: (\S+)", text)
    return UserError(_first_line(text) + (f" (at {where[1]})" if where else ""))


def _compose(overrides: Sequence[str], config_dir: Path) -> DictConfig:
    # Within hydra.main the global state belongs to the running application: put it back afterwards.
    state = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(config_dir), version_base="1.3"):
            return hydra_compose("config", overrides=list(overrides), return_hydra_config=True)
    finally:
        GlobalHydra.instance().hydra = state


def _unknown_key(key: str, overrides: Sequence[str], config_dir: Path) -> UserError:
    """The nearest names to a key that does not exist."""
    if key == "exp":
        return UserError("an experiment is added with a plus: +exp=NAME")
    groups = sorted(p.name for p in config_dir.iterdir() if p.is_dir())
    known: list[str] = list(groups)
    others = [o for o in overrides if key not in o]
    with contextlib.suppress(*CONFIG_ERRORS):  # a second mistake: the group names must do
        known += _keys(from_hydra(_compose(others, config_dir), others).config)
        known = [k for k in known if not k.startswith("scales")]  # reached through scale=NAME
    near = difflib.get_close_matches(key, known, n=3, cutoff=0.6)
    if not near:  # the right name in the wrong section
        last = key.rpartition(".")[2]
        near = [k for k in known if k.rpartition(".")[2] == last][:3]
    if not near and "." in key:
        near = [k for k in known if k.startswith(key.rpartition(".")[0] + ".")][:8]
    hint = f"did you mean {' or '.join(near)}?" if near else "`--cfg job` shows all keys"
    return UserError(f"no key '{key}' in the configuration; {hint}")


def _keys(section: DictConfig, prefix: str = "") -> list[str]:
    found: list[str] = []
    for name in section:
        key = str(name)
        found.append(prefix + key)
        if not OmegaConf.is_missing(section, key) and not OmegaConf.is_interpolation(section, key):
            value = section[key]
            if isinstance(value, DictConfig):
                found += _keys(value, f"{prefix}{key}.")
    return found


def _count_hosts(composed: Composed) -> None:
    """Where nodes are a list of hosts, their number is that of the list, unless the user typed one too."""
    cluster = composed.config.cluster
    typed = any(o.lstrip("+").startswith("cluster.nodes=") for o in composed.overrides)
    if "hosts" in cluster.keys() and not (typed and cluster.nodes is not None):  # noqa: SIM118
        cluster.nodes = len(hosts.parse(cluster.hosts))


def _from_constructor(error: HydraException, target: str, section: str) -> UserError:
    if (ours := _user_error(error)) is not None:
        return ours
    cause = error.__cause__
    if isinstance(cause, TypeError | ValueError):
        return UserError(f"{section}: {_first_line(str(cause))}")
    if cause is None or isinstance(cause, ImportError | AttributeError):
        return UserError(f"cannot make {section}._target_={target}: {_first_line(str(cause or error))}")
    raise cause


def _user_error(error: BaseException | None) -> UserError | None:
    """The UserError that a resolver or a constructor raised, from below what Hydra and OmegaConf wrap around it."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__ or error.__context__
    return error


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "unknown error")


def _scaled(key: str, *, _root_: DictConfig) -> Any:
    name = str(_root_.scale.name)
    scales = _root_.get("scales") or {}
    if name not in scales:
        raise UserError(f"scale.name must be one of {', '.join(map(str, scales)) or 'quick, paper'}, not '{name}'")
    if key not in scales[name]:
        raise UserError(f"this workload sets no '{key}' for scale {name}: add it to scales.{name}")
    return scales[name][key]


def _lr_rule(base: float, *, _root_: DictConfig) -> float:
    train, cluster = _root_.train, _root_.cluster
    batch = train.batch_per_rank * train.accumulate
    if train.lr_batch == "total":
        batch *= cluster.nodes * cluster.ranks_per_node
    return float(base) * batch / 256


def _auto_scale(*, _root_: DictConfig) -> str:
    from launch.local import visible_gpus

    path = _root_.data.path
    return "paper" if path is not None and Path(path).exists() and visible_gpus() else "quick"


def _register() -> None:
    resolvers: dict[str, Callable[..., Any]] = {"scaled": _scaled, "lr_rule": _lr_rule, "auto_scale": _auto_scale}
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    hparams.register()


_register()
