# SPDX-License-Identifier: Apache-2.0
"""What is built from this checkout, and what an install of it finds."""

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sparse_indexer.deep_gemm_api import INSTALL
from sparse_indexer.jit.hints import VOLTA_TORCH

ROOT = Path(__file__).resolve().parents[1]

# Their versions follow the torch build at hand, so no single pin is right for every card.
FOLLOW_TORCH = re.compile(r"nvidia-cuda-.*|sgl-deep-gemm")

LOCATE_PACKAGE = "import sparse_indexer; print(sparse_indexer.__file__)"
LOCATE_JIT_CSRC = """
from pathlib import Path
import sparse_indexer
package = Path(sparse_indexer.__file__).parent
print(next(d for d in (package / "jit_csrc", package.parents[1] / "jit_csrc") if d.is_dir()))
"""


class Built(NamedTuple):
    sdist: Path
    wheel: Path  # made from the sdist
    checkout_wheel: Path  # made from the checkout


class Environment(NamedTuple):
    root: Path  # a virtual environment that also sees what this one has installed

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return next(self.root.glob("lib/python*/site-packages"))

    def install(self, *arguments: str | Path) -> None:
        """Builds with this environment's tools, downloads nothing, and lets its packages be."""
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install"]
        offline = ["--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed"]
        run(*pip, *offline, *arguments, cwd=self.root)


