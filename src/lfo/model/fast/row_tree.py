"""Which tokens of a batch have the same past, so that a forward computes them once.

tokens      nodes        Rollouts of one task share its prompt, and often their first calls too: with 64 rollouts
7 8 9       0 1 2        of a task, four of five tokens are such repetitions. A node is a token with all tokens
7 8 5       0 1 3        before it; equal nodes have equal hidden states. Rows with other adapters share nothing.
4 8         4 5
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTree:
    """Rows of tokens, padded on the right, as a tree. Suffixes: B rows, T tokens of the longest, M nodes."""

    real_BT: np.ndarray  # False on padding
    nodes_BT: np.ndarray  # index of each token's node; -1 on padding
    firsts_M: np.ndarray  # where each node occurs first, as an index into the flattened B x T

    @classmethod
    def of(cls, tokens_BT: np.ndarray, lengths: Sequence[int], kinds: Sequence[Hashable]) -> RowTree:
        """Find the common prefixes of rows of the same kind."""
        rows, length = tokens_BT.shape
        real_BT = np.arange(length) < np.asarray(lengths)[:, None]
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        kinds_B1 = np.array([[numbers[kind]] for kind in kinds])
        keys = np.hstack([kinds_B1, np.where(real_BT, tokens_BT, -1)])
        # In any order by elements, rows with a common prefix are neighbours; bytes sort fastest.
        order_B = np.array(sorted(range(rows), key=lambda row: keys[row].tobytes()))
        differs = keys[order_B[1:]] != keys[order_B[:-1]]
        fresh_BT = real_BT[order_B]
        fresh_BT[1:] &= np.logical_or.accumulate(differs, axis=1)[:, 1:]
        labels_BT = np.empty((rows, length), dtype=np.int64)
        fresh_labels = np.where(fresh_BT, np.arange(rows * length).reshape(rows, length), -1)
        labels_BT[order_B] = np.maximum.accumulate(fresh_labels, axis=0)  # a shared token has that of the row before
        return cls._of_labels(real_BT, labels_BT)[0]

    @classmethod
    def _of_labels(cls, real_BT: np.ndarray, labels_BT: np.ndarray) -> tuple[RowTree, np.ndarray]:
        """Return the tree of the real tokens, whose nodes have different labels, and the label of each node.

        Nodes are numbered as they occur, so that without common prefixes the nodes are the real tokens, in order."""
        labels, firsts, numbers = np.unique(labels_BT[real_BT], return_index=True, return_inverse=True)
        order_M = np.argsort(firsts)
        nodes_BT = np.full(real_BT.shape, -1)
        nodes_BT[real_BT] = np.argsort(order_M)[numbers]
        places_K = real_BT.ravel().nonzero()[0]
        return cls(real_BT=real_BT, nodes_BT=nodes_BT, firsts_M=places_K[firsts[order_M]]), labels[order_M]

    @classmethod
    def unshared(cls, lengths: Sequence[int]) -> RowTree:
        """Return rows in which each token is its own node."""
        real_BT = np.arange(max(lengths)) < np.asarray(lengths)[:, None]
        return cls._of_labels(real_BT, np.arange(real_BT.size).reshape(real_BT.shape))[0]

    @property
    def shares(self) -> bool:
        return len(self.firsts_M) < self.real_BT.sum()

    def without_repeated_rows(self) -> RowTree:
        """Return the tree without rows whose nodes all occur in rows before: the same nodes, in fewer rows."""
        length = self.real_BT.shape[1]
        rows_M, offsets_M = np.divmod(self.firsts_M, length)
        kept, numbers_M = np.unique(rows_M, return_inverse=True)
        firsts_M = numbers_M * length + offsets_M
        return RowTree(real_BT=self.real_BT[kept], nodes_BT=self.nodes_BT[kept], firsts_M=firsts_M)

    def of_wanted(self, wanted_BT: np.ndarray) -> tuple[RowTree, np.ndarray]:
        """Return the tree of the wanted tokens only, and the indices of its nodes in this one."""
        return self._of_labels(wanted_BT & self.real_BT, self.nodes_BT)


def common_prefix(histories: Sequence[tuple[int, ...]]) -> int:
    """Return the length of the common prefix, which leaves each at least one token."""
    low, high = min(histories), max(histories)
    shortest = min(map(len, histories)) - 1
    return next((index for index in range(shortest) if low[index] != high[index]), shortest)
