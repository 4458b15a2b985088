"""`pip install` of the wheel and of the source distribution, each in an empty environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSTALL = ("-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", "install")
QUESTION = ("--cluster", "1x2xcpu", "--seq-len", "64", "--global-batch-size", "8", "--json")


def environment() -> dict[str, str]:
    """Without the paths of this checkout."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


def run(words: Sequence[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True, check=False)


def empty(folder: Path) -> Path:
    """A new environment; the path of its Python."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def files_of(folder: Path) -> set[Path]:
    """All files below `folder` but those that Python and numba write when they run."""
    files = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    return {path for path in files if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution, built from the files that git would commit."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    names = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT).stdout
    for name in filter(None, names.split("\0")):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    python = empty(folder / "builder")
    got = run([python, *INSTALL, "hatchling>=1.27,<2"], folder)
    if got.returncode:
        pytest.skip(f"hatchling cannot be installed: {got.stderr.strip().splitlines()[-1:]}")
    made = run([python, "-m", "hatchling", "build", "-d", folder / "dist"], source)
    assert made.returncode == 0, made.stderr
    return folder / "dist"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_an_empty_environment_has_a_working_command_after_pip_install(
    kind: str, built: Path, tmp_path: Path
) -> None:
    """Its answer is that of this checkout, so no file of data is left out."""
    (path,) = built.glob(kind)
    python = empty(tmp_path / "environment")
    got = run([python, *INSTALL, "-c", ROOT / "constraints.txt", path], tmp_path)
    assert got.returncode == 0, got.stderr
    answers = []
    for program in (python, Path(sys.executable)):
        ran = run([program, "-m", "shardwise", "plan", ROOT / "examples/tiny.yaml", *QUESTION], tmp_path)
        assert ran.returncode == 0, ran.stderr
        answers.append(json.loads(ran.stdout)["best"]["strategy"])
    assert answers[0] == answers[1]
    where = Path(run([python, "-c", "import shardwise; print(shardwise.__file__)"], tmp_path).stdout).parent
    assert where.is_relative_to(tmp_path)
    for package in ("shardwise", "shardwise_verify"):
        assert files_of(where.parent / package) == files_of(ROOT / "src" / package)
    script = run([python.parent / "shardwise", "--version"], tmp_path)
    assert script.returncode == 0 and script.stdout.startswith("shardwise ")
