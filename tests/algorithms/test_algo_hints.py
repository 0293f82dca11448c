"""Choosing among hint candidates."""

import pytest
import torch

from limes.algorithms.distill import topk_loss
from limes.algorithms.hints import choose_candidates, overlap, take

# two samples of 3 and 2 tokens, up to 3 candidates, top-2 lists; the second sample has two candidates
STUDENT = torch.tensor([[1, 2], [1, 2], [1, 2], [5, 6], [5, 6]])
TEACHER = torch.tensor(
    [
        [[1, 9], [9, 8], [1, 2], [5, 9], [9, 9]],
        [[2, 1], [9, 2], [9, 9], [5, 6], [9, 8]],
        [[2, 1], [1, 2], [9, 9], [5, 6], [5, 6]],
    ]
)
COUNTS, LENGTHS, ONES = torch.tensor([3, 2]), [3, 2], torch.ones(5)


def choose(how, **options):
    arguments = {"candidate_counts": COUNTS, "lengths": LENGTHS, "mask": ONES} | options
    return choose_candidates(STUDENT, TEACHER, how=how, **arguments).tolist()


def test_overlap_counts_common_ids():
    assert overlap(STUDENT, TEACHER).tolist() == [[1, 0, 2, 1, 0], [2, 1, 0, 2, 0], [2, 2, 0, 2, 2]]
    padded = torch.full((5, 2), -1)
    assert overlap(padded, padded.expand(3, 5, 2)).sum() == 0


def test_shortest_is_the_first():
    assert choose("shortest") == [0, 0, 0, 0, 0]


def test_token_optimal_takes_the_best_of_each_token_and_the_shorter_hint_in_a_tie():
    assert choose("token_optimal") == [1, 2, 0, 1, 0]


def test_sequence_optimal_takes_the_best_sum_of_each_sample_among_its_own_candidates():
    assert choose("sequence_optimal") == [2, 2, 2, 1, 1]


def test_masked_tokens_do_not_vote():
    mask = torch.tensor([1, 0, 1, 1, 1])
    assert choose("sequence_optimal", mask=mask) == [0, 0, 0, 1, 1]
    assert choose("token_optimal", mask=mask)[1] == 0


def test_spans_choose_for_themselves():
    spans = torch.tensor([4, 4, 7, 9, 9])
    assert choose("sequence_optimal", span_ids=spans) == [2, 2, 0, 1, 1]


@pytest.mark.parametrize("how", ["shortest", "token_optimal", "sequence_optimal"])
def test_a_sample_without_candidates_learns_nothing(how):
    choice = choose_candidates(STUDENT, TEACHER, torch.tensor([0, 2]), LENGTHS, ONES, how)
    assert choice[:3].tolist() == [-1, -1, -1]
    assert bool((choice[3:] >= 0).all())
    ids = take(TEACHER, choice, fill=-1)
    log_probs = take(torch.full((3, 5, 2), -1.0), choice)
    assert ids[:3].eq(-1).all()
    assert log_probs[:3].eq(0).all()
    loss, _ = topk_loss(torch.full((5, 2), -2.0), log_probs, support="teacher", teacher_ids=ids)
    assert loss[:3].eq(0).all()
    assert loss[3:].ne(0).all()


def test_take_follows_the_choice():
    choice = torch.tensor([2, 0, 1, 1, -1])
    assert take(TEACHER, choice, fill=-1).tolist() == [[2, 1], [9, 8], [9, 9], [5, 6], [-1, -1]]
    assert take(torch.arange(15.0).reshape(3, 5), choice).tolist() == [10, 1, 7, 8, 0]


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="did you mean 'token_optimal'"):
        choose("token_optima")
    with pytest.raises(ValueError, match="up to 4, but there are 3"):
        choose("shortest", candidate_counts=torch.tensor([4, 1]))
