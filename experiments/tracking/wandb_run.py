"""Weights & Biases, kept at arm's length: imported late, silent, its files in the run's folder, never fatal.

It never waits long either: `INIT_S` for a server to answer at the start (then the run is recorded offline), `FINISH_S` for
uploads at the end (then the line says how to send the rest later).
"""

from __future__ import annotations

import configparser
import contextlib
import importlib.util
import netrc
import os
import secrets
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from experiments.records import privacy
from experiments.tracking.tracked import About, Cell, TrackedRun
from launch.words import program, typed_path

SERVICE = "W&B"
INIT_S = 30.0
"""Seconds to wait for the server at the start."""
FINISH_S = 60.0
"""Seconds to wait for uploads at the end."""
LEAST_FREE = 2**16
"""Bytes free at the end below which a run may not have been written whole."""
NO_KEY = "no key (WANDB_API_KEY or `wandb login`)"


def setting(name: str) -> str:
    """As WANDB_<NAME> says, else the files that `wandb login --host` and `wandb offline` write; empty where none does."""
    files = configparser.ConfigParser(interpolation=None)
    everywhere = os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
    with contextlib.suppress(configparser.Error, OSError, ValueError):
        here = Path(os.environ.get("WANDB_DIR") or ".")
        folder = here / ".wandb" if (here / ".wandb").exists() else here / "wandb"
        files.read([os.path.expanduser(f"{everywhere}/settings"), folder / "settings"])
    return os.environ.get(f"WANDB_{name.upper()}") or files.get("default", name, fallback="") or ""


def has_key() -> bool:
    """Whether WANDB_API_KEY or a netrc entry for the server is there."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    server = urlsplit(setting("base_url") or "https://api.wandb.ai").netloc
    for path in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        try:
            if path and netrc.netrc(os.path.expanduser(path)).authenticators(server):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def choose_mode(wanted: str) -> tuple[str, str]:
    """(online | offline | disabled, why it is not as wanted or nothing is recorded) for a configured mode, by what this
    machine has. WANDB_MODE, or else `wandb offline`, decides for `auto`."""
    if wanted == "disabled":
        return "disabled", "wandb=disabled"
    if importlib.util.find_spec("wandb") is None:
        return "disabled", "not installed: pip install wandb"
    if wanted == "auto":
        named = setting("mode").replace("dryrun", "offline")  # as W&B called it, and still reads it
        if named == "disabled":
            typed = not os.environ.get("WANDB_MODE")
            return "disabled", "`wandb disabled` was typed here" if typed else "WANDB_MODE=disabled"
        if named in ("online", "offline"):
            wanted = named
        elif has_key():
            return "online", ""
        elif os.environ.get("CI"):
            return "disabled", f"CI is set and there is {NO_KEY}"
        else:
            return "offline", ""
    if wanted == "online" and not has_key():
        return "offline", NO_KEY  # wandb itself would ask for the key and wait
    return wanted, ""


def begin(about: About) -> TrackedRun:
    """The run, or one that records nothing. Where the server does not answer, the run is recorded offline; raises what W&B
    raises of that."""
    mode, why = choose_mode(about.config.get("wandb", {}).get("mode", "disabled"))
    if mode == "disabled":
        return TrackedRun(f"{SERVICE}: nothing is recorded ({why})")
    if mode == "online":
        try:
            return WandbRun(about, "online")
        except Exception as error:
            why = " ".join(str(error).split())[:160]
    return WandbRun(about, "offline", why)


class WandbRun(TrackedRun):
    """One W&B run. mode: online or offline. why: it is offline although that was not asked for."""

    service = SERVICE

    def __init__(self, about: About, mode: str, why: str = "") -> None:
        super().__init__()
        self._environment = _set_places(about.folder.resolve() / "wandb", offline=mode == "offline")
        try:
            self._run = _init(about, mode)
        except BaseException:
            self._restore()
            raise
        self._folder = Path(self._run.dir).parent
        self.fresh = not self._run.resumed  # offline, and where the server has nothing: the first start was offline
        if mode == "online":
            self.line = f"{SERVICE}: {self._run.url}"
        else:
            reason = f"{why}: " if why else ""
            self.line = f"{SERVICE}: {reason}recorded offline; to send it:\n  {self._sync()}"
        self.active = True

    def resume_hint(self) -> str:
        return f"; to send the rest: {self._sync()}"

    def _sync(self) -> str:
        return f"{program('wandb')} sync {typed_path(self._folder.resolve())}"

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def _table(self, name: str, columns: list[str], rows: list[list[Cell]]) -> None:
        import wandb

        data: list[Any] = list(rows)
        self._run.log({name: wandb.Table(columns=[*columns], data=data)})

    def _image(self, name: str, png: Path) -> None:
        import wandb

        self._run.log({name: wandb.Image(str(png))})

    def _finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        try:
            self._run.summary.update(dict(summary))
            self._run.finish(exit_code=exit_code)
            # Its service process drops what it cannot write, and says so in a log file alone.
            if shutil.disk_usage(self._folder).free < LEAST_FREE:
                raise OSError("the disk is full, so that this run may be incomplete")
        finally:
            self._restore()

    def _restore(self) -> None:
        """Takes back what was set for this run: the next one, also of a child process, has another folder."""
        for variable in self._environment:
            os.environ.pop(variable, None)
        if (wandb := sys.modules.get("wandb")) is not None:
            wandb.teardown()  # ends its service process, whose address children would inherit


def _set_places(folder: Path, *, offline: bool) -> list[str]:
    """Has W&B write below `folder` alone, unless the user's environment names places. Returns the variables it has set."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {
        "WANDB_SILENT": "true",
        "WANDB_CACHE_DIR": str(folder / "cache"),
        "WANDB_DATA_DIR": str(folder / "data"),
    }
    if offline:
        wanted["WANDB_CONFIG_DIR"] = str(folder / "config")  # online, the user's own settings name the server
    added = [variable for variable in wanted if variable not in os.environ]
    os.environ.update({variable: wanted[variable] for variable in added})
    return added


def _init(about: About, mode: str) -> Any:
    import wandb

    options = about.config.get("wandb", {})
    return wandb.init(
        mode=mode,  # type: ignore[arg-type]
        project=options.get("project") or os.environ.get("WANDB_PROJECT") or "birder",
        entity=options.get("entity"),
        group=options.get("group") or about.group,
        job_type=about.job,
        name=about.id,
        id=about.id if mode == "online" else secrets.token_hex(4),  # WANDB_RUN_ID would be that of all runs
        resume="allow" if mode == "online" else None,
        dir=str(about.folder.resolve()),
        config=privacy.clean(dict(about.config), Path.cwd()),
        settings=wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            init_timeout=INIT_S,
            finish_timeout=FINISH_S,
            finish_timeout_raises=True,
        ),
    )
