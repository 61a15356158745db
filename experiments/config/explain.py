"""Errors of Hydra and OmegaConf in one line that says what the user can mend."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import omegaconf
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException

from experiments.config import validate
from experiments.config.construct import user_error
from experiments.config.kinds import shown
from launch.errors import UserError
from launch.words import one_line, there_are

CONFIG_ERRORS: tuple[type[Exception], ...] = (
    HydraException,
    omegaconf.errors.OmegaConfBaseException,
    # What Hydra and OmegaConf raise besides, for overrides that they do not foresee.
    *(TypeError, ValueError, KeyError, AttributeError, AssertionError, RecursionError),
)


def explain(error: Exception, config_dir: Path, known: Callable[[str], list[str]]) -> UserError:
    """What an error of Hydra or OmegaConf means to the user, as one line. known: the keys there are, from the wrong one."""
    text = str(error)
    if (ours := user_error(error)) is not None:
        return ours
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        files = error.options or [p.stem for p in (config_dir / group).glob("*.yaml")]
        words = {"exp": "experiment"}.get(group, group)
        return UserError(f"no {words} {shown(name)}{there_are(name, sorted(files))}" if group else one_line(text))
    if isinstance(error, OverrideParseException):
        return UserError(
            f"cannot read the override {shown(str(error.override))}: write key=value, and quote special characters"
        )
    if "${workload}/${optimizer}" in text:
        return UserError("a run needs both a workload and an optimizer: choose them with workload=NAME optimizer=NAME")
    if isinstance(error, ConfigCompositionException):
        if match := re.match(r"Could not (override|delete from config)[.]? '([^']+)'", text):
            how, key = match.groups()
            if key == "exp":
                return UserError("an experiment is added with a plus: +exp=NAME")
            if key not in (names := known(key)):
                return validate.unknown(key, names)
            if how == "override":
                return UserError(f"{key} is not in this configuration yet: +{key}=VALUE adds it")
            return UserError(f"{key} has no value that could be removed")
        if match := re.match(r"Ambiguous value for argument '(.*)'", text):
            of_a_group = match[1].lstrip("+").partition("=")[0] in ("exp", *validate.GROUPS)
            how = "" if of_a_group else "quote a text with a comma, write a list as [a,b]; "
            how += "run.py -m runs each"
            return UserError(f"{one_line(match[1])} has several values: {how}")
        return UserError(one_line(text))
    if isinstance(error, omegaconf.errors.MissingMandatoryValue):
        key = error.full_key or text.rpartition(" ")[2]
        return UserError(f"{key} has no value: set it with {key}=VALUE")
    if "Config group override must be" in text:
        return UserError(
            "a group is chosen by the name of a file, such as optimizer=birder; in quotes if it is a number"
        )
    if isinstance(error, RecursionError) or "maximum recursion depth" in text:
        return UserError("the configuration refers to itself: look for ${...} that lead in a circle")
    if not isinstance(error, HydraException | omegaconf.errors.OmegaConfBaseException):
        return UserError(f"cannot compose this configuration: {one_line(text or type(error).__name__)}")
    # OmegaConf writes "<what happened>\n    full_key: <where>\n    object_type=..."
    where = re.search(r"full_key: (\S+)", text)
    return UserError(one_line(text) + (f" (at {one_line(where[1])})" if where else ""))
