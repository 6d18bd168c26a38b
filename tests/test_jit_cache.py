# SPDX-License-Identifier: Apache-2.0
"""Compiled files on disk: what is a hit, what is not, where things go. No real compiler runs."""

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from jit_support import CSRC, FakeToolkit, scale_kernel, use_empty_cache, use_fake_toolkit

from sparse_indexer.errors import JitError
from sparse_indexer.jit import artifacts, cache, kernel, places
from sparse_indexer.jit.artifacts import device_artifact, host_artifact
from sparse_indexer.jit.cache import Stored
from sparse_indexer.jit.clearing import clear


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_empty_cache(tmp_path, monkeypatch)


@pytest.fixture(autouse=True)
def toolkit(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeToolkit:
    return use_fake_toolkit(tmp_path, monkeypatch)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory of the test's own, for fallbacks; warnings are new."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    places._warn.cache_clear()
    yield folder
    places._warn.cache_clear()


def build(capability: tuple[int, int] = (9, 0), sources: Path = CSRC) -> Stored:
    return device_artifact(scale_kernel(sources), capability)


def path_of(stored: Stored) -> Path:
    assert stored.path is not None
    return stored.path


def test_second_call_is_a_hit(root: Path, toolkit: FakeToolkit) -> None:
    first, second = build(), build()
    assert (first.fresh, second.fresh) == (True, False)
    assert first.data == second.data
    assert len(toolkit.calls) == 1
    relative = path_of(second).relative_to(root).parts
    assert relative[:3] == ("v1", "sm_90a", "scale")
    assert relative[4] == "kernel.cubin"
    assert sorted(os.listdir(path_of(second).parent)) == ["kernel.cubin", "meta.json"]
    assert second.meta["size"] == len(second.data)
    assert not os.listdir(root / "v1" / "staging")


def test_host_module_has_an_entry_of_its_own(root: Path, toolkit: FakeToolkit) -> None:
    assert host_artifact(scale_kernel()).fresh
    stored = host_artifact(scale_kernel())
    assert not stored.fresh
    assert path_of(stored).name == "host.so"
    assert len(toolkit.calls) == 1


def test_two_architectures_in_one_cache(toolkit: FakeToolkit) -> None:
    paths = {path_of(build(cc)) for cc in [(8, 0), (9, 0), (8, 0), (9, 0)]}
    assert len(paths) == 2
    assert len(toolkit.calls) == 2


@pytest.mark.parametrize("damage", [b"", b"comp", b"compiled by someone else\n", None])
def test_damaged_artifact_is_a_miss(toolkit: FakeToolkit, damage: bytes | None) -> None:
    path = path_of(build())
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage)
    again = build()
    assert again.fresh
    assert path_of(again) == path
    assert path.read_bytes() == again.data
    assert not build().fresh
    assert len(toolkit.calls) == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", "7", "{}", '{"size": 3}', None])
def test_damaged_meta_is_a_miss(toolkit: FakeToolkit, damage: str | None) -> None:
    meta = path_of(build()).parent / "meta.json"
    if damage is None:
        meta.unlink()
    else:
        meta.write_text(damage)
    assert build().fresh
    assert not build().fresh


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("resources", []),
        ("resources", {"scale_1": 7}),
        ("resources", {"scale_1": [1, 2]}),
        ("resources", {"scale_1": [1, 2, "3"]}),
        ("warnings", 7),
        ("warnings", [7]),
        ("built_by", None),
        ("size", "12"),
        ("sha256", 7),
    ],
)
def test_meta_of_a_wrong_type_is_a_miss(toolkit: FakeToolkit, name: str, value: object) -> None:
    path = path_of(build()).parent / "meta.json"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps({**meta, name: value}))
    assert build().fresh
    assert not build().fresh


def test_file_in_place_of_an_entry(toolkit: FakeToolkit) -> None:
    folder = path_of(build()).parent
    shutil.rmtree(folder)
    folder.write_text("not a folder")
    assert build().fresh
    assert not build().fresh


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of the test's kernel, to be changed."""
    return Path(shutil.copytree(CSRC, tmp_path / "sources"))


