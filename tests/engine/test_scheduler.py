"""The scheduler as a pure object: a stand-in for the model writes into every slot what its keys would stand for."""

from collections import Counter
from concurrent.futures import Future

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from limes.engine.embedded.scheduler import Scheduler
from limes.engine.embedded.sequence import Answer, Prompt
from limes.engine.protocol import GenerateRequest, RequestRefused, SampleKey, SamplingParams


class Rig:
    """A scheduler, and a model whose keys and values are the tokens up to them and the weights' version.

    Each answer grows to its `max_new_tokens`, one token a draw; its tokens are numbers of their own.
    """

    def __init__(self, *, num_pages=12, page_size=2, max_running=4, prefill_chunk=3, max_context_len=100):
        self.scheduler = Scheduler(
            num_pages=num_pages,
            page_size=page_size,
            max_running=max_running,
            prefill_chunk=prefill_chunk,
            max_context_len=max_context_len,
        )
        self.slots: dict[int, tuple[tuple[int, ...], int]] = {}
        self.version = 0
        self.alive: list[Answer] = []
        self.finished: list[Answer] = []
        self.num_computed = 0
        self.num_steps = 0

    def add(self, prompt_ids, max_new_tokens):
        """True if the answer is let in."""
        try:
            self.scheduler.check_fits(len(prompt_ids), max_new_tokens)
        except RequestRefused:
            return False
        name = str(len(self.alive) + len(self.finished))
        request = GenerateRequest(name, prompt_ids, SamplingParams(max_new_tokens), SampleKey(0, 0, 0))
        answer = Answer(request, self.scheduler.prompt_for(tuple(prompt_ids)), Future(), None, frozenset())
        self.scheduler.add(answer)
        self.alive.append(answer)
        return True

    def finish(self, answer):
        self.scheduler.finish(answer)
        self.alive.remove(answer)
        self.finished.append(answer)

    def forget(self):
        """New weights."""
        self.version += 1
        self.scheduler.forget_prompts()

    def step(self):
        """What the engine does in one step; every path that is read must hold the sequence's own beginning."""
        scheduler = self.scheduler
        step = scheduler.next_step()
        self.num_steps += 1
        tokens_in_pieces = sum(piece.num for piece in step.pieces)
        assert tokens_in_pieces <= scheduler.prefill_chunk
        assert len(scheduler.running) <= scheduler.max_running
        paths = [self.path(answer, len(answer.token_ids), 1) for answer in step.decodes]
        paths += [self.path(piece.owner, piece.start + piece.num, piece.num) for piece in step.pieces]
        for sequence, slots, num in paths:  # all keys of a layer are written before any is read
            for i in range(len(slots) - num, len(slots)):
                self.slots[slots[i]] = (sequence[: i + 1], self.version)
        written = [slot for _, slots, num in paths for slot in slots[-num:]]
        assert len(set(written)) == len(written)
        for sequence, slots, _ in paths:
            for i, slot in enumerate(slots):
                assert self.slots[slot][0] == sequence[: i + 1]
        self.num_computed += len(step.decodes) + tokens_in_pieces
        scheduler.computed(step)
        drawing = list(step.decodes)
        for piece in step.pieces:
            if piece.completes and isinstance(piece.owner, Prompt):
                scheduler.prompt_is_ready(piece.owner, torch.tensor([float(self.version)]))
            elif piece.completes:
                drawing.append(piece.owner)
        first = scheduler.first_draws()
        for answer in first:  # an answer begins on what the present weights computed
            assert answer.prompt.last_hidden.item() == self.version
            assert all(self.slots[slot][1] == self.version for slot in answer.prompt.slots)
        assert len(set(map(id, drawing + first))) == len(drawing) + len(first)
        for answer in drawing + first:
            answer.token_ids.append(1000 + 100 * int(answer.request.request_id) + len(answer.token_ids))
            if len(answer.token_ids) == answer.request.sampling.max_new_tokens:
                self.finish(answer)

    def path(self, owner, num, num_new):
        """Tokens and slots of a sequence up to its own token `num`."""
        assert len(owner.slots) >= num
        if isinstance(owner, Prompt):
            return owner.token_ids[:num], owner.slots[:num].tolist(), num_new
        assert owner in self.scheduler.running
        prompt = owner.prompt
        assert prompt.ready
        assert len(prompt.slots) == len(prompt.token_ids)
        return (
            (*prompt.token_ids, *owner.token_ids[:num]),
            [*prompt.slots.tolist(), *owner.slots[:num].tolist()],
            num_new,
        )

    def run(self, most_steps=2000):
        while self.scheduler.has_work:
            self.step()
            assert self.num_steps < most_steps, "no progress"

    def check(self):
        """Pages, queue, prompts and answers agree."""
        s = self.scheduler
        waiting, running = list(s.waiting), s.running
        assert {*map(id, waiting), *map(id, running)} == set(map(id, self.alive))
        assert len(waiting) + len(running) == len(self.alive)
        prompts = {id(p): p for p in [a.prompt for a in self.alive] + s.unfinished + list(s.prompts.values())}.values()
        held = Counter(page for owner in [*prompts, *running] for page in owner.pages)
        assert s.pool._holders == [held[page] for page in range(s.pool.num_pages)]
        assert s.pool.num_available == s.pool.num_pages - len(held)
        for prompt in prompts:
            assert prompt.num_users == sum(a.prompt is prompt for a in self.alive)
            assert bool(prompt.pages) == (prompt.ready or prompt in s.unfinished)
        for answer in waiting:
            assert not answer.pages
            assert answer.num_computed == 0
        for answer in running:
            assert answer.prompt.pages
        for token_ids, prompt in s.prompts.items():
            assert prompt.token_ids == token_ids
            assert prompt.num_users > 0


