# SPDX-License-Identifier: Apache-2.0
"""One run of a compiler: a unit to machine code, a host entry to a module.

What comes back is bytes; what goes wrong is a `JitError` with all that is needed to mend it.
"""

from __future__ import annotations

import os
import shlex
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

from sparse_indexer.errors import JitError
from sparse_indexer.jit.compilers import DeviceCompiler, HostCompiler
from sparse_indexer.jit.hints import first_error, hint_for
from sparse_indexer.jit.kernel import Kernel
from sparse_indexer.jit.places import temporary_root, variable
from sparse_indexer.jit.resources import FLAG
from sparse_indexer.jit.settings import setting
from sparse_indexer.jit.targets import is_ptx

_importing = threading.Lock()

# Neither -use_fast_math nor any part of it: kernels agree with the oracle to the bit.
_COMMON_FLAGS = ("-std=c++17", FLAG)
# So that both take a constexpr function that host and device share, and NVRTC 12 a generic lambda.
_OWN_FLAGS = {"nvrtc": ("-default-device",), "nvcc": ("--expt-relaxed-constexpr",)}

# Hidden, because a module's table of kernels is its own; without a symbol that is nowhere.
HOST_FLAGS = (
    *("-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique"),
    "-Wl,-z,defs",
)


class Built(NamedTuple):
    """What a compiler made."""

    data: bytes
    output: str  # what it printed


def device_flags(*compilers: str) -> tuple[str, ...]:
    """The flags of these device compilers that decide what comes out; of both if none is named."""
    lines = ("-lineinfo",) if setting("SPARSE_INDEXER_LINEINFO") == "1" else ()
    own = (flag for name in compilers or _OWN_FLAGS for flag in _OWN_FLAGS[name])
    return (*_COMMON_FLAGS, *own, *lines)


def compile_device(
    kernel: Kernel, target: str, compiler: DeviceCompiler, staging: Path, log: Path | None
) -> Built:
    """The cubin of all variants of `kernel` for `target`, or their PTX.

    Args:
        staging: a folder of our own, for the files of nvcc.
        log: where the compiler's whole output goes if it fails; `None` is a file in the temporary
            directory.

    Raises:
        JitError: the compiler failed, or wrote nothing.
    """
    folders = (*kernel.include_dirs, *compiler.include_dirs)
    flags = (
        *device_flags(compiler.name),
        f"-arch={target}",
        *(f"-I{folder}" for folder in folders),
    )
    if compiler.name == "nvrtc":
        # It looks for "x" beside this file first, where nothing is; a bare one is in the current
        # folder.
        name = f"{os.devnull}/{kernel.name}.cu"
        command: tuple[str, ...] = ("nvrtc", *flags, name)
        built = _run_nvrtc(kernel.unit, name, flags, ptx=is_ptx(target))
    else:
        unit, out = staging / f"{kernel.name}.cu", staging / "nvcc.cubin"
        kind = "-ptx" if is_ptx(target) else "-cubin"
        command = (str(compiler.path), kind, *flags, "-o", str(out), str(unit))
        built = _run(command, out, kernel.unit)
    if not built.data:
        title = f"{kernel.name} for {target}, with {compiler.label}"
        hint = hint_for(built.output, target, compiler.version)
        raise failure(title, built.output, command, log, hint, kernel.unit)
    return built


def compile_host(kernel: Kernel, compiler: HostCompiler, staging: Path, log: Path | None) -> Built:
    """The module of the host entry of `kernel`: a shared library.

    Raises:
        JitError: the compiler failed, or wrote nothing.
    """
    out = staging / "g++.so"
    folders = [f"-I{folder}" for folder in kernel.include_dirs]
    folders += [f"-isystem{folder}" for folder in compiler.include_dirs]
    command = (*compiler.command, *HOST_FLAGS, *folders, "-o", str(out), str(kernel.host_source))
    command += compiler.libraries
    built = _run(command, out)
    if not built.data:
        title = f"the host entry of {kernel.name}, with {shlex.join(compiler.command)}"
        raise failure(title, built.output, command, log, hint_for(built.output, "", None))
    return built


