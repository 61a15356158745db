"""`make`: variables and targets that are misspelt, its help, the environment that it makes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.config import compose
from tests.helpers import ROOT
from tests.helpers.tiers import slow


def make(*arguments: str, folder: Path = ROOT, **exported: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "NODES", "VENV")}
    return subprocess.run(["make", "-C", str(folder), *arguments], capture_output=True, text=True, env=env | exported)


def test_make_says_which_variables_come_from_the_environment() -> None:
    """They change what is trained, and nobody has typed them. Those of other targets change nothing."""
    done = make("-n", f"VENV={sys.prefix}", "digits", SEED="7", GPU="a100")
    assert "seed=7" in done.stdout
    assert done.stderr == "SEED comes from the environment\n"


@pytest.mark.parametrize("nodes", ["four", slow("0"), slow("-1")])
def test_make_with_a_bad_node_count(nodes: str) -> None:
    done = make(f"VENV={sys.prefix}", "resnet50", f"NODES={nodes}")
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    shown = f"'{nodes}'" if nodes == "four" else nodes
    assert lines == [f"error: cluster.nodes must be a whole number, 1 or more, not {shown}"]
    assert done.returncode != 0


@pytest.mark.parametrize(("given", "near"), [("NODE=4", "NODES"), ("DATAS=x", "DATA"), ("node=4", "NODES")])
def test_make_with_an_unknown_variable(given: str, near: str) -> None:
    for target in ("digits", "test", "tables"):
        done = make(f"VENV={sys.prefix}", target, given)
        assert done.returncode == 2
        name = given.partition("=")[0]
        assert f"no variable {name}: did you mean {near}? make help lists them" in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("goal", "given", "of"),
    [("resnet50", "GBPS=100", "predict"), ("digits", "EXP=ptb", "exp nodes publish"), ("tables", "GROUP=a", "publish")],
)
def test_make_with_a_variable_of_another_target(goal: str, given: str, of: str) -> None:
    """It would be ignored without a word: the links of `make resnet50 GBPS=100` would stand for 10 Gbit/s."""
    done = make("-n", f"VENV={sys.prefix}", goal, given)
    name = given.partition("=")[0]
    assert done.returncode == 2
    assert f"make {goal} has no variable {name}: {name} is of make {of}." in done.stderr
    for target in of.split():
        assert make("-n", f"VENV={sys.prefix}", target, given).returncode == 0


@pytest.mark.parametrize(
    ("goal", "given"),
    [
        ("tables", "NODES=4"),
        ("bench", "SEED=1"),
        ("predict", "SCALE=paper"),
        ("page", "ARGS=--check"),
        ("nodes", "NODES=3"),  # it has its own: 1, 2, 4, 8
    ],
)
def test_make_with_a_variable_of_runs_for_a_target_that_runs_nothing_by_it(goal: str, given: str) -> None:
    done = make("-n", f"VENV={sys.prefix}", goal, given, *["EXP=digits"] * (goal == "nodes"))
    name = given.partition("=")[0]
    assert done.returncode == 2
    assert f"make {goal} has no variable {name}: {name} is of make resnet50 " in done.stderr
    for target in ("resnet50", "exp", "methods", "cser"):
        assert make("-n", f"VENV={sys.prefix}", target, given, *["EXP=digits"] * (target == "exp")).returncode == 0


@pytest.mark.parametrize("target", ["exp", "nodes"])
def test_make_without_an_experiment(target: str) -> None:
    done = make(f"VENV={sys.prefix}", target)
    assert done.returncode == 2
    assert f"which experiment? make {target} EXP=" in done.stderr
    assert done.stderr.count("\n") == 1


def test_make_with_an_apostrophe_in_a_value() -> None:
    """It would end the shell's quotes, and what follows it would be another word."""
    shown = make("-n", f"VENV={sys.prefix}", "digits", "DATA=it's; here", "ARGS=--dry-run").stdout
    command = next(line for line in shown.splitlines() if "compare.py" in line)
    assert shlex.split(command)[2:] == ["+exp=digits", "data.path=it's; here", "--dry-run"]


@pytest.mark.parametrize("given", ["data/a$b", "data/a$(HOME)", "data/$$"])
def test_make_with_a_dollar_in_a_value(given: str) -> None:
    """make would take it for a variable: data would be read from another folder without a word."""
    for path in (given, None):  # typed, and from the environment
        extra = [f"DATA={path}"] if path else []
        env = {**os.environ, "DATA": given}
        command = ["make", "-C", str(ROOT), "-n", f"VENV={sys.prefix}", "digits", *extra]
        shown = subprocess.run(command, capture_output=True, text=True, env=env).stdout
        line = next(line for line in shown.splitlines() if "compare.py" in line)
        assert f"data.path={given}" in shlex.split(line)