@pytest.mark.parametrize(
    ("file", "device", "host"),
    [
        ("kernels/scale.h", True, True),
        ("kernels/scale.cuh", True, False),
        ("kernels/other.cuh", False, False),
        ("host/scale.cc", False, True),
        ("README.md", False, False),
    ],
)
def test_changed_source_is_built_again(sources: Path, file: str, device: bool, host: bool) -> None:
    build(sources=sources)
    host_artifact(scale_kernel(sources))
    path = sources / file
    before = path.stat() if path.exists() else None
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as out:
        out.write("// a comment\n")
    if before:  # an older time does not hide it
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns - 10**12))
    assert build(sources=sources).fresh is device
    assert host_artifact(scale_kernel(sources)).fresh is host


@pytest.mark.parametrize(
    ("directive", "file"),
    [
        ('#include "kernels/types.hpp"', "kernels/types.hpp"),
        ('#include "beside.inl"', "kernels/beside.inl"),
        ("  #  include <of/its/own>", "include/of/its/own"),
        ('#include "../../outside.inc"', "../outside.inc"),
        ('#include "OUTSIDE"', "../outside.hh"),
        ('#include "linked/x.h"', "linked/x.h"),
    ],
)
def test_whatever_is_included_counts(sources: Path, directive: str, file: str) -> None:
    """Of any name, anywhere, also by way of another file."""
    (sources.parent / "elsewhere").mkdir()
    (sources / "linked").symlink_to(sources.parent / "elsewhere")
    path, scale = sources / file, sources / "kernels/scale.h"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("// 1")
    directive = directive.replace("OUTSIDE", str(path.resolve()))
    scale.write_text(f"{directive}\n{scale.read_text()}")
    for text in ("// 1", '#include "scale.h"', '#include "deep.h"', '#include "deep.h"'):
        path.write_text(text)
        if text == '#include "deep.h"':
            deep = path.parent / "deep.h"
            deep.write_text(f"{deep.read_text() if deep.exists() else ''}// deep")
        for artifact in (
            lambda: build(sources=sources),
            lambda: host_artifact(scale_kernel(sources)),
        ):
            assert artifact().fresh
            assert not artifact().fresh


@pytest.mark.parametrize("directive", ["include NAME", "include_next <x.h>", "import <x.h>"])
def test_include_that_names_no_file(sources: Path, directive: str) -> None:
    with (sources / "kernels/scale.h").open("a") as out:
        out.write(f"#{directive}\n")
    message = f"cannot tell what `#{directive}` of scale includes\n  hint: include it as"
    for artifact in (lambda: build(sources=sources), lambda: host_artifact(scale_kernel(sources))):
        with pytest.raises(JitError, match=message):
            artifact()


