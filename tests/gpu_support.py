# SPDX-License-Identifier: Apache-2.0
"""What tests on a GPU share."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_synchronization() -> Iterator[None]:
    """An operation that waits for the device raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