def test_make_runs_one_target_after_the_other(tmp_path: Path) -> None:
    """With -j, too: two comparisons at once would time each other."""
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\necho begins >> {tmp_path}/log\nsleep 0.3\necho ends >> {tmp_path}/log\n")
    python.chmod(0o755)
    assert make("-j2", f"VENV={tmp_path}", "digits", "ptb").returncode == 0
    assert (tmp_path / "log").read_text().split() == ["begins", "ends"] * 2


def test_make_knows_the_variables_that_it_lists() -> None:
    listed = re.findall(r"^#= (\w+) = ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert make("-n", "help", *(f"{name}=x" for name in listed if name != "PYTHON")).returncode == 0


def test_make_help_lists_targets_and_variables() -> None:
    shown = make("help").stdout
    makefile = (ROOT / "Makefile").read_text()
    for name in ["resnet50", "test", "check", "tables", "NODES", "OPT", "SEED", "DATA", "CLUSTER", "SCALE", "ARGS"]:
        assert f"\n  {name} " in shown
    assert make(folder=ROOT).stdout == shown
    named = makefile.partition("EXPERIMENTS := ")[2].partition("\n")[0].split()
    assert all((compose.CONF / "exp" / f"{n}.yaml").exists() for n in named)


def test_make_help_fits_a_terminal_and_lists_every_target_once() -> None:
    shown = make("help").stdout
    assert max(map(len, shown.splitlines())) <= 80
    told = re.findall(r"^([a-z0-9_-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    listed = re.findall(r"^  ([a-z0-9_-]+) ", shown, re.MULTILINE)
    assert sorted(listed) == sorted(told)
    groups = [line for line in shown.splitlines() if line.startswith("To ")]
    assert groups == ["To try:", "To reproduce:", "To develop:"]


@pytest.mark.parametrize(
    ("target", "near"),
    [
        ("digts", "make digits"),
        ("tset", "make test"),
        ("tests", "make test"),  # a folder
        ("resnet50_b128", "make exp EXP=resnet50_b128"),
    ],
)
def test_make_with_an_unknown_target(target: str, near: str) -> None:
    done = make(f"VENV={sys.prefix}", target)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode == 2
    assert lines == [f"error: no target '{target}'; did you mean {near}? make help lists them"]


def test_make_passes_only_what_is_set() -> None:
    shown = make("-n", f"VENV={sys.prefix}", "ptb", "NODES=2", "OPT=sgdm,birder", "ARGS=train.max_steps=5").stdout
    assert "+exp=ptb 'cluster.nodes=2' '--methods=sgdm,birder' train.max_steps=5" in " ".join(shown.split())
    assert "seed" not in shown


def fake_python(folder: Path, version: str) -> Path:
    """An interpreter that says it is `version`, makes "environments" that hold itself, and writes down its calls."""
    path = folder / "fake_python"
    path.write_text(
        f"""#!/bin/sh
echo "$@" >> {folder}/calls
case "$*" in
  -V) echo "Python {version}" ;;
  *version_info*) [ {version} != 3.9 ] ;;
  "-m venv --upgrade-deps .venv") mkdir -p .venv/bin && cp {path} .venv/bin/python ;;
esac
"""
    )
    path.chmod(0o755)
    return path


def test_environment_is_made_once_and_follows_pyproject(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    python = f"PYTHON={fake_python(tmp_path, '3.11')}"

    def installs() -> int:
        return (tmp_path / "calls").read_text().count("pip install")

    assert make("setup", python, folder=tmp_path).returncode == 0
    assert installs() == 1
    assert make("setup", python, folder=tmp_path).returncode == 0
    assert installs() == 1
    os.utime(tmp_path / "pyproject.toml", ns=(2**62, 2**62))
    assert make("setup", python, folder=tmp_path).returncode == 0
    assert installs() == 2


@pytest.mark.parametrize(("version", "words"), [("3.9", "Python 3.11 or later is needed"), (None, "no nowhere")])
def test_python_that_does_not_do(tmp_path: Path, version: str | None, words: str) -> None:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    python = fake_python(tmp_path, version) if version else "nowhere"
    done = make("setup", f"PYTHON={python}", folder=tmp_path)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode != 0
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert words in lines[0]
    assert not (tmp_path / ".venv").exists()
