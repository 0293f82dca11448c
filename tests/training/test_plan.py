import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from limes.training.packing import cut_micro_batches, pack
from limes.training.parallel import context
from limes.training.plan import split_further

lengths = st.lists(st.integers(1, 50), min_size=1, max_size=12)


@given(lengths, st.integers(1, 20), st.randoms())
def test_further_micro_batches_hold_the_same_sequences(sizes, num, draw) -> None:
    order = list(range(len(sizes)))
    draw.shuffle(order)
    cut = [order[i : i + 4] for i in range(0, len(order), 4)]
    found = split_further(cut, sizes, max(num, len(cut)))
    assert len(found) == max(num, len(cut))
    assert sorted(i for batch in found for i in batch) == sorted(order)
    assert all(found[: min(len(found), len(sizes))]), "no empty one while another could be cut"


def test_the_heaviest_micro_batch_is_halved_first() -> None:
    assert split_further([[0, 1], [2, 3]], [1, 1, 9, 9], 3) == [[0, 1], [2], [3]]
    assert split_further([[0, 1, 2]], [9, 1, 1], 2) == [[0], [1, 2]]
    assert split_further([[0]], [3], 3) == [[0], [], []]
    assert split_further([], [], 2) == [[], []]


@given(st.integers(1, 4), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.floats(1.0, 100.0))
def test_context_ranks_share_the_tokens_and_the_work(size, answers, dense) -> None:
    sequences = [[1, 2, 3, *[10 + i] * num] for i, num in enumerate(answers)]
    batch = pack(sequences, answers, torch.device("cpu"))
    positions = batch.positions.numpy()
    chunks = context._cut(positions, size, dense)
    assert [edge for chunk in chunks for edge in chunk][1:-1:2] == [chunk[0] for chunk in chunks[1:]]
    assert (chunks[0][0], chunks[-1][1]) == (0, len(positions))
    owner, local = context._places(chunks, size, len(positions))
    for rank in range(size):
        assert local[owner == rank].tolist() == list(range(int((owner == rank).sum())))
    work = np.array([(1.0 + positions / dense)[owner == rank].sum() for rank in range(size)])
    most = (1.0 + positions / dense).max()
    assert (work <= work.sum() / size + 2 * most).all()


def test_micro_batches_are_filled_first_fit_and_siblings_stay_together() -> None:
    apart = [[1] * 7, [2] * 6, [3] * 4]
    assert cut_micro_batches(apart, 10, share=False) == [[0, 2], [1]]
    prompt = [5] * 6
    siblings = [[*prompt, 7, 7, 7], [9] * 8, [*prompt, 8, 8, 8], [*prompt, 6, 6, 6]]
    assert cut_micro_batches(siblings, 13) == [[0, 2, 3], [1]]
