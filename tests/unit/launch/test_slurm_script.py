"""The script of a SLURM job: whatever an option holds, sbatch reads back that, or the user reads one line."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.errors import UserError
from launch.slurm.launcher import SlurmLauncher, directive
from tests.helpers.stub_run import make_spec


def arguments_of(line: str) -> list[str]:
    """What sbatch makes of a line after #SBATCH (src/sbatch/opt.c, _get_argument): words, quotes, backslashes, comments.

    Unlike in a shell, a backslash escapes inside both kinds of quotes, and an escaped space still ends a word.
    """
    found, at = [], 0
    while True:
        while at < len(line) and line[at] in " \t\n\v\f\r":
            at += 1
        word, quote, escaped, some = "", "", False, False
        while at < len(line) and (quote or line[at] not in " \t\n\v\f\r"):
            c = line[at]
            at += 1
            if escaped:
                escaped = False
            elif c == "\\":
                escaped = True
                continue
            elif quote:
                if c == quote:
                    quote = ""
                    continue
            elif c in "\"'":
                quote = c
                continue
            elif c == "#":
                at = len(line)
                break
            word += c
            some = True
        assert not quote, "sbatch would refuse the script: unmatched quote"
        if not some:
            return found
        found.append(word)


def read(script: str) -> list[str]:
    """All options of a script, as sbatch reads them: up to the first line that is a command."""
    options = []
    for line in script.split("\n"):
        if line.startswith("#SBATCH"):
            options += arguments_of(line.removeprefix("#SBATCH"))
        elif line.strip() and not line.strip().startswith("#"):
            break
    return options


HOSTILE = [
    "a b",
    "it's",
    'say "x"',
    "back\\slash",
    "end\\",
    "#comment",
    "a #b",
    "$(id)",
    "`id`",
    "$HOME",
    ";rm -rf /",
    "a|b&c",
]
HOSTILE += [
    "*?[x]",
    "--nodes=9",
    "%n %%",
    "\\\\'\"",
    "é ü 中",
    "=",
    "'",
    '"',
    "\\",
    " lead",
    "trail ",
    "!x",
    "~root",
    "{a,b}",
]
HOSTILE += ["a|b&c", "(x)", "<x>", "1-0:00:00"]
LINES = ["a\nb", "a\n#SBATCH --nodes=9", "a\rb", "a\0b", "a\x1bb", "a\u2028b", "\n", "a\tb"]
TEXTS = ("partition", "account", "time", "constraint", "gpus_per_node")


def launcher(**options: Any) -> SlurmLauncher:
    return SlurmLauncher(**{"nodes": 2, "ranks_per_node": 1, "name": "slurm", **options})


def test_the_reader_knows_sbatchs_rules() -> None:
    assert arguments_of(r""" --a='x\'y' --b=\#z "c d" e#f""") == ["--a=x'y", "--b=#z", "c d", "e"]


def script_of(folder: Path, key: str, value: str) -> str:
    made = launcher(sbatch={key: value}) if key == "comment" else launcher(**{key: value})
    return made.script(make_spec(folder))


def typed(key: str, value: str) -> str:
    return value + ":4" if key == "gpus_per_node" else value  # it ends in the number of GPUs


@pytest.mark.parametrize("key", [*TEXTS, "comment"])
def test_every_option_arrives_as_it_was_typed(tmp_path: Path, key: str) -> None:
    plain = read(launcher(gpus_per_node=4, sbatch={"comment": "x"}).script(make_spec(tmp_path)))
    for value in (typed(key, v) for v in HOSTILE):
        options = read(script_of(tmp_path, key, value))
        assert f"--{key.replace('_', '-')}={value}" in options, value
        assert len(options) - len(plain) in (-1, 0), value
        assert [o for o in options if o.startswith("--nodes")] == ["--nodes=2"], value


def test_the_command_line_says_what_the_script_says(tmp_path: Path) -> None:
    """SBATCH_PARTITION and the like, which sites export, count before the script's lines, and not before the command line."""
    made = launcher(partition="a b", time=30, sbatch={"hold": None, "exclusive": False, "comment": 'it\'s "x"'})
    command, spec = made.submission(make_spec(tmp_path)), make_spec(tmp_path)
    assert (command[0], command[-1]) == ("sbatch", f"{tmp_path}/run/job.sh")
    assert sorted(command[2:-1]) == sorted(read(made.script(spec)))
    assert {"--partition=a b", "--time=30", "--hold", "--requeue"} < set(command)


