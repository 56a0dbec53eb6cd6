"""The couplings: which adapters each job uses."""

from lfo.config.couplings import COUPLINGS, coupling_of


def test_the_rows_of_the_table():
    assert {name: (row.policy, row.world_model) for name, row in COUPLINGS.items()} == {
        "separate": (("policy",), ("world_model",)),
        "shared": (("policy",), ("policy",)),
    }
    assert {name for name, row in COUPLINGS.items() if row.is_shared} == {"shared"}
    alone = coupling_of("shared", with_world_model=False)
    assert (alone.world_model, alone.is_shared, alone.adapters) == ((), False, ("policy",))
