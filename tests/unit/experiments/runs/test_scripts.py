"""What all scripts of experiments/, studies/ and examples/ do alike, from any folder, and without packages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import birder
from tests.helpers import ROOT
from tests.helpers.tiers import slow, slow_unless


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every script runs in an empty folder."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["run.py", "compare.py"])
def test_scripts_from_any_folder(name: str) -> None:
    command = [sys.executable, str(ROOT / "experiments" / name), "+exp=nothing"]
    # Of Python's own environment: readline, which pytest may load, sets COLUMNS below it.
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ.copy())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no experiment 'nothing'; there are: ")
    assert done.stderr.count("\n") == 1


SCRIPTS = sorted(
    p.relative_to(ROOT).as_posix()
    for folder in ("experiments", "studies")
    for p in (ROOT / folder).glob("*.py")
    if not p.name.startswith("_") and p.name != "sigma_delta_research.py"  # no script, but a class for a sweep
)


FEW = {
    "experiments/run.py",
    "experiments/compare.py",
    "experiments/predict.py",
    "studies/spread.py",
    "studies/volume.py",
}


def test_all_scripts_begin_alike() -> None:
    """With the standard library alone before _script, which answers where the rest is missing."""
    for name in SCRIPTS:
        guard = "\nif not __package__:  # run as a script\n    import _script"
        before, guarded, _ = (ROOT / name).read_text().partition(guard)
        assert guarded, name
        assert set(re.findall(r"^(?:import|from) (\w+)", before, re.MULTILINE)) <= sys.stdlib_module_names, name


@pytest.mark.parametrize("name", slow_unless(FEW.__contains__, SCRIPTS))
def test_a_python_without_the_packages_is_one_line(name: str) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    command = [sys.executable, "-S", str(ROOT / name)]  # -S: nothing that was installed is found
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: ")
    assert "make setup" in done.stderr


@pytest.mark.parametrize("name", slow_unless(FEW.__contains__, SCRIPTS))
def test_version(name: str) -> None:
    done = subprocess.run([sys.executable, "-S", str(ROOT / name), "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"birder-repro {birder.__version__}, commit ")


def check_help(name: str, status: int, out: str, err: str) -> None:
    """Called from any folder; nothing is left there."""
    assert (status, err) == (0, ""), name
    assert Path(name).stem in out
    assert [line for line in out.splitlines() if len(line) > 80] == [], name
    assert "Exit status" in " ".join(out.split()), name
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("name", ["experiments/run.py", "experiments/predict.py"])
def test_help_fits_80_columns(name: str) -> None:
    env = os.environ | {"COLUMNS": "80", "PYTHONPATH": ""}
    done = subprocess.run([sys.executable, str(ROOT / name), "--help"], capture_output=True, text=True, env=env)
    check_help(name, done.returncode, done.stdout, done.stderr)


WITH_ARGUMENTS = ("run", "tables", "publish", "page", "tune", "sweep", "compare", "predict", "gpu_check")


@pytest.mark.parametrize("name", [slow(name) if name != "run" else name for name in WITH_ARGUMENTS])
def test_an_unknown_flag_is_one_line(name: str) -> None:
    command = [sys.executable, str(ROOT / "experiments" / f"{name}.py"), "--no-such-flag"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert "--no-such-flag" in done.stderr
    assert done.stderr.count("\n") == 1


HELP_OF_ALL = """
import contextlib, io, json, runpy, sys
said = {}
sys.path[0] = sys.argv[1].rpartition("/")[0]  # as of a script
for path in sys.argv[1:]:
    sys.argv = [path, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            runpy.run_path(path, run_name="__main__")
            status = 0
        except SystemExit as end:
            status = end.code or 0
    said[path] = status, out.getvalue(), err.getvalue()
print(json.dumps(said))
"""


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["experiments", "studies"])
def test_help_of_all_scripts_fits_80_columns(folder: str) -> None:
    """In one process: what takes the time is what they import."""
    paths = [str(ROOT / name) for name in SCRIPTS if name.startswith(folder)]
    env = os.environ | {"COLUMNS": "80", "PYTHONPATH": ""}
    done = subprocess.run([sys.executable, "-c", HELP_OF_ALL, *paths], capture_output=True, text=True, env=env)
    for path, said in json.loads(done.stdout).items():
        check_help(path, *said)


@pytest.mark.parametrize("name", sorted(p.name for p in (ROOT / "examples").glob("[!_]*.py")))
def test_an_example_without_torchrun_or_packages_is_one_line(name: str) -> None:
    """It says how to start it, and what to install."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    for flags, said in ((["-S"], "make setup"), ([], f" --nproc-per-node 2 {ROOT / 'examples' / name}")):
        command = [sys.executable, *flags, str(ROOT / "examples" / name)]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: ")
        assert said in done.stderr
        assert "Traceback" not in done.stderr
