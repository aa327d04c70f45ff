"""The examples over several ranks keep the promise that they print."""

from examples import sharded_training, tensor_parallel
from tests.ranks import Ranks


def test_sharded_training_has_the_values_of_one_process(ranks: Ranks) -> None:
    for differences in ranks.run(sharded_training.main, 3):
        assert max(differences.values()) < 1e-5


def test_heads_over_ranks_are_those_of_one_process(ranks: Ranks) -> None:
    for differences in ranks.run(tensor_parallel.main, 16):
        assert max(differences.values()) < 1e-10