def _run_nvrtc(unit: str, name: str, flags: tuple[str, ...], *, ptx: bool) -> Built:
    try:
        nvrtc = _import_nvrtc()
        program = nvrtc.createProgram(unit, name, [], [])
    except (ImportError, OSError, RuntimeError) as error:
        return Built(b"", f"error: CuPy cannot use NVRTC: {error}")
    try:
        nvrtc.compileProgram(program, flags)
        data = nvrtc.getPTX(program) if ptx else _whole(nvrtc.getCUBIN(program))
        return Built(data, _log_of(nvrtc, program))
    except nvrtc.NVRTCError as error:
        return Built(b"", _log_of(nvrtc, program) or f"error: {error}")
    finally:
        nvrtc.destroyProgram(program)


def _whole(cubin: bytes) -> bytes:
    """The ELF with its last byte, which CuPy takes for the zero at the end of a text.

    It ends with a table of headers, whose last field, an alignment or size, has a zero there.
    """
    programs, sections = struct.unpack_from("<QQ", cubin, 32)
    size_p, count_p, size_s, count_s = struct.unpack_from("<4H", cubin, 54)
    return cubin.ljust(max(programs + size_p * count_p, sections + size_s * count_s), b"\0")


def _log_of(nvrtc: Any, program: Any) -> str:
    try:
        return str(nvrtc.getProgramLog(program))
    except UnicodeDecodeError as error:  # it quotes a source
        return error.object.decode(errors="replace")


def _import_nvrtc() -> Any:
    """CuPy's binding.

    CuPy makes a folder for a cache of its own when it is imported, and fails where that is not to
    be had. Nothing of ours goes there, so in that case it gets another one.
    """
    with _importing:
        folder = None
        if "cupy" not in sys.modules and "CUPY_CACHE_DIR" not in os.environ:
            try:
                os.makedirs(os.path.expanduser("~/.cupy/kernel_cache"), exist_ok=True)
            except OSError:
                root = temporary_root(make=True)
                folder = str(root / "cupy") if root else None
        with variable("CUPY_CACHE_DIR", folder):  # for the import: the variable is the caller's
            from cupy.cuda import nvrtc
    return nvrtc


def _run(command: tuple[str, ...], out: Path, unit: str = "") -> Built:
    """The file `out` that the command wrote; no bytes unless it succeeded.

    Its last argument is the file of the `unit`, if there is one.
    """
    environ = {**os.environ, "LC_ALL": "C", "TMPDIR": str(out.parent)}
    try:
        if unit:
            Path(command[-1]).write_text(unit)
        result = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
    except OSError as error:
        return Built(b"", f"error: {error}")
    output = result.stdout.decode(errors="replace")
    if result.returncode != 0:
        return Built(b"", output or f"error: exit status {result.returncode}, and no output")
    try:
        return Built(out.read_bytes(), output or "error: it wrote an empty file")
    except OSError as error:
        return Built(b"", f"{output}\nerror: exit status 0, but no output file: {error}")


def failure(
    title: str,
    output: str,
    command: tuple[str, ...],
    log: Path | None,
    hint: str | None,
    unit: str = "",
) -> JitError:
    """The one form of a failed build; keeps the compiler's whole output in `log`."""
    line = shlex.join(command)
    path = _keep(f"{line}\n\n{output}\n\n{unit}", log)
    lines = [f"cannot build {title}: {first_error(output)}", f"  command: {line}", f"  log: {path}"]
    return JitError("\n".join(lines + ([f"  hint: {hint}"] if hint else [])))


def _keep(text: str, log: Path | None) -> Path:
    if log:
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(text)
            return log
        except OSError:
            pass
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="sparse_indexer-", suffix=".log", delete=False
        ) as file:
            file.write(text)
    except OSError:
        return Path(os.devnull)
    return Path(file.name)


def missing(title: str, places: tuple[str, ...], hint: str) -> JitError:
    """The one form of a compiler that is not there."""
    return JitError(
        "\n".join([f"cannot build {title}", *(f"  {p}" for p in places), f"  hint: {hint}"])
    )