PROMPTS = st.builds(
    lambda head, tail: (*head, *tail),
    st.sampled_from([(), (1, 1), (1, 1, 1, 1), (1, 1, 1, 1, 1, 1, 1)]),
    st.lists(st.integers(1, 2), min_size=1, max_size=3),
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_pages=st.integers(3, 14),
        page_size=st.integers(1, 3),
        max_running=st.integers(1, 6),
        prefill_chunk=st.integers(1, 5),
    )
    def build(self, **sizes):
        self.rig = Rig(**sizes)

    @rule(prompt=PROMPTS, new=st.integers(1, 9), num=st.integers(1, 4))
    def add(self, prompt, new, num):
        for _ in range(num):
            self.rig.add(prompt, new)

    @rule(num=st.integers(1, 5))
    def step(self, num):
        for _ in range(num):
            if self.rig.scheduler.has_work:
                self.rig.step()

    @precondition(lambda self: self.rig.alive)
    @rule(data=st.data())
    def abort(self, data):
        self.rig.finish(data.draw(st.sampled_from(self.rig.alive)))

    @precondition(lambda self: self.rig.scheduler.running)
    @rule()
    def retract_all(self):
        for answer in reversed(self.rig.scheduler.running[:]):
            self.rig.scheduler.retract(answer)

    @rule()
    def forget(self):
        self.rig.forget()

    @invariant()
    def consistent(self):
        if hasattr(self, "rig"):
            self.rig.check()

    def teardown(self):
        if not hasattr(self, "rig"):
            return
        self.rig.num_steps = 0
        self.rig.run()
        self.rig.check()
        assert self.rig.scheduler.pool.num_available == self.rig.scheduler.pool.num_pages


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestScheduler = SchedulerMachine.TestCase


