"""Weights & Biases, kept at arm's length: imported late, silent, its files in the run's folder, never fatal."""

from __future__ import annotations

import importlib.util
import netrc
import os
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from experiments.records import privacy
from launch.errors import UserError
from launch.spec import RunSpec

MODES = ("auto", "online", "offline", "disabled")


def check(config: dict[str, Any]) -> None:
    """Raises UserError when `wandb.mode` is none of MODES."""
    mode = config.get("wandb", {}).get("mode", "disabled")
    if mode not in MODES:
        raise UserError(f"wandb.mode={mode} is unknown: choose {', '.join(MODES)}")


def has_key() -> bool:
    """Whether WANDB_API_KEY or a netrc entry for the server is there."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    server = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    for path in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        try:
            if path and netrc.netrc(os.path.expanduser(path)).authenticators(server):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def choose_mode(wanted: str) -> str:
    """online | offline | disabled for a configured mode, by what this machine has. WANDB_MODE decides for `auto`."""
    if wanted == "disabled" or importlib.util.find_spec("wandb") is None:
        return "disabled"
    if wanted == "auto":
        named = os.environ.get("WANDB_MODE")
        if named in ("online", "offline", "disabled"):
            wanted = named
        elif has_key():
            return "online"
        else:
            return "disabled" if os.environ.get("CI") else "offline"
    if wanted == "online" and not has_key():
        # wandb itself would ask for the key and wait.
        warn("no key (WANDB_API_KEY or `wandb login`): recorded offline")
        return "offline"
    return wanted


def warn(why: object) -> None:
    """One line on stderr."""
    text = " ".join(str(why).split())
    print(f"warning: W&B: {text}", file=sys.stderr, flush=True)


class WandbRun:
    """One W&B run. Whatever goes wrong is told once, and from then on nothing more is sent."""

    def __init__(self, spec: RunSpec) -> None:
        check(spec.config)
        self._run: Any = None
        options = spec.config.get("wandb", {})
        mode = choose_mode(options.get("mode", "disabled"))
        if mode == "disabled":
            return
        folder = spec.path.resolve()
        try:
            self._run = _start(spec, options, mode, folder)
        except Exception as error:
            warn(f"{error}; this run is not recorded there")

    @property
    def active(self) -> bool:
        """Whether anything is recorded."""
        return self._run is not None

    def log(self, step: int, values: dict[str, float]) -> None:
        """Sends scalars of one step."""
        self._try(lambda: self._run.log(values, step=step))

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        """Sends the summary and ends the run."""
        self._try(lambda: self._run.summary.update(summary))
        self._try(lambda: self._run.finish(exit_code=exit_code))
        self._run = None

    def _try(self, call: Any) -> None:
        if self._run is None:
            return
        try:
            call()
        except Exception as error:
            self._run = None
            warn(f"{error}; nothing more is recorded there")


def _start(spec: RunSpec, options: dict[str, Any], mode: str, folder: Path) -> Any:
    os.environ.setdefault("WANDB_SILENT", "true")
    places = {"WANDB_CACHE_DIR": "cache", "WANDB_DATA_DIR": "data"}
    if mode == "offline":
        places["WANDB_CONFIG_DIR"] = "config"  # online, the user's own settings name the server
    for variable, name in places.items():
        os.environ.setdefault(variable, str(folder / "wandb" / name))
    (folder / "wandb").mkdir(parents=True, exist_ok=True)

    import wandb

    return wandb.init(
        mode="online" if mode == "online" else "offline",
        project=options.get("project") or "birder",
        entity=options.get("entity"),
        group=options.get("group") or spec.group,
        name=spec.id,
        id=spec.id if mode == "online" else None,
        resume="allow" if mode == "online" else None,
        dir=str(folder),
        config=privacy.clean(spec.config, Path.cwd()),
        settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False, init_timeout=30),
    )
