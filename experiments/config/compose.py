"""From the command line to a checked `RunSpec`: the only place that knows Hydra's composed configuration.

Importing it registers the source of conf/hparams (hparams.py) and what ${...} may call (resolvers.py).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import re
import secrets
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import omegaconf
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel

from experiments.config import explain as messages
from experiments.config import hparams, resolvers, rules, same_run, schedules, validate
from experiments.config.construct import WORKER as WORKER  # passed on, as `launcher` and `workload` are
from experiments.config.construct import check_classes
from experiments.config.construct import data as data
from experiments.config.construct import launcher as launcher
from experiments.config.construct import workload as workload
from experiments.config.data_files import CONF
from experiments.config.explain import CONFIG_ERRORS
from experiments.records import labels, old_keys
from launch import hosts
from launch.errors import UserError
from launch.spec import RunSpec
from launch.words import say

if TYPE_CHECKING:
    from experiments.workloads.base import Workload


_HOSTS = re.compile(r"""^(\+*cluster\.hosts=)(?!\[|"|null$)'?(.+?)'?$""")
_PATH = re.compile(r"""^(\+*(?:data\.path|output_dir|results_dir)=)(["']?)(?!\w+\(|\[)([^"'{},]+)\2$""")
_OWN = re.compile(r"hydra(\.(run\.dir|sweep\.(sub)?dir|output_subdir|job\.(chdir|env_(set|copy)\b.*))|/launcher)")
"""Keys of Hydra that say where a run is kept, which the run's own keys do, or how jobs are started, variables included."""
_warned: set[str] = set()
"""What `_warn` has said: a comparison composes each of its variants."""


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
    resolved: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list, repr=False, compare=False)
    """What `resolve` has found: (the configuration, resolved); one at most."""

    @property
    def command(self) -> str:
        """The command line of this run alone, as the user would type it again."""
        start, there = "python", self.config.cluster
        if there.name == "torchrun":  # as runs/start.py calls a world that it has joined
            start = f"torchrun --nnodes {there.nodes} --nproc-per-node {there.ranks_per_node}"
        return f"{start} {shlex.join(['experiments/run.py', *self.overrides])}"


def compose(overrides: Sequence[str]) -> Composed:
    """Composes conf/config.yaml with `overrides`. Raises UserError for whatever Hydra cannot make of them."""
    overrides = readable(overrides)
    try:
        made = _from_hydra(overrides, CONF)
    except CONFIG_ERRORS as error:
        raise explain(error, overrides) from error
    validate.check(_dicts(made.config), structure_only=True)
    return made


def plain(overrides: Sequence[str], config_dir: Path, schema: type[BaseModel]) -> dict[str, Any]:
    """Another configuration than a run's: `config_dir`/config.yaml with `overrides`, resolved, as its schema has it.

    Raises UserError.
    """
    try:
        found = _dicts(_from_hydra(overrides, config_dir).config, resolve=True)
    except CONFIG_ERRORS as error:
        raise messages.explain(error, config_dir, lambda _: list(dict(validate.fields(schema)))) from error
    validate.check_section(schema, found)
    return found


def compared(composed: Composed) -> list[list[str]]:
    """What a configuration lists under `compare`: the overrides of each variant. Empty where it compares nothing."""
    listed = _value(composed.config, "compare")
    validate.check_some(["compare"], lambda _: listed, _dicts(composed.config))
    return [list(variant) for variant in listed]


def key_of(override: str) -> str:
    """What an override sets, adds or removes: `key` of key=value, +key=value, ++key=value and ~key."""
    return override.lstrip("+~").partition("=")[0]


def unless_given(own: Sequence[str], given: Sequence[str]) -> list[str]:
    """Those of `own` overrides that the user's do not replace. Whoever chooses a cluster chooses all of it."""
    keys = set(map(key_of, given))
    kept = [o for o in own if key_of(o) not in keys]
    return [o for o in kept if not (o.startswith("cluster") and "cluster" in keys)]


