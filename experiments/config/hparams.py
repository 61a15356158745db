"""Hyper-parameters by workload: conf/hparams/<workload>.yaml, one entry for each optimizer, as a source of Hydra's.

    birder: {lr: 0.002, weight_decay: 1.0e-4}             # arguments of the optimizer that differ from conf/optimizer
    sgdm: {lr: "${lr_rule:0.1}", train: {lr_batch: total}}  # and keys of `train` that belong to it
    defaults: [cifar100]                                  # entries of another workload's file, where this one has none

Hydra sees an entry as the file hparams/<workload>/<optimizer>.yaml (`SearchHparams` and the defaults list of
conf/config.yaml), so that everything of Hydra's holds: experiments and the command line win over it, and --cfg shows it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from experiments.records.record import ROOT
from launch.errors import UserError, refused

GROUP = "hparams"
SECTIONS = ("train",)
"""Keys of an entry that are not arguments of the optimizer but sections of the configuration."""


@functools.cache
def table(workload: str, conf: Path) -> dict[str, dict[str, Any]]:
    """The entries of one workload's file, by optimizer, with those that it takes over from others.

    Raises UserError, also where the file names an optimizer, an argument or a key that there is not.
    """
    where = f"{conf.name}/{GROUP}/{workload}.yaml"
    content, main = _read(conf / GROUP / f"{workload}.yaml"), _read(conf / "config.yaml")
    entries: dict[str, dict[str, Any]] = {}
    others = content.pop("defaults", [])
    if not isinstance(others, list):
        raise UserError(f"{where}: defaults must be a list of other files there, such as [cifar100]")
    for other in others:
        if other == workload or not (conf / GROUP / f"{other}.yaml").is_file():
            raise UserError(f"{where} takes its defaults from '{other}', which is not another file there")
        entries |= table(str(other), conf)
    for optimizer, entry in content.items():
        if not isinstance(entry, dict):
            raise UserError(f"{where}: {optimizer} must hold arguments, such as {{lr: 0.1}}")
        path = conf / "optimizer" / f"{optimizer}.yaml"
        if not path.is_file():
            raise UserError(f"{where} has an entry for '{optimizer}', but {conf.name}/optimizer has no such file")
        known = set(_read(path)["optimizer"]) - {"_target_"}
        for key, value in entry.items():
            if key in SECTIONS and not isinstance(value, dict):
                raise UserError(f"{where}: {optimizer}: {key} must hold keys with values")
            if key in SECTIONS:
                if unknown := sorted(set(value) - set(main[key])):
                    raise UserError(f"{where}: {optimizer} sets {key}.{unknown[0]}, which is not a key of config.yaml")
            elif key not in known:
                raise UserError(f"{where}: {optimizer} has no '{key}'; it takes {', '.join(sorted(known))}")
        entries[str(optimizer)] = entry
    return entries


class HparamsSource(ConfigSource):
    """hparams://FOLDER, with FOLDER/hparams/<workload>.yaml, relative to the repository."""

    @staticmethod
    def scheme() -> str:
        return "hparams"

    @property
    def conf(self) -> Path:
        return ROOT / self.path

    def load_config(self, config_path: str) -> ConfigResult:
        if not self.is_config(config_path):
            raise ConfigLoadError(f"Config not found : {config_path}")
        workload, optimizer = self._split(config_path)
        entry = dict(table(workload, self.conf)[optimizer])
        config = {section: entry.pop(section) for section in SECTIONS if section in entry}
        if entry:
            config["optimizer"] = entry
        return ConfigResult(
            provider=self.provider,
            path=self.full_path(),
            config=OmegaConf.create(config),
            header={"package": "_global_"},
        )

    def available(self) -> bool:
        return (self.conf / GROUP).is_dir()

    def is_group(self, config_path: str) -> bool:
        group, _, workload = config_path.partition("/")
        return group == GROUP and (not workload or (self.conf / GROUP / f"{workload}.yaml").is_file())

    def is_config(self, config_path: str) -> bool:
        workload, optimizer = self._split(config_path)
        # The table checks itself: a misspelt name of an optimizer would be skipped without a word.
        return bool(workload) and self.is_group(f"{GROUP}/{workload}") and optimizer in table(workload, self.conf)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        _, _, workload = config_path.partition("/")
        if workload:
            return sorted(table(workload, self.conf)) if results_filter != ObjectType.GROUP else []
        files = sorted(p.stem for p in (self.conf / GROUP).glob("*.yaml"))
        return files if results_filter != ObjectType.CONFIG else []

    @staticmethod
    def _split(config_path: str) -> tuple[str, str]:
        """hparams/digits/birder -> digits, birder; anything else -> "", ""."""
        parts = config_path.removesuffix(".yaml").split("/")
        return (parts[1], parts[2]) if len(parts) == 3 and parts[0] == GROUP else ("", "")


class SearchHparams(SearchPathPlugin):
    """Has Hydra look into conf/hparams, whatever hydra.searchpath names besides."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("hparams", "hparams://conf")


def _read(path: Path) -> dict[str, Any]:
    with refused(f"{path.name} is not readable as YAML", OSError, yaml.YAMLError):
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)  # 1e-3 is a number, unlike in plain YAML
    if not isinstance(content, dict):
        raise UserError(f"{path.name} must hold keys with values")
    return {str(key): value for key, value in content.items()}


def register() -> None:
    """Makes hparams:// known to Hydra, and has it searched."""
    for plugin in (HparamsSource, SearchHparams):
        Plugins.instance().register(plugin)
