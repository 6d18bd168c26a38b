# SPDX-License-Identifier: Apache-2.0
"""Each op of an indexer in plain torch, on any device: one tile of rows x positions at a time."""