@settings(max_examples=60, deadline=None)
@given(
    mix=st.lists(st.tuples(PROMPTS, st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=5),
    num_pages=st.integers(3, 20),
    page_size=st.integers(1, 4),
    max_running=st.integers(1, 8),
    prefill_chunk=st.integers(1, 12),
)
def test_everything_let_in_ends_and_no_page_is_lost(mix, **sizes):
    rig = Rig(**sizes)
    num = sum(rig.add(prompt, new) for prompt, new, copies in mix for _ in range(copies))
    rig.run()
    assert len(rig.finished) == num
    assert rig.scheduler.pool.num_available == rig.scheduler.pool.num_pages
    assert not rig.scheduler.prompts


def test_a_group_larger_than_the_batch_computes_its_prompt_once():
    rig = Rig(num_pages=200, max_running=8)
    for _ in range(40):
        rig.add((1, 2, 3, 4, 5), 4)
    rig.run()
    assert rig.num_computed == 5 + 40 * 3  # the last token of an answer is never computed


def test_answers_start_in_the_order_they_came_and_the_last_gives_way():
    rig = Rig(num_pages=6, page_size=2, max_running=4, prefill_chunk=100)
    for _ in range(4):
        rig.add((1, 2), 6)
    seen = []
    while rig.scheduler.has_work:
        rig.step()
        seen.append([int(a.request.request_id) for a in rig.scheduler.running])
        assert seen[-1] == sorted(seen[-1])
    assert [int(a.request.request_id) for a in rig.finished] == [0, 1, 2, 3]
    assert [0, 1, 2, 3] in seen
    assert any(later == [0, 1] for later in seen)


def test_prompts_of_old_weights_never_keep_a_waiting_answer_out():
    """Two answers that kept their prompts through an update wait for the pages that each other's prompt holds."""
    rig = Rig(num_pages=10, page_size=1, prefill_chunk=100, max_running=2)
    rig.add((1, 1, 1, 1), 6)
    rig.add((2, 2, 2, 2), 6)
    rig.step()
    rig.step()
    rig.forget()
    for answer in reversed(rig.scheduler.running[:]):
        rig.scheduler.retract(answer)
    rig.run()
    assert len(rig.finished) == 2


def test_an_aborted_prompt_goes_on_for_those_that_share_its_pages():
    rig = Rig(num_pages=30, page_size=2, prefill_chunk=3)
    rig.add((1, 1, 1, 1, 1, 1, 1, 5), 2)
    rig.add((1, 1, 1, 1, 1, 1, 1, 6), 2)
    rig.step()
    first, second = rig.alive
    assert first.prompt.num_computed < second.prompt.num_computed == 6
    rig.finish(first)
    rig.run()
    assert rig.scheduler.num_prompt_tokens_shared == 6
    assert rig.scheduler.pool.num_available == 30


def test_a_known_beginning_is_found_again_until_the_weights_change():
    rig = Rig(num_pages=30, page_size=2, prefill_chunk=100)
    rig.add((1, 2, 3, 4, 5), 1)
    rig.run()
    before = rig.num_computed
    rig.add((1, 2, 3, 4, 5), 1)
    rig.run()
    assert rig.num_computed - before == 1
    rig.forget()
    before = rig.num_computed
    rig.add((1, 2, 3, 4, 5), 1)
    rig.run()
    assert rig.num_computed - before == 5


def test_answers_that_have_tokens_keep_their_keys_through_an_update_and_others_start_over():
    rig = Rig(num_pages=40, page_size=2, prefill_chunk=100, max_running=2)
    for _ in range(3):
        rig.add((1, 2, 3), 4)
    rig.step()
    rig.step()
    rig.forget()
    running, waiting = rig.scheduler.running, rig.scheduler.waiting
    assert all(answer.prompt.ready and answer.num_computed == 1 for answer in running)
    assert waiting[0].prompt is not running[0].prompt
    before = rig.num_computed
    rig.run()
    assert rig.num_computed - before == 2 * 2 + 3 + 3  # nothing twice, and the prompt again for the third answer


@pytest.mark.parametrize(
    ("prompt_len", "new", "message"),
    [
        (0, 5, "needs a prompt token and a new token, got 0 and 5"),
        (5, 0, "needs a prompt token and a new token, got 5 and 0"),
        (60, 41, "prompt of 60 tokens \\+ 41 new tokens = 101 exceeds the context of 100"),
        (20, 5, "need 13 pages of 2, the KV cache has 12; raise engine.kv_cache_tokens to 26"),
    ],
)
def test_refusals_give_the_numbers(prompt_len, new, message):
    with pytest.raises(RequestRefused, match=message):
        Rig().scheduler.check_fits(prompt_len, new)


def test_an_answer_whose_first_token_is_not_drawn_yet_starts_over_on_new_weights():
    rig = Rig(prefill_chunk=100)
    rig.add((1, 2, 3), 4)
    step = rig.scheduler.next_step()
    rig.scheduler.computed(step)
    rig.scheduler.prompt_is_ready(rig.alive[0].prompt, torch.zeros(1))
    rig.forget()
    assert list(rig.scheduler.waiting) == rig.alive
    rig.run()


def test_what_just_fits_runs():
    rig = Rig(num_pages=12, page_size=2)
    assert rig.add((1,) * 19, 4)
    rig.run()
    assert rig.finished
