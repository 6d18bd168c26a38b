# SPDX-License-Identifier: Apache-2.0
"""The backends: one class each, chosen by `sparse_indexer.make_candidate_indexer`."""
