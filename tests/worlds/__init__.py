"""Six small worlds that were written from the documentation alone, by somebody who had not read the practice of
`lfo pretrain --env`: a held-out test of it. They differ in subject, words, tools and in what must be found out.

Each module has a class, the environment, and `gold(task)`, the calls that succeed. A task has a `key`, the facts that
decide, and an `answer`, what they require. A law, drawn once per seed and never shown, maps keys to answers. Keys occur
in many tasks of `train`; `val` asks in other words for the answers of the same keys; keys of `test_unseen` are in no
other split. `env_args.seed` draws another law. In the folder `tests`:

    lfo check-env env=worlds.kiln:Kiln
"""

from collections.abc import Sequence


def known_and_unseen(
    rows: Sequence[str], columns: Sequence[str]
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return all pairs, one pair of each row held out. Every row and every column remains in a known pair."""
    unseen = [(row, columns[index % len(columns)]) for index, row in enumerate(rows)]
    known = [(row, column) for row in rows for column in columns if (row, column) not in unseen]
    return known, unseen
