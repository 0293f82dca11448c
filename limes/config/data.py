"""Settings of the prompt data."""

from pydantic import Field, PositiveInt

from limes.config.base import Options, Section


class DataConfig(Section):
    """Where prompts come from and how they are rendered."""

    prompt_data: str = "reasoning_gym:chain_sum"
    """A JSONL or Parquet file or a `datasets` folder, with an optional row slice (`train.jsonl@[0:100]`), or
    `reasoning_gym:<task>`."""

    source_options: Options = Field(default_factory=dict)
    """Options of a generated source, such as the `size` and `seed` of a reasoning-gym task."""

    input_key: str = "prompt"
    """Column that holds the prompt: a string or a list of chat messages. With `algorithm.loss = sft` the messages hold
    the answers too, and an answer's `weight` says how much it counts; 0 leaves it out."""

    label_key: str | None = "label"
    """Column that holds the answer the grader compares with, or with `algorithm.loss = sft` the answer to learn where
    the prompt has none; a row may lack it. Empty for data without labels."""

    tools_key: str = "tools"
    """Column that holds the tools an answer may call, as a list or as JSON text, for the chat template; a row may lack
    it."""

    metadata_key: str = "metadata"
    """Column that holds a dict which travels with every sample."""

    apply_chat_template: bool = True
    """Render prompts with the chat template; off means the prompt string is tokenised as it is."""

    chat_template_kwargs: Options = Field(default_factory=dict)
    """Extra variables for the chat template, such as `enable_thinking`."""

    system_prompt: str | None = None
    """A system message put before every prompt that does not bring one."""

    max_prompt_len: PositiveInt | None = None
    """Longest prompt in tokens; longer ones are left out and counted, never cut. Default: what the context leaves
    beside the answer."""

    shuffle: bool = True
    """Draw prompts in an order seeded by `run.seed` and the epoch, instead of file order."""