def test_bash_can_read_every_script(tmp_path: Path) -> None:
    """One bash for all of them: it reads each as the body of a function, which it never calls."""
    every = [(key, value) for key in (*TEXTS, "comment") for value in HOSTILE]
    for number, (key, value) in enumerate(every):
        (tmp_path / f"{number}").write_text(script_of(tmp_path, key, typed(key, value)))
    (tmp_path / "wrong").write_text("echo 'unmatched")
    read_all = 'for f; do (eval "script() { $(<"$f")\n}") 2>/dev/null || echo "$f"; done'
    files = [str(tmp_path / f"{number}") for number in range(len(every))]
    done = subprocess.run(
        ["bash", "-c", read_all, "bash", *files, str(tmp_path / "wrong")], capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [str(tmp_path / "wrong")]


@pytest.mark.parametrize(("key", "value"), [("array", "1-3"), ("ntasks", 4), ("wrap", "true"), ("test-only", None)])
def test_a_job_is_one_run(key: str, value: object) -> None:
    """The tasks of an array would write over each other's files in the run's folder."""
    with pytest.raises(UserError, match=f"cluster.sbatch.{key} cannot be: a job is one run"):
        launcher(sbatch={key: value})


@pytest.mark.parametrize("key", [*TEXTS, "comment", "output_dir", "cwd"])
def test_more_than_a_line_is_refused_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("PATH", "/nowhere")

    def give(value: str) -> None:
        if key == "comment":
            launcher(sbatch={key: value})
        elif key == "output_dir":
            launcher().launch(make_spec(tmp_path / value))
        elif key == "cwd":
            (tmp_path / value).mkdir()
            monkeypatch.chdir(tmp_path / value)
            launcher().launch(make_spec(tmp_path))
        else:
            launcher(**{key: value + "4"})

    for value in LINES:
        if key in ("output_dir", "cwd") and "\0" in value:  # no path holds a zero byte
            continue
        with pytest.raises(UserError) as refused:
            give(value)
        message = str(refused.value)
        assert message.isprintable(), value
        assert len(message) < 300, value
        assert "one line" in message, value
        assert {"cwd": "started from", "comment": "cluster.sbatch.comment"}.get(key, key) in message, value
        assert not any((tmp_path / p).exists() for p in ("run", Path(value.replace("\0", "")) / "run")), value


@settings(max_examples=500)
@given(value=st.text(max_size=40) | st.integers() | st.booleans() | st.none() | st.floats())
def test_any_value_is_one_argument_or_refused(value: Any) -> None:
    if value is not None and not str(value).isprintable():
        with pytest.raises(UserError, match=r"^[ -~]+$"):
            directive("comment", value)
        return
    line = directive("comment", value)
    assert "\n" not in line
    plain = value is None or value is True
    assert arguments_of(line.removeprefix("#SBATCH")) == ["--comment" if plain else f"--comment={value}"]


def test_paths_that_a_shell_would_take_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / "a 'b' \"c\" $(touch x) `d` \\ #e; 100%n"
    odd.mkdir()
    monkeypatch.chdir(odd)
    spec = make_spec(odd / "f")
    script = launcher().script(spec)
    logs = str(odd / "f/run/logs").replace("%", "%%")
    assert {f"--chdir={odd}", f"--output={logs}/output.log", f"--error={logs}/slurm.log"} <= set(read(script))
    # The body, with everything that SLURM would do replaced by its printing.
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("srun", "scontrol"):
        (programs / name).write_text(f'#!/bin/bash\nprintf "%s\\n" "{name}" "$@"\n')
        (programs / name).chmod(0o755)
    (odd / "f/run/ranks").mkdir(parents=True)
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n"}
    done = subprocess.run(["bash"], input=script, env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert str(odd / "f/run/spec.yaml") in done.stdout.splitlines()
    assert not (odd / "f/run/ranks").exists()
    assert not (odd / "x").exists()
    assert not (tmp_path / "x").exists()
