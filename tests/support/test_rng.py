from driftgen.support.rng import generator_of, seed_of


def test_seeds_depend_on_every_number_and_their_count():
    seen = [seed_of(*n) for n in ((), (0,), (5,), (5, 0), (5, 0, 0), (0, 5), (5, 1), (5, 1, 0), (1, 5))]
    assert len(set(seen)) == len(seen)
    assert seed_of(5, 1) == seed_of(5, 1)
    assert all(0 <= s < 2**63 for s in seen)
    assert generator_of(3).initial_seed() == seed_of(3)