def run(*command: str | Path, cwd: Path) -> str:
    """The stdout of a command that sees nothing of the checkout; all its output if it fails."""
    environ = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    result = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def files_below(folder: Path) -> set[str]:
    """The files of a source folder, relative to it, less what running Python leaves there."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def wheel_crcs(wheel: Path) -> dict[str, int]:
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: info.CRC for info in archive.infolist()}


def wheel_metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    out, checkout_out = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("checkout_out")
    build = [sys.executable, "-m", "build", "--no-isolation"]
    run(*build, "--outdir", out, ROOT, cwd=out)
    run(*build, "--wheel", "--outdir", checkout_out, ROOT, cwd=checkout_out)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    (checkout_wheel,) = checkout_out.glob("*.whl")
    return Built(sdist, wheel, checkout_wheel)


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """An environment of its own: what it lacks it takes from this one, never the other way round.

    The folders of a .pth file are searched after its own and their own .pth files are not read, so
    an editable install of the library in this environment does not reach it.
    """
    environment = Environment(tmp_path / "environment")
    venv.create(environment.root, symlinks=True)
    folders = [p for p in sys.path if Path(p).name in {"site-packages", "dist-packages"}]
    (environment.site_packages / "parent.pth").write_text("\n".join(folders) + "\n")
    return environment


def test_wheel_holds_the_package_and_the_kernel_sources(built: Built) -> None:
    package = {f"sparse_indexer/{name}" for name in files_below(ROOT / "src" / "sparse_indexer")}
    sources = {f"sparse_indexer/jit_csrc/{name}" for name in files_below(ROOT / "jit_csrc")}
    assert {
        "sparse_indexer/py.typed",
        "sparse_indexer/data/smollm2_trace.safetensors",
        "sparse_indexer/jit_csrc/README.md",
    } <= package | sources

    names = set(wheel_crcs(built.wheel))
    assert {n for n in names if not n.startswith("sparse_indexer-")} == package | sources


def test_wheel_metadata(built: Built) -> None:
    metadata = wheel_metadata(built.wheel)
    assert metadata["Name"] == "sparse-indexer"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert metadata["Requires-Python"] == ">=3.10"
    with zipfile.ZipFile(built.wheel) as archive:
        dist_info = f"sparse_indexer-{metadata['Version']}.dist-info"
        license_text = archive.read(f"{dist_info}/licenses/LICENSE").decode()
        entry_points = archive.read(f"{dist_info}/entry_points.txt").decode()
    assert license_text == (ROOT / "LICENSE").read_text()
    assert "sparse-indexer = sparse_indexer.cli:app" in entry_points.splitlines()


def test_sdist_builds_the_wheel_of_the_checkout(built: Built) -> None:
    assert built.wheel.name == built.checkout_wheel.name
    assert wheel_crcs(built.wheel) == wheel_crcs(built.checkout_wheel)


def test_sdist_holds_what_a_packager_needs(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {
        "LICENSE",
        "README.md",
        "constraints.txt",
        "jit_csrc/README.md",
        "pyproject.toml",
        "tests/test_packaging.py",
    } <= names


def test_editable_install_finds_the_kernel_sources(environment: Environment) -> None:
    environment.install("--editable", ROOT)
    found = run(environment.python, "-c", LOCATE_JIT_CSRC, cwd=environment.root)
    assert Path(found.strip()) == ROOT / "jit_csrc"


def test_wheel_runs_away_from_the_checkout(built: Built, environment: Environment) -> None:
    environment.install(built.wheel)
    python, package = environment.python, environment.site_packages / "sparse_indexer"

    def answer(code: str) -> Path:
        return Path(run(python, "-c", code, cwd=environment.root).strip())

    assert answer(LOCATE_PACKAGE) == package / "__init__.py"
    assert answer(LOCATE_JIT_CSRC) == package / "jit_csrc"
    assert files_below(package / "jit_csrc") == files_below(ROOT / "jit_csrc")

    assert run(python, "-m", "sparse_indexer", "demo", cwd=environment.root).strip()
    script = environment.root / "bin" / "sparse-indexer"
    assert "demo" in run(script, "--help", cwd=environment.root)


def test_constraints_pin_every_dependency(built: Built) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    required = [Requirement(r) for r in wheel_metadata(built.wheel).get_all("Requires-Dist", [])]
    pinned = [
        requirement
        for requirement in required
        if requirement.name != "sparse-indexer" and not FOLLOW_TORCH.fullmatch(requirement.name)
    ]
    assert {"torch", "pytest", "ruff", "cupy-cuda12x"} <= {r.name for r in pinned}
    missing = {r.name for r in pinned} - set(pins)
    assert not missing
    outside = [f"{r} against {pins[r.name]}" for r in pinned if pins[r.name] not in r.specifier]
    assert not outside
    assert pins["torch"] == "2.13.0"
    assert list(pins) == sorted(canonicalize_name(name) for name in pins)


def required(built: Built, name: str) -> Requirement:
    every = map(Requirement, wheel_metadata(built.wheel).get_all("Requires-Dist", []))
    (found,) = (requirement for requirement in every if requirement.name == name)
    return found


def test_what_volta_is_told_to_install_is_a_torch_that_has_it(built: Built) -> None:
    """A release that the library takes, before 2.11; the pinned one is none."""
    (command,) = re.findall(r"^pip install ('torch.*)$", (ROOT / "README.md").read_text(), re.M)
    assert command == f"{VOLTA_TORCH} -e '.[cuda12]'"
    volta = Requirement(VOLTA_TORCH.strip("'")).specifier
    taken = required(built, "torch").specifier
    releases = [f"2.{minor}.0" for minor in range(7, 15)]
    assert [r for r in releases if r in volta] == ["2.8.0", "2.9.0", "2.10.0"]
    assert all(r in taken for r in releases if r in volta)


def test_one_range_of_deep_gemm(built: Built) -> None:
    extra = required(built, "sgl-deep-gemm")
    named = Requirement(INSTALL.removeprefix("pip install ").strip("'"))
    readme = re.search(r"the extra `deepgemm`, which is `(.*)`", (ROOT / "README.md").read_text())
    assert readme is not None
    assert extra.specifier == named.specifier == Requirement(readme[1]).specifier


@pytest.mark.parametrize(
    ("block", "ending"), [("demo", "-m sparse_indexer demo"), ("test", "-m pytest")]
)
def test_readme_commands_install_the_pins(block: str, ending: str) -> None:
    found = re.findall(
        rf"^<!-- ci: {block} -->\n+```\w*\n(.*?)^```$",
        (ROOT / "README.md").read_text(),
        flags=re.DOTALL | re.MULTILINE,
    )
    assert len(found) == 1, f"README.md: expected one block after <!-- ci: {block} -->"
    (command,) = found
    assert re.search(r"pip install -c constraints.txt -e '\.\[test(,cuda12)?\]'", command)
    assert command.strip().endswith(ending)