def test_header_of_the_library_counts(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Path(shutil.copytree(kernel.SOURCES, tmp_path / "library"))
    monkeypatch.setattr(kernel, "SOURCES", library)
    build()
    assert not build().fresh
    header = library / "include/sparse_indexer/cstdint.h"
    header.write_text(header.read_text().replace("// int8_t", "// a comment, int8_t"))
    assert build().fresh


def test_untouched_copy_elsewhere_is_a_hit(sources: Path, tmp_path: Path) -> None:
    build(sources=sources)
    copy = shutil.copytree(sources, tmp_path / "elsewhere/deeper", copy_function=shutil.copyfile)
    assert not build(sources=Path(copy)).fresh


def test_same_compiler_elsewhere_is_a_hit(
    toolkit: FakeToolkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build()
    host_artifact(scale_kernel())
    copy = Path(shutil.copytree(toolkit.home, tmp_path / "copy"))
    monkeypatch.setenv("CUDA_HOME", str(copy))
    monkeypatch.setenv("CXX", str(copy / "bin/g++"))
    assert not build().fresh
    assert not host_artifact(scale_kernel()).fresh


@pytest.mark.parametrize("part", ["bin/nvcc", "bin/ptxas", "nvvm/bin/cicc"])
def test_other_device_compiler_is_a_miss(toolkit: FakeToolkit, part: str) -> None:
    build()
    path = toolkit.home / part
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as out:
        out.write("# another version\n")
    assert build().fresh


def test_other_host_compiler_is_a_miss(
    toolkit: FakeToolkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_artifact(scale_kernel())
    with (toolkit.bin / "g++").open("a") as out:
        out.write("# another version\n")
    assert host_artifact(scale_kernel()).fresh
    monkeypatch.setenv("CXX", f"{toolkit.bin / 'g++'} -O3")
    assert host_artifact(scale_kernel()).fresh


def test_other_cuda_headers_are_a_miss(toolkit: FakeToolkit) -> None:
    build()
    header = toolkit.home / "include/cuda_runtime_api.h"
    header.write_text(header.read_text() + "// 12.9.1\n")
    assert build().fresh


def test_other_flags_are_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    build()
    monkeypatch.setenv("SPARSE_INDEXER_LINEINFO", "1")
    assert build().fresh


def test_compiler_that_wrote_nothing(toolkit: FakeToolkit) -> None:
    for order in ("empty", "nothing"):
        toolkit.order(order)
        with pytest.raises(JitError, match=r"cannot build scale for sm_90a, with nvcc 12\.9"):
            build()
    (toolkit.bin / "empty").unlink()
    (toolkit.bin / "nothing").unlink()
    assert build().fresh


def test_compiler_that_fails_once(root: Path, toolkit: FakeToolkit) -> None:
    toolkit.order("fail_once")
    with pytest.raises(JitError, match="the first time goes wrong") as caught:
        build()
    lines = str(caught.value).splitlines()
    assert lines[0].endswith(": unit.cu(3): error: the first time goes wrong")
    assert lines[1].startswith(f"  command: {toolkit.bin}/nvcc -cubin -std=c++17")
    log = Path(lines[2].removeprefix("  log: "))
    assert log.is_relative_to(root)
    assert "the first time goes wrong" in log.read_text()
    assert "SPARSE_INDEXER_ENTRY(scale_1, Scale<1>)" in log.read_text()
    assert not list((root / "v1").glob("sm_90a/scale/*"))
    assert build().fresh
    assert not build().fresh


def test_mode_cached(root: Path, toolkit: FakeToolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_INDEXER_JIT", "cached")
    with pytest.raises(JitError, match="scale for sm_90a is not in the cache") as caught:
        build()
    assert str(root) in str(caught.value)
    assert "hint: unset SPARSE_INDEXER_JIT" in str(caught.value)
    assert "of scale there is: nothing" in str(caught.value)
    assert "None" not in str(caught.value)
    assert not toolkit.calls
    assert not root.exists()
    monkeypatch.setenv("SPARSE_INDEXER_JIT", "auto")
    build()
    monkeypatch.setenv("SPARSE_INDEXER_JIT", "cached")
    assert not build().fresh


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PATH", "CXX", "CUDA_HOME"):
        monkeypatch.setenv(name, "/nonexistent")
    monkeypatch.setattr("sparse_indexer.jit.compilers.wheel_folders", lambda *names: iter(()))
    monkeypatch.setattr("os.access", _without("/usr/local/cuda/bin/nvcc"))


@pytest.mark.parametrize("capability", [(9, 0), (12, 0)])
@pytest.mark.parametrize("here", ["another compiler", "an older one", "none"])
def test_mode_cached_takes_any_compiler_s(
    toolkit: FakeToolkit, capability: tuple[int, int], here: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12.0 is another target for an older one."""
    device, host = build(capability), host_artifact(scale_kernel())
    if here == "none":
        no_compiler(monkeypatch)
    for name in ("nvcc", "g++"):
        with (toolkit.bin / name).open("a") as out:
            out.write("# another version\n")
    if here == "an older one":
        header = toolkit.home / "include/cuda_runtime_api.h"
        header.write_text("#define CUDART_VERSION  12080\n")
    monkeypatch.setenv("SPARSE_INDEXER_JIT", "cached")
    assert build(capability).data == device.data
    assert host_artifact(scale_kernel()).data == host.data
    if here != "none":
        monkeypatch.setenv("SPARSE_INDEXER_JIT", "auto")
        assert build(capability).fresh
        assert host_artifact(scale_kernel()).fresh


def test_flags_of_nvcc_from_the_environment_count(monkeypatch: pytest.MonkeyPatch) -> None:
    build()
    for place in ("PREPEND", "APPEND"):
        monkeypatch.setenv(f"NVCC_{place}_FLAGS", "-G")
        assert build().fresh
        assert not build().fresh


def test_no_compiler_takes_an_older_one_s_target(
    toolkit: FakeToolkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    (toolkit.home / "include/cuda_runtime_api.h").write_text("#define CUDART_VERSION  12080\n")
    older = build((12, 0))
    assert older.meta["target"] == "sm_120a"
    no_compiler(monkeypatch)
    assert build((12, 0)).data == older.data


def test_miss_says_what_there_is(
    root: Path, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build((8, 0), sources)
    shipped = root.rename(tmp_path / "shipped")
    build((9, 0), sources)
    host_artifact(scale_kernel(sources))
    monkeypatch.setenv("SPARSE_INDEXER_CACHE_DIR", f"{root}:{shipped}")
    monkeypatch.setenv("SPARSE_INDEXER_JIT", "cached")
    (sources / "kernels/scale.h").write_text("// another")
    with pytest.raises(JitError) as caught:
        build((9, 0), sources)
    _, places, there, _ = str(caught.value).splitlines()
    assert places == f"  in: {root}, {shipped}"
    want = "sm_80 by nvcc 12.9, sm_90a by nvcc 12.9 of other sources or flags"
    assert there == f"  of scale there is: {want}"


def test_damaged_entry_is_called_so(
    root: Path, tmp_path: Path, toolkit: FakeToolkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is another compiler's."""
    build()
    shipped = root.rename(tmp_path / "shipped")
    (cubin,) = shipped.rglob("kernel.cubin")
    monkeypatch.setenv("SPARSE_INDEXER_CACHE_DIR", f"{root}:{shipped}")
    monkeypatch.setenv("SPARSE_INDEXER_JIT", "cached")
    for damage in (lambda: cubin.write_bytes(b"half"), cubin.unlink):
        damage()
        with pytest.raises(JitError) as caught:
            build()
        first, where, there, _ = str(caught.value).splitlines()
        assert first.startswith("scale for sm_90a is damaged in the cache, and SPARSE_INDEXER_JIT")
        assert (where, there) == (f"  in: {cubin}", "  of scale there is: nothing")
        with (toolkit.bin / "nvcc").open("a") as out:
            out.write("# another version\n")


def test_mode_rebuild(toolkit: FakeToolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build()
    monkeypatch.setattr(artifacts, "_rebuilt", set())
    monkeypatch.setenv("SPARSE_INDEXER_JIT", "rebuild")
    second = build()
    assert second.fresh
    assert second.data != first.data
    assert path_of(second).read_bytes() == second.data
    assert not build().fresh  # once a process is enough
    assert len(toolkit.calls) == 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [("JIT", "'auto' or 'cached' or 'rebuild'"), ("LINEINFO", "'0' or '1'")],
)
def test_unknown_value(name: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"SPARSE_INDEXER_{name}", "yes")
    with pytest.raises(ValueError, match=f"^SPARSE_INDEXER_{name}: expected {expected}, got 'yes'"):
        build()


def test_read_only_roots(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build()
    shipped = root.rename(tmp_path / "shipped")
    before = sorted(shipped.rglob("*"))
    monkeypatch.setenv("SPARSE_INDEXER_CACHE_DIR", f"{root}:/nonexistent:{shipped}")
    stored = build()
    assert not stored.fresh
    assert path_of(stored).is_relative_to(shipped)
    assert not root.exists()
    assert build((8, 0)).fresh
    assert root.exists()
    assert sorted(shipped.rglob("*")) == before


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("SPARSE_INDEXER_CACHE_DIR")
    assert places.roots() == (home / ".cache/sparse_indexer", [])
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert places.roots() == (Path("/xdg/sparse_indexer"), [])
    monkeypatch.setenv("SPARSE_INDEXER_CACHE_DIR", "~/a:/b::/c")
    assert places.roots() == (home / "a", [Path("/b"), Path("/c")])
    monkeypatch.setenv("SPARSE_INDEXER_CACHE_DIR", ":/b")
    assert places.roots() == (Path("/xdg/sparse_indexer"), [Path("/b")])


@pytest.fixture(params=["a file in the way", "a file system that takes no folders"])
def unwritable(request: pytest.FixtureRequest, root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root that nobody can write, root included."""
    place = Path("/proc/self/cache")
    if request.param == "a file in the way":
        root.write_text("a file")
        place = root / "cache"
    monkeypatch.setenv("SPARSE_INDEXER_CACHE_DIR", str(place))
    return place


def test_unwritable_root(
    unwritable: Path, temporary: Path, toolkit: FakeToolkit, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "sparse_indexer"):
        first, second, third = build(), build(), build((8, 0))
    assert [s.fresh for s in (first, second, third)] == [True, False, True]
    assert len(toolkit.calls) == 2
    private = temporary / f"sparse_indexer-{os.getuid()}"
    assert path_of(second).is_relative_to(private)
    assert private.stat().st_mode & 0o777 == 0o700
    (record,) = caplog.records
    message = (
        rf"the cache folder {unwritable} cannot be written \([\w ]+\), using {private} instead"
    )
    assert re.match(f"{message}; set SPARSE_INDEXER_CACHE_DIR to ", record.message)


def test_full_disk(
    root: Path,
    temporary: Path,
    toolkit: FakeToolkit,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Is not written, is not asked to hold half a file, and what went elsewhere is found there."""

    def full(file: int, start: int, size: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").startswith(str(root)):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    private = temporary / f"sparse_indexer-{os.getuid()}"
    with caplog.at_level(logging.WARNING, "sparse_indexer"):
        assert path_of(build()).is_relative_to(private)
        assert not build().fresh
    (record,) = caplog.records
    assert record.message == (
        f"the cache folder {root} cannot be written (No space left on device), using {private} "
        "instead; set SPARSE_INDEXER_CACHE_DIR to a folder that can be written"
    )
    assert not list((root / "v1/staging").iterdir())
    with monkeypatch.context() as patch:
        patch.setenv("SPARSE_INDEXER_JIT", "cached")
        patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
        assert not build().fresh
    toolkit.order("fail", "g++: fatal error: /x/y.s: No space left on device")
    with pytest.raises(JitError, match="hint: free some space, or set SPARSE_INDEXER_CACHE_DIR"):
        host_artifact(scale_kernel())


def test_temporary_root_is_for_roots_that_cannot_be_written(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSE_INDEXER_CACHE_DIR", "/proc/self/cache")
    assert build().fresh
    monkeypatch.setenv("SPARSE_INDEXER_CACHE_DIR", str(root))  # which is not there yet
    assert path_of(build()).is_relative_to(root)


def test_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPARSE_INDEXER_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert path_of(build()).is_relative_to(places.temporary_root(make=False) or "")


@pytest.mark.parametrize("kind", ["readable by all", "a link", "somebody else's"])
def test_private_folder_is_not_trusted_blindly(
    unwritable: Path,
    temporary: Path,
    tmp_path: Path,
    toolkit: FakeToolkit,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    private = temporary / f"sparse_indexer-{os.getuid()}"
    if kind == "a link":
        (tmp_path / "target").mkdir(mode=0o700)
        private.symlink_to(tmp_path / "target")
    else:
        private.mkdir(mode=0o755 if kind == "readable by all" else 0o700)
    if kind == "somebody else's":
        user = os.getuid()
        private.rename(temporary / f"sparse_indexer-{user + 1}")
        monkeypatch.setattr("os.getuid", lambda: user + 1)
        assert (temporary / f"sparse_indexer-{user + 1}").stat().st_uid == user
    stored = build()
    assert stored.fresh
    assert stored.path is None
    assert stored.data.startswith(b"compiled by")
    refused = private
    if kind == "somebody else's":
        refused, why = temporary / f"sparse_indexer-{user + 1}", f"user {user} owns it"
    else:
        why = "a link" if kind == "a link" else "mode 755 lets others in"
    (record,) = caplog.records
    assert f"the cache folder {unwritable} cannot be written (" in record.message
    assert f", nor can {refused} (refused: {why}): every process compiles anew" in record.message
    assert stored.fault == record.message
    assert not list(tmp_path.glob("target/*"))
    assert not list(private.glob("*"))
    toolkit.order("fail", "error: no luck")
    with pytest.raises(JitError, match="no luck") as caught:  # and its log is kept
        build((8, 0))
    log = Path(str(caught.value).splitlines()[2].removeprefix("  log: "))
    assert "error: no luck" in log.read_text()


def test_disk_that_fills_up(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "_write", full)
    with caplog.at_level(logging.WARNING, "sparse_indexer"):
        stored = build()
    assert stored.path is None
    assert stored.data.startswith(b"compiled by")
    assert f"cannot keep scale for sm_90a in {root} (No space left on device); set " in caplog.text


def test_lost_race_uses_its_own_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's entry appears while this one is compiled, and stays."""
    original = cache.publish

    def publish_second(*arguments: object, **keywords: object) -> Stored:
        place, entry, data, meta = arguments
        with places.workspace() as other:
            original(other, entry, b"the winner's", meta, replace=False)
        return original(place, entry, data, meta, replace=False)

    monkeypatch.setattr(cache, "publish", publish_second)
    loser = build()
    assert loser.data.startswith(b"compiled by")
    assert path_of(loser).read_bytes() == b"the winner's"
    assert build().data == b"the winner's"


def test_no_compiler_at_all_still_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that was shipped a cache needs neither nvcc nor g++."""
    device, host = build(), host_artifact(scale_kernel())
    no_compiler(monkeypatch)
    assert build().data == device.data
    assert host_artifact(scale_kernel()).data == host.data
    with pytest.raises(JitError, match="there is no device compiler"):
        build((8, 0))


def _without(hidden: str):  # type: ignore[no-untyped-def]
    original = os.access
    return lambda path, mode: str(path) != hidden and original(path, mode)


def test_what_killed_builders_left_is_swept(root: Path) -> None:
    build()
    old, new = root / "v1/staging/building-old", root / "v1/staging/building-new"
    foreign = root / "v1/staging/old"
    for folder in (old, new, foreign):
        (folder / "entry").mkdir(parents=True)
    for folder in (old, foreign):
        os.utime(folder, (0, 0))
    build((8, 0))
    assert not old.exists()
    assert new.exists()
    assert foreign.exists()


def test_clear_leaves_what_is_being_made(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build((8, 0))
    make = artifacts.build.compile_device

    def clear_first(*arguments: object) -> object:
        assert clear() == [(root, [])]
        return make(*arguments)  # type: ignore[arg-type]

    def clear_last(*arguments: object, **keywords: object) -> Stored:
        clear()
        return publish(*arguments, **keywords)  # type: ignore[arg-type]

    publish = cache.publish
    monkeypatch.setattr(artifacts.build, "compile_device", clear_first)
    monkeypatch.setattr(cache, "publish", clear_last)
    assert path_of(build()).is_file()
    assert not build().fresh
    assert build((8, 0)).fresh


def test_clear(root: Path) -> None:
    build()
    host_artifact(scale_kernel())
    (root / "notes.txt").write_text("not ours")
    assert clear() == [(root, [])]
    assert os.listdir(root) == ["notes.txt"]
    assert clear() == []
    assert build().fresh


def test_clear_removes_what_is_damaged_or_failed(root: Path, toolkit: FakeToolkit) -> None:
    toolkit.order("fail_once")
    with pytest.raises(JitError):
        build((8, 0))
    assert list((root / "v1/logs").iterdir())
    (path_of(build()).parent / "meta.json").unlink()
    damaged = path_of(build((7, 5))).parent
    shutil.rmtree(damaged)
    damaged.write_text("no folder")
    assert clear() == [(root, [])]
    assert os.listdir(root) == []


def test_clear_leaves_what_is_not_its_own(root: Path, tmp_path: Path) -> None:
    """Whatever a folder that is named as the cache holds, a v1 of its own included."""
    entry = path_of(build()).parent
    foreign = [
        root / "v1/api/src/main.py",
        root / "v1/api/src/deep/er/main.py",
        root / "v1/readme",
        root / "v1/sm_90a/notes",
        root / "v1/locks/mine.lock",
        root / "v1/logs/scale/today.log",
        root / "v1/staging/mine/file",
        entry.parent / "0123-4567/kernel.cubin",
        entry / "notes",
    ]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("not ours")
    (root / "v1/empty/too").mkdir(parents=True)
    shutil.copytree(root / "v1/sm_90a", tmp_path / "elsewhere")
    (root / "v1/sm_75").symlink_to(tmp_path / "elsewhere")
    ((_, left),) = clear()
    assert all(path.exists() for path in foreign)
    assert os.listdir(entry) == ["notes"]
    assert (tmp_path / "elsewhere/scale" / entry.name / "kernel.cubin").exists()
    assert left == sorted(
        [
            root / "v1/api/src/deep",
            root / "v1/api/src/main.py",
            root / "v1/empty/too",
            root / "v1/locks/mine.lock",
            root / "v1/logs/scale",
            root / "v1/readme",
            root / "v1/sm_75",
            root / "v1/sm_90a/notes",
            entry / "notes",
            entry.parent / "0123-4567",
        ]
    )


def test_clear_names_the_folder_that_it_cannot_clear(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = path_of(build())

    def unlink(file: Path, **_: object) -> None:
        raise OSError(30, "Read-only file system", str(file))

    monkeypatch.setattr(Path, "unlink", unlink)
    message = f"cannot clear {root}: Read-only file system, {path.parent}/"
    with pytest.raises(JitError, match=f"^{re.escape(message)}"):
        clear()
