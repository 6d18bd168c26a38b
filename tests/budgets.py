# SPDX-License-Identifier: Apache-2.0
"""A budget out of the refusal of a smaller one."""

import re
from collections.abc import Callable

import pytest


def named_budget(call: Callable[[], object], given: int) -> int:
    """Bytes that a call asks for which was given fewer."""
    message = rf"^memory_budget: expected at least (\d+) bytes, got {given}$"
    with pytest.raises(ValueError, match=message) as caught:
        call()
    found = re.match(message, str(caught.value))
    assert found is not None
    return int(found[1])
