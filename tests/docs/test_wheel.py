"""What is packaged: the wheel alone, in an empty folder, runs the README's script; another package `birder` is noticed."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.docs.test_readme import blocks
from tests.helpers import ROOT

IN_WHEEL = ("birder", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheel and sdist, built from a copy so that none of setuptools' own folders is left here."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in (*IN_WHEEL, "tests"):
        whole = ROOT / name
        if whole.is_dir():
            shutil.copytree(whole, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(whole, copy)
    build = f"from setuptools import build_meta as b; b.build_wheel({str(out)!r}); b.build_sdist({str(out)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=copy, check=True, capture_output=True)
    return out


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder into which nothing but the wheel has been installed."""
    target = tmp_path_factory.mktemp("target")
    (wheel,) = built.glob("*.whl")
    options = ["--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *options, str(wheel)], check=True)
    return target


def environment(target: Path) -> dict[str, str]:
    """In which the wheel's package comes before any other."""
    return {**os.environ, "PYTHONPATH": str(target), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.slow
@pytest.mark.long
def test_the_readmes_script_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    (block,) = blocks("README.md", "python")
    (tmp_path / "script.py").write_text(block + '\nimport birder\nprint(f"from {birder.__file__}")\n')
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(installed), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"rank \d sent \d+ bytes", done.stdout)) == 2
    assert done.stdout.count(f"from {installed / 'birder/__init__.py'}") == 2


def test_the_wheel_holds_the_library_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        (metadata,) = (email.message_from_bytes(file.read(n)) for n in names if n.endswith(".dist-info/METADATA"))
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "birder").rglob("*.py")}
    assert {n for n in names if ".dist-info/" not in n} == modules | {"birder/py.typed"}
    assert metadata["Name"] == "birder-repro"
    assert metadata.get_all("Provides-Extra") == ["cpu", "hf", "lightning"]
    needed = {re.split(r"[^\w-]", line)[0] for line in metadata.get_all("Requires-Dist", []) if "extra" not in line}
    assert needed == {"torch", "numpy", "safetensors"}
    assert "License-File" in metadata


def test_an_index_takes_both(built: Path) -> None:
    """Their metadata and the README as it would be shown."""
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, sorted(built.iterdir()))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_the_papers_are_cited_alike_wherever_they_are() -> None:
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    cited = {r["title"]: (r["year"], [a["family-names"] for a in r["authors"]]) for r in cff["references"]}
    field = r"\b(title|author|year) += \{(.*)\},?\n"
    entries = [dict(re.findall(field, e)) for e in (ROOT / "CITATION.bib").read_text().split("@inproceedings")[1:]]
    authors = [[name.strip("{}") for name in e["author"].split(" and ")] for e in entries]
    assert cited == {e["title"]: (int(e["year"]), a) for e, a in zip(entries, authors, strict=True)}
    sources = "\n".join(json.loads(p.read_text())["paper"] for p in (ROOT / "results/paper").glob("*.json"))
    for title, (year, names) in cited.items():
        assert re.search(rf"^{re.escape(', '.join(names))}: {re.escape(title)}, \w+ {year}$", sources, re.MULTILINE)


def test_the_sdist_holds_no_tests(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        names = file.getnames()
    assert any(name.endswith("/birder/hooks/ddp.py") for name in names)
    assert not [name for name in names if "/tests" in name]


def test_groups_name_what_extras_do_not() -> None:
    """`make setup` installs extras and groups together."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups, extras = project["dependency-groups"], project["project"]["optional-dependencies"]
    assert set(groups) == {"experiments", "dev"}
    assert groups["dev"][0] == {"include-group": "experiments"}
    (line,) = [
        line for line in (ROOT / "Makefile").read_text().splitlines() if "--group dev" in line and "TORCH" not in line
    ]
    assert f"[{','.join(extras)}]" in line


@pytest.mark.slow
def test_the_other_package_in_the_same_folder_is_noticed(installed: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    (target / "birder-0.9.0.dist-info").mkdir(parents=True)
    (target / "birder-0.9.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: birder\nVersion: 0.9.0\n")
    (target / "birder").mkdir()
    shutil.copy(installed / "birder/__init__.py", target / "birder")

    def run(code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env=environment(target),
            cwd=tmp_path,
        )

    done = run("import birder")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: the PyPI package 'birder' is another project")
    # The other one came last: its files are in the place of ours.
    (target / "birder/__init__.py").write_text("")
    done = run(f"import sys; sys.path.insert(2, {str(ROOT)!r}); import experiments.run")
    assert done.returncode == 1
    assert "is not birder-repro's" in done.stderr.splitlines()[-1]
    # Elsewhere on the path it does no harm.
    shutil.copy(installed / "birder/__init__.py", target / "birder")
    (tmp_path / "elsewhere").mkdir()
    (target / "birder-0.9.0.dist-info").rename(tmp_path / "elsewhere/birder-0.9.0.dist-info")
    done = run(f"import sys; sys.path.append({str(tmp_path / 'elsewhere')!r}); import birder")
    assert done.returncode == 0, done.stderr
