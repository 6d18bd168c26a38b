# SPDX-License-Identifier: Apache-2.0
"""What `doctor` says about DeepGEMM: which release, with which torch, and does it work?"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from typing import NamedTuple

import torch

from sparse_indexer.deep_gemm_api import INSTALL, OTHER_TORCH

_SECONDS = 120  # for an import
_MARK = "DeepGEMM: "
_PROGRAM = f"""
from sparse_indexer.deep_gemm_api import DeepGemm
from sparse_indexer.errors import BackendUnavailable
try:
    print({_MARK!r} + DeepGemm().reads)
except BackendUnavailable as error:
    raise SystemExit({_MARK!r} + str(error).replace("\\n", " "))
"""


class DeepGemmReport(NamedTuple):
    """What `deep_gemm_report` found."""

    usable: bool
    lines: list[tuple[str, str]]  # (subject, finding)


def deep_gemm_report() -> DeepGemmReport:
    """Import it in a process of its own, since one for another torch may end its process."""
    if importlib.util.find_spec("deep_gemm") is None:
        return DeepGemmReport(False, [("DeepGEMM", "not installed"), ("fix", INSTALL)])
    about = f"{_installed()}, torch {torch.__version__}: "
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        finding = f"its import takes more than {_SECONDS} s"
        return DeepGemmReport(False, [("DeepGEMM", about + finding), ("fix", OTHER_TORCH)])
    output = done.stdout if done.returncode == 0 else done.stderr
    said = [line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)]
    if not said:
        finding = f"its import ends the process, exit code {done.returncode}"
        return DeepGemmReport(False, [("DeepGEMM", about + finding), ("fix", OTHER_TORCH)])
    if done.returncode == 0:
        return DeepGemmReport(True, [("DeepGEMM", f"{about}usable, {said[-1]}")])
    finding, _, fix = said[-1].removeprefix("sm100: ").rpartition(": ")
    return DeepGemmReport(False, [("DeepGEMM", about + finding), ("fix", fix)])


def _installed() -> str:
    for name in ("sgl-deep-gemm", "deep-gemm"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "deep_gemm of no package"
