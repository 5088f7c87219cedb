from driftgen.support.rng import derive_generator, derive_seed


def test_seeds_depend_on_every_number_and_their_count():
    seen = [derive_seed(*n) for n in ((), (0,), (5,), (5, 0), (5, 0, 0), (0, 5), (5, 1), (5, 1, 0), (1, 5))]
    assert len(set(seen)) == len(seen)
    assert derive_seed(5, 1) == derive_seed(5, 1)
    assert all(0 <= s < 2**63 for s in seen)
    assert derive_generator(3).initial_seed() == derive_seed(3)
