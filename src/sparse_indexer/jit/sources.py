# SPDX-License-Identifier: Apache-2.0
"""What a compiler reads of a kernel: each file that is included, whatever its name and its folder.

Found as compilers find it, `"x"` beside the file that includes it, then either in the folders of
`Kernel.include_dirs`. What is in none of these is the compiler's own, CUDA's or tvm-ffi's: of those
the version counts.
"""

from __future__ import annotations

import re
from pathlib import Path

from sparse_indexer.errors import JitError
from sparse_indexer.jit.kernel import Kernel

_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(include\w*|import)\b[ \t]*(.*)", re.MULTILINE)
_BY_NAME = re.compile(r'"([^"]+)"|<([^>]+)>')


def sources(kernel: Kernel, text: str, folder: Path | None = None) -> list[str]:
    """Name and text of whatever `text`, a file of `folder`, includes, also by way of others.

    Raises:
        JitError: one cannot be read, or a directive does not name a file.
    """
    parts: list[str] = []
    seen: set[Path] = set()
    queue = [(text, folder)]
    for text, folder in queue:  # which grows
        for directive, operand in _DIRECTIVE.findall(text):
            by_name = _BY_NAME.match(operand) if directive == "include" else None
            if not by_name:
                raise JitError(
                    f"cannot tell what `#{directive} {operand.strip()}` of {kernel.name} includes"
                    '\n  hint: include it as "name" or <name>'
                )
            name = by_name[1] or by_name[2]
            beside = [folder] if folder and by_name[1] else []
            places = (place / name for place in (*beside, *kernel.include_dirs))
            path = next((place for place in places if place.is_file()), None)
            if path and path.resolve() not in seen:
                seen.add(path.resolve())
                parts += [name, read(path)]
                queue.append((parts[-1], path.parent))
    return parts


def read(source: Path) -> str:
    """All of a source, in any encoding."""
    try:
        return source.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise JitError(f"cannot read the source {source}: {error.strerror}") from error