def readable(overrides: Sequence[str]) -> list[str]:
    """`overrides` as Hydra reads what was meant. In quotes: cluster.hosts=a,b,c, which it would take for three runs, and
    a path with a character that its grammar lacks (one with a comma may be a sweep over two). ~ is the home folder.
    Renamed keys have their new names; one warning names those, once. Raises UserError for keys of Hydra's that would do
    nothing."""
    if wrong := [key for key in map(key_of, overrides) if _OWN.fullmatch(key)]:
        own = "output_dir, run_name and results_dir say where a run is kept, and jobs run one after the other"
        if ".env_" in wrong[0]:
            own = "set a variable in the shell, NAME=VALUE python ..., or on ssh's hosts by cluster.env"
        raise UserError(f"{wrong[0]} is not used here: {own}")
    lists = [f"{group}=[" for group in ("exp", *validate.GROUPS)]  # Hydra would compose one file over the other
    if wrong := [o for o in overrides if o.lstrip("+").startswith(tuple(lists))]:
        raise UserError(f"{key_of(wrong[0])} is one name, not a list; run.py -m runs each of NAME,NAME")
    now, renamed = old_keys.overrides(_HOSTS.sub(r'\1"\2"', _PATH.sub(_path, o)) for o in overrides)
    _warn(renamed)
    return now


def _path(match: re.Match[str]) -> str:
    key, quote, path = match.groups()
    quote = quote or ('"' if re.search(r"[^ -~]|[()=#&!;<>^`~\[\]]", path) else "")
    return f"{key}{quote}{os.path.expanduser(path)}{quote}"


def composed(config: DictConfig, choices: dict[str, str], overrides: Sequence[str]) -> Composed:
    """What Hydra has composed, without the `hydra` node. Files may hold keys under their old names."""
    if old := old_keys.names(raw := _dicts(config)):
        _warn([f"{name} is now {old_keys.RENAMED[name][0]}" for name in old])
        config = OmegaConf.create(old_keys.config(raw, typed=set(map(key_of, overrides))))
    return Composed(config, choices, list(overrides))


def check(composed: Composed, *, rank_zero: bool = True) -> Workload:
    """Checks everything that can be known before a process starts, the cheapest first. Raises UserError.

    Returns the workload, constructed and checked. `rank_zero`: also check the folders that only rank 0 writes.
    """
    resolved = resolve(composed)
    if rank_zero:
        for key in ("output_dir", "results_dir"):
            rules.check_writable(key, Path(resolved[key]))
    made = workload(resolved)
    check_classes(resolved)
    return made


def resolve(composed: Composed) -> dict[str, Any]:
    """The configuration as plain dicts, lists and scalars, every key within its range. Raises UserError.

    Done once for a configuration, however often it is asked for; what is returned is the caller's own.
    """
    if not composed.resolved or composed.resolved[0][0] != _dicts(composed.config):
        found = _resolve(composed)
        composed.resolved[:] = [(_dicts(composed.config), found)]
    return copy.deepcopy(composed.resolved[0][1])


def _resolve(composed: Composed) -> dict[str, Any]:
    config, get = composed.config, functools.partial(_value, composed.config)
    try:
        raw = _dicts(config)
        validate.check(raw, structure_only=True)
        validate.check_some(validate.PLACES, get, raw)
        _count_hosts(composed)
        validate.check_some(validate.FIRST, get, raw)
        everything = _dicts(config, resolve=True, throw_on_missing=True)
    except CONFIG_ERRORS as error:
        raise explain(error, composed.overrides) from error
    validate.check(everything)
    rules.check_scales(everything["scales"])
    rules.check_hook(everything)
    rules.check_device(everything["cluster"])
    rules.check_precision(everything)
    rules.check_data(everything)
    rules.check_parity(everything)
    rules.check_virtual(everything)
    schedules.check_keys(everything["train"]["lr_schedule"])
    if everything["run_name"] is None and everything["resume"] == "auto":
        raise UserError("resume=auto needs run_name=NAME, the name of the run to resume")
    return {k: v for k, v in everything.items() if k not in ("compare", "tune")}  # no part of this run


