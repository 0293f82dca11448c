"""The prompts of a run: a cursor over those to train on, a fixed set of those to evaluate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from limes.config import Config, batch_algebra
from limes.config.counting import num_of
from limes.data import DataCursor, EncodedPrompts, PromptRenderer, PromptSet, encode_prompts, load_prompts
from limes.rollout.evaluation import EvalSet, default_ks, eval_seed
from limes.run import Console

if TYPE_CHECKING:
    from limes.models.policy import TextModel


@dataclass(frozen=True, slots=True)
class Prompts:
    """What there is to answer.

    Attributes:
        cursor: draws training prompts; None where nothing is trained.
        questions: the evaluation prompts.
        longest: tokens of the longest prompt that can be asked.
    """

    cursor: DataCursor | None
    questions: EvalSet
    longest: int


def load_all_prompts(config: Config, policy: TextModel, console: Console, ks: Sequence[int] | None = None) -> Prompts:
    """Load and tokenise the training and the evaluation prompts.

    Args:
        ks: the k of each pass@k; default: 1, 2, 4, ... up to the answers a prompt gets.

    Raises:
        ValueError: data cannot be had, or none of it fits; names setting, value and fix.
    """
    training_set, training = _training_prompts(config, policy, console)
    evaluation = _evaluation_prompts(config, policy, training_set, console)
    n_samples = config.eval.n_samples_per_prompt
    questions = EvalSet(evaluation.prompts, n_samples, tuple(ks or default_ks(n_samples)), eval_seed(config.run.seed))
    longest = max(len(prompt.token_ids) for part in (training, evaluation) if part for prompt in part.prompts)
    if training is None:
        return Prompts(None, questions, longest)
    batch_algebra(config, len(training.prompts))  # refuses what cannot make a single rollout
    cursor = DataCursor(
        training,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        n_samples_per_prompt=config.rollout.n_samples_per_prompt,
    )
    return Prompts(cursor, questions, longest)


def max_prompt_len(config: Config, context_len: int, max_response_len: int, setting: str) -> int:
    """Longest prompt that leaves room for the longest answer.

    Raises:
        ValueError: the answer alone fills the context.
    """
    context = min(config.engine.max_context_len or context_len, context_len)
    room = context - max_response_len
    if room < 1:
        raise ValueError(
            f"{setting} = {max_response_len} leaves no room for a prompt in a context of {num_of(context, 'token')}; "
            f"lower it below {context}"
        )
    return min(config.data.max_prompt_len or room, room)


def _training_prompts(
    config: Config, policy: TextModel, console: Console
) -> tuple[PromptSet | None, EncodedPrompts | None]:
    """The training rows and, where something is trained, their token ids."""
    if config.rollout.num_rollout == 0:
        return (load_prompts(config.data) if config.eval.prompt_data is None else None), None
    prompts = load_prompts(config.data)
    room = max_prompt_len(config, policy.max_context_len, config.rollout.max_response_len, "rollout.max_response_len")
    encoded = _encode(prompts, policy, config, room, console)
    _tell(console, "training", encoded, room)
    return prompts, encoded


def _evaluation_prompts(
    config: Config, policy: TextModel, training_set: PromptSet | None, console: Console
) -> EncodedPrompts:
    """The first `eval.num_prompts` rows of the evaluation data, or of the training data."""
    own = config.eval.prompt_data is not None or training_set is None
    rows = load_prompts(config.data, config.eval.prompt_data) if own or training_set is None else training_set
    first = PromptSet(rows=rows.rows[: config.eval.num_prompts], name=rows.name, fingerprint=rows.fingerprint)
    max_response_len = config.eval_sampling().max_response_len
    room = max_prompt_len(config, policy.max_context_len, max_response_len, "eval.max_response_len")
    encoded = _encode(first, policy, config, room, console)
    if config.eval.interval is not None or config.rollout.num_rollout == 0:
        _tell(console, "evaluation", encoded, room)
    return encoded


def _encode(prompts: PromptSet, policy: TextModel, config: Config, room: int, console: Console) -> EncodedPrompts:
    renderer = PromptRenderer(policy.tokenizer, config.data)
    with console.phase("tokenise", len(prompts.rows), detail=prompts.name) as phase:
        return encode_prompts(prompts, renderer, room, progress=phase.update)


def _tell(console: Console, purpose: str, encoded: EncodedPrompts, room: int) -> None:
    count = (
        f"{num_of(len(encoded.prompts), 'prompt')} of at most {num_of(encoded.longest, 'token')} from {encoded.name}"
    )
    console.notice(f"{purpose} data: {count}")
    if encoded.num_too_long:
        number = num_of(encoded.num_too_long, "prompt")
        console.warn(f"{purpose} data: left out, not cut: {number} of more than {num_of(room, 'token')}")
