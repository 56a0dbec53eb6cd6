"""Tokens with the same past are one node of a tree, and nothing else is."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lfo.model.fast.row_tree import RowTree

ROWS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.sampled_from(["policy", "world_model"])),
    min_size=1,
    max_size=8,
)


def padded(rows: list[list[int]]) -> np.ndarray:
    tokens_BT = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for place, row in zip(tokens_BT, rows, strict=True):
        place[: len(row)] = row
    return tokens_BT


def tree_of(rows: list[list[int]], kinds: list[str]) -> RowTree:
    return RowTree.of(padded(rows), [len(row) for row in rows], kinds)


def test_the_example_by_hand():
    tree = tree_of([[7, 8, 9], [7, 8, 5], [4, 8]], ["policy"] * 3)
    assert tree.nodes_BT.tolist() == [[0, 1, 2], [0, 1, 3], [4, 5, -1]]
    assert tree.firsts_M.tolist() == [0, 1, 2, 5, 6, 7]
    assert tree.shares
    some, nodes = tree.of_wanted(np.array([[False, True, False], [False, True, True], [False, False, True]]))
    assert some.nodes_BT.tolist() == [[-1, 0, -1], [-1, 0, 1], [-1, -1, -1]]
    assert some.firsts_M.tolist() == [1, 5]
    assert nodes.tolist() == [1, 3]


def test_padding_is_not_a_token_and_other_adapters_share_nothing():
    assert tree_of([[0], [0, 0]], ["policy"] * 2).nodes_BT.tolist() == [[0, -1], [0, 1]]
    assert tree_of([[1, 2], [1, 2]], ["policy", "world_model"]).nodes_BT.tolist() == [[0, 1], [2, 3]]


@given(ROWS)
def test_two_tokens_are_one_node_exactly_if_adapters_and_prefixes_are_equal(rows_and_kinds):
    rows, kinds = (list(each) for each in zip(*rows_and_kinds, strict=True))
    tree = tree_of(rows, kinds)
    pasts = {
        (row, column): (kind, *tokens[: column + 1])
        for row, (tokens, kind) in enumerate(rows_and_kinds)
        for column in range(len(tokens))
    }
    past_of_node = {int(tree.nodes_BT[place]): past for place, past in pasts.items()}
    assert {place: past_of_node[int(tree.nodes_BT[place])] for place in pasts} == pasts
    assert sorted(past_of_node) == list(range(len(set(pasts.values()))))
    assert tree.shares == (len(past_of_node) < len(pasts))
    firsts = zip(*np.divmod(tree.firsts_M, tree.nodes_BT.shape[1]), strict=True)
    assert [tree.nodes_BT[place] for place in firsts] == sorted(past_of_node)


def test_rows_that_repeat_rows_before_are_left_out():
    tree = tree_of([[7, 8], [7, 8, 9], [7, 8], [7], [7, 5]], ["policy"] * 5).without_repeated_rows()
    assert tree.nodes_BT.tolist() == [[0, 1, -1], [0, 1, 2], [0, 3, -1]]
    assert tree.firsts_M.tolist() == [0, 1, 5, 7]


@given(ROWS)
def test_leaving_out_repeated_rows_loses_no_node(rows_and_kinds):
    rows, kinds = (list(each) for each in zip(*rows_and_kinds, strict=True))
    tree = tree_of(rows, kinds)
    fewer = tree.without_repeated_rows()
    assert fewer.nodes_BT.ravel()[fewer.firsts_M].tolist() == list(range(len(tree.firsts_M)))
    known = {tuple(row) for row in tree.nodes_BT.tolist()}
    assert all(tuple(row) in known for row in fewer.nodes_BT.tolist())


@given(ROWS)
def test_without_common_prefixes_nodes_are_the_tokens_in_order(rows_and_kinds):
    rows = [[index, *row] for index, (row, _) in enumerate(rows_and_kinds)]
    tree, expected = tree_of(rows, ["policy"] * len(rows)), RowTree.unshared([len(row) for row in rows])
    assert not tree.shares
    assert np.array_equal(tree.nodes_BT, expected.nodes_BT)
    assert np.array_equal(tree.firsts_M, expected.firsts_M)
    assert np.array_equal(tree.nodes_BT[tree.real_BT], np.arange(tree.real_BT.sum()))
