import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebench import seeds

INT64 = st.integers(-(2**63), 2**63 - 1)


def splitmix64(key, value):
    """Return one round as published, with Python's unbounded integers."""
    z = (key + value * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_mix_gives_the_published_numbers_of_splitmix64():
    key = torch.tensor([1234567])
    assert [int(seeds.mix(key, step)) % 2**64 for step in range(1, 6)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(INT64, INT64)
def test_mix_is_exact_for_numbers_and_tensors(key, value):
    expected = splitmix64(key, value)
    keys = torch.tensor([key])
    assert seeds.mix(keys, value).dtype == torch.int64
    assert int(seeds.mix(keys, value)) % 2**64 == expected
    assert int(seeds.mix(keys, torch.tensor([value]))) % 2**64 == expected


@given(st.lists(INT64, min_size=1, max_size=5))
def test_uniform_lies_in_zero_to_one_and_has_24_bits(keys):
    drawn = seeds.uniform(torch.tensor(keys), 40)
    assert drawn.dtype == torch.float32 and drawn.shape == (len(keys), 40)
    assert float(drawn.min()) >= 0 and float(drawn.max()) < 1
    expected = [[(splitmix64(key, step) >> 40) / 2**24 for step in range(1, 41)] for key in keys]
    assert drawn.double().tolist() == expected


def test_pinned_numbers_do_not_change_from_version_to_version():
    assert seeds.seed_of("a", 1) == 4742018630964328543
    assert seeds.generator("x", 3).integers(0, 1000, 5).tolist() == [895, 554, 621, 67, 146]
    assert seeds.uniform(torch.tensor([0]), 2)[0].tolist() == pytest.approx([0.8833107948303223, 0.4315279722213745])


def test_a_seed_depends_on_each_dimension_their_order_and_where_they_end():
    named = [(), ("a",), ("b",), ("a", 1), (1, "a"), ("a", 2), ("a", 1, ""), ("a1",), ("ab", "c"), ("a", "bc")]
    drawn = [seeds.seed_of(*dimensions) for dimensions in named]
    assert len(set(drawn)) == len(named)
    assert all(0 <= seed < 2**63 for seed in drawn)
    assert seeds.seed_of("a", 1) == drawn[3]


def test_a_generator_depends_on_its_name_only():
    first, again, other = (seeds.generator(*name).random(5).tolist() for name in (("x", 1), ("x", 1), ("x", 2)))
    assert first == again != other
