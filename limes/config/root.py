"""All settings of a run."""

from __future__ import annotations

from pydantic import Field, model_validator

from limes.config.algorithm import AlgorithmConfig
from limes.config.base import Section
from limes.config.checkpoint import CheckpointConfig
from limes.config.cluster import ClusterConfig
from limes.config.critic import CriticConfig
from limes.config.data import DataConfig
from limes.config.engine import EngineConfig
from limes.config.eval import EvalConfig
from limes.config.model import ModelConfig
from limes.config.reward import RewardConfig
from limes.config.rollout import RolloutConfig, SamplingConfig
from limes.config.run import RunConfig
from limes.config.teacher import TeacherConfig
from limes.config.trainer import TrainerConfig
from limes.config.weights import WeightsConfig


class Config(Section):
    """Every setting of a run, one attribute a section; `limes.load_config` is the way to build it."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    teacher: TeacherConfig = Field(default_factory=TeacherConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    run: RunConfig = Field(default_factory=RunConfig)

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        from limes.config.checks import problems

        found = problems(self)
        if found:
            raise ValueError("\n".join(found))
        return self

    def weight_transport(self) -> str:
        """How weights reach the engines: `weights.transport`, or what the cluster suggests."""
        if self.weights.transport is not None:
            return self.weights.transport
        if self.cluster.kind == "local":
            return "shared"
        cluster = self.cluster
        one_place = cluster.colocate and cluster.rollout_num_gpus is None
        one_rank = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node == 1
        return "ipc" if one_place and one_rank else "broadcast"

    def eval_sampling(self) -> SamplingConfig:
        """How evaluation draws answers: the rollout's sampling with the set values of `eval` on top."""
        names = SamplingConfig.model_fields
        values = {name: getattr(self.rollout, name) for name in names}
        values |= {name: value for name in names if (value := getattr(self.eval, name, None)) is not None}
        return SamplingConfig(**values)