def make_spec(composed: Composed, *, group: str | None = None) -> RunSpec:
    """The description of one run. Writes nothing. Raises UserError.

    A run with `run_name` lives in the directory of that name; with resume=auto it keeps the id it was given first.
    """
    resolved = resolve(composed)
    resolved["data"] = data(resolved)
    exp = resolved["exp"]
    run_id = new_name(exp, labels.slug(resolved))
    run_dir = Path(resolved["output_dir"]) / exp / (resolved["run_name"] or run_id)
    begun = (run_dir / "spec.yaml").exists()
    # Checkpoints alone, as a copy may leave them, are a run too: a new one would save between them and resume from them.
    if resolved["resume"] != "auto" and (begun or any(run_dir.glob("checkpoints/step-*"))):
        resume = "" if resolved["cluster"]["name"] == "virtual" else "resume it (resume=auto) or "
        raise UserError(f"{run_dir} holds a run already: {resume}choose another run_name")
    if begun:
        run_id = same_run.go_on(run_dir, resolved)
    return RunSpec(
        id=run_id,
        group=group,
        exp=exp,
        command=composed.command,
        overrides=list(composed.overrides),
        config=resolved,
        run_dir=str(run_dir),
    )


def new_name(*parts: str) -> str:
    """A name that no other run or group has: the time (UTC, yyyymmdd-hhmmss), what it is, four random digits."""
    return "-".join([datetime.now(UTC).strftime("%Y%m%d-%H%M%S"), *parts, secrets.token_hex(2)])


def explain(error: Exception, overrides: Sequence[str]) -> UserError:
    """What an error of Hydra or OmegaConf means to the user, as one line."""

    def known(wrong: str) -> list[str]:
        others = [o for o in overrides if wrong not in o]
        with contextlib.suppress(*CONFIG_ERRORS, UserError):  # a second mistake: the names of the groups must do
            return validate.keys_of(_dicts(_from_hydra(others, CONF).config))
        return list(validate.GROUPS)

    return messages.explain(error, CONF, known)


def _warn(renamed: Sequence[str]) -> None:
    """One line for keys that have been renamed and were not named yet."""
    new = [text for text in dict.fromkeys(renamed) if text not in _warned]
    _warned.update(new)
    if new:
        say(f"warning: renamed keys: {'; '.join(new)}", sys.stderr)


def _compose(overrides: Sequence[str], config_dir: Path) -> DictConfig:
    # Within hydra.main the global state belongs to the running application: put it back afterwards.
    state = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(config_dir), version_base="1.3"):
            return hydra_compose("config", overrides=list(overrides), return_hydra_config=True)
    finally:
        GlobalHydra.instance().hydra = state


def _from_hydra(overrides: Sequence[str], config_dir: Path) -> Composed:
    full = _compose(overrides, config_dir)
    choices = {k: v for k, v in full.hydra.runtime.choices.items() if v is not None}
    with omegaconf.open_dict(full):
        full.pop("hydra")
    return composed(full, choices, overrides)


def _value(config: DictConfig, key: str) -> Any:
    """The value of a key, resolved."""
    value = OmegaConf.select(config, key, throw_on_missing=True)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _dicts(config: DictConfig, **options: Any) -> dict[str, Any]:
    """`config` as plain dicts, references not resolved unless `options` of OmegaConf ask for it."""
    found = OmegaConf.to_container(config, **options)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def _count_hosts(composed: Composed) -> None:
    """Where nodes are a list of hosts, their number is that of the list, unless the user typed one too."""
    cluster = composed.config.cluster
    typed = "cluster.nodes" in map(key_of, composed.overrides)
    if "hosts" in cluster.keys() and not (typed and cluster.nodes is not None):  # noqa: SIM118
        cluster.nodes = len(hosts.parse(cluster.hosts))


hparams.register()
resolvers.register()
