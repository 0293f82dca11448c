"""Draws prompts in epochs and remembers where it is."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from limes.data.encode import EncodedPrompt, EncodedPrompts
from limes.data.saved_samples import sample_from_state, sample_state
from limes.records import Group, Sample

FORMAT = 1
IDENTITY = ("fingerprint", "seed", "shuffle")
"""What must be equal for a saved position to mean the same prompts."""


class DataCursor:
    """Hands out groups of fresh samples: every prompt exactly once an epoch, and put-back groups first.

    Group g of a run is prompt `g % N` of epoch `g // N` for N prompts, so a batch may straddle epochs and the whole
    order follows from the data, the seed and whether it shuffles.
    """

    def __init__(self, encoded: EncodedPrompts, *, seed: int, shuffle: bool, n_samples_per_prompt: int) -> None:
        assert encoded.prompts, "an empty prompt set has no order"
        assert n_samples_per_prompt > 0
        self.notice: str | None = None
        self._prompts = encoded.prompts
        self._identity = {"fingerprint": encoded.fingerprint, "seed": seed, "shuffle": shuffle}
        self._name = encoded.name
        self._seed = seed
        self._shuffle = shuffle
        self._n_samples_per_prompt = n_samples_per_prompt
        self._next_group = 0
        self._next_index = 0
        self._put_back: deque[Group] = deque()
        self._order = (0, self._make_order(0))

    @property
    def prompts_per_epoch(self) -> int:
        """Number of prompts."""
        return len(self._prompts)

    @property
    def epoch(self) -> int:
        """Number of epochs drawn in full, which is the epoch of the next fresh prompt."""
        return self._next_group // len(self._prompts)

    @property
    def offset(self) -> int:
        """Prompts drawn in this epoch."""
        return self._next_group % len(self._prompts)

    @property
    def num_put_back(self) -> int:
        """Groups that wait to be served again."""
        return len(self._put_back)

    def prompt_of(self, group_index: int) -> EncodedPrompt:
        """The prompt of a group, drawn or still to come."""
        epoch, offset = divmod(group_index, len(self._prompts))
        if self._order[0] != epoch:
            self._order = (epoch, self._make_order(epoch))
        return self._prompts[self._order[1][offset]]

    def next_groups(self, n: int) -> list[Group]:
        """Take `n` groups: what was put back, oldest first, then fresh ones.

        A fresh group has `n_samples_per_prompt` samples whose tokens are the prompt; samples share nothing.
        """
        groups = [self._put_back.popleft() for _ in range(min(n, len(self._put_back)))]
        return groups + [self._fresh_group() for _ in range(n - len(groups))]

    def put_back(self, groups: Iterable[Group]) -> None:
        """Keep groups drawn earlier, as they are, to be served again before fresh ones."""
        for group in groups:
            assert group, "a group to put back has no samples"
            assert all(0 <= sample.group_index < self._next_group for sample in group), "not a group of this cursor"
            self._put_back.append(group)

    def state_dict(self) -> dict[str, Any]:
        """The position and the put-back groups as plain JSON data.

        Raises:
            ValueError: a put-back sample carries metadata that JSON cannot hold.
        """
        return {
            "format": FORMAT,
            **self._identity,
            "epoch": self.epoch,
            "offset": self.offset,
            "next_index": self._next_index,
            "put_back": [
                [sample_state(sample, self.prompt_of(sample.group_index)) for sample in group]
                for group in self._put_back
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        """Go on from a saved position. For other data, another seed or another order the position means nothing: the
        cursor then starts at 0, and the returned sentence (also kept as `notice`) says why.

        Raises:
            ValueError: the state is of a format that this version does not read.
        """
        if state.get("format") != FORMAT:
            raise ValueError(f"the saved data position has format {state.get('format')}; this version reads {FORMAT}")
        changed = [key for key in IDENTITY if state[key] != self._identity[key]]
        self._put_back.clear()
        if changed:
            self._next_group = self._next_index = 0
            self.notice = self._describe_change(changed, state)
            return self.notice
        self._next_group = state["epoch"] * len(self._prompts) + state["offset"]
        self._next_index = state["next_index"]
        for group in state["put_back"]:
            self._put_back.append(
                [sample_from_state(sample, self.prompt_of(sample["group_index"])) for sample in group]
            )
        self.notice = None
        return None

    def _describe_change(self, changed: list[str], state: dict[str, Any]) -> str:
        if "fingerprint" in changed:
            why = f"the prompts of {self._name}, or how they are rendered, are not those of the saved run"
        else:
            why = ", ".join(f"{key} was {state[key]} and is {self._identity[key]}" for key in changed)
        return f"data: {why}; starting at the first prompt instead of epoch {state['epoch']}, prompt {state['offset']}"

    def _fresh_group(self) -> Group:
        prompt = self.prompt_of(self._next_group)
        group = [
            Sample(
                index=self._next_index + i,
                group_index=self._next_group,
                prompt=copy.deepcopy(prompt.prompt),
                tokens=list(prompt.token_ids),
                label=copy.deepcopy(prompt.label),
                metadata=copy.deepcopy(prompt.metadata),
            )
            for i in range(self._n_samples_per_prompt)
        ]
        self._next_group += 1
        self._next_index += self._n_samples_per_prompt
        return group

    def _make_order(self, epoch: int) -> npt.NDArray[np.int64]:
        """The permutation of an epoch: sort the raw output of Philox keyed by (seed, epoch). Raw bits and a stable sort
        are fixed by definition, where NumPy's own `permutation` may change from version to version."""
        if not self._shuffle:
            return np.arange(len(self._prompts))
        keys = np.random.Philox(np.random.SeedSequence([self._seed, epoch])).random_raw(len(self._prompts))
        return np.argsort(keys, kind="stable")
