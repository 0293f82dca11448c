"""What others call our settings."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_OTHERS_BY_OURS = {
    "model.path": "model_name model_name_or_path hf_checkpoint pretrain pretrained base_model",
    "model.ref_path": "ref_load ref_model reference_model ref_model_path",
    "model.dtype": "torch_dtype bf16 precision",
    "data.prompt_data": "dataset dataset_name dataset_path train_data train_file train_files data_path",
    "data.max_prompt_len": "max_prompt_length prompt_length prompt_max_len rollout_max_prompt_len",
    "data.shuffle": "rollout_shuffle",
    "rollout.max_response_len": "max_new_tokens max_tokens max_completion_length max_response_length response_length "
    "generate_max_len completion_length",
    "rollout.n_samples_per_prompt": "num_generations group_size n num_return_sequences rollout_n samples_per_prompt",
    "rollout.batch_size": "train_batch_size global_batch_size prompts_per_step",
    "rollout.num_rollout": "max_steps num_steps total_steps train_steps training_steps num_iterations iterations",
    "rollout.num_epoch": "epochs num_epochs num_train_epochs total_epochs",
    "engine.kv_cache_gb": "gpu_memory_utilization mem_fraction_static",
    "engine.max_running": "max_num_seqs max_running_requests",
    "engine.max_context_len": "max_model_len context_length max_seq_len max_length",
    "reward.kind": "rm_type reward_type reward_fn reward_func reward_funcs reward_function custom_rm_path",
    "algorithm.advantage_estimator": "adv_estimator estimator algo",
    "algorithm.policy_loss": "loss_type loss_fn",
    "algorithm.aggregation": "loss_agg_mode loss_aggregation",
    "algorithm.lambd": "lambda lam gae_lambda",
    "algorithm.gamma": "discount discount_factor",
    "algorithm.eps_clip": "epsilon clip_range cliprange clip_ratio clip_eps clip_ratio_low",
    "algorithm.eps_clip_high": "epsilon_high clip_ratio_high clip_eps_high",
    "algorithm.entropy_coef": "entropy_coeff entropy_weight ent_coef entropy_bonus",
    "algorithm.kl_loss_coef": "beta kl_beta kl_weight kl_penalty_coef",
    "algorithm.kl_coef": "init_kl_coef kl_ctrl",
    "trainer.lr": "learning_rate actor_lr actor_learning_rate",
    "trainer.lr_schedule": "lr_scheduler lr_scheduler_type lr_decay_style scheduler",
    "trainer.lr_warmup_steps": "warmup_steps warmup lr_warmup_iters num_warmup_steps warmup_ratio",
    "trainer.clip_grad": "max_grad_norm grad_clip gradient_clipping clip_grad_norm max_norm",
    "trainer.adam_beta1": "beta1",
    "trainer.adam_beta2": "beta2",
    "trainer.adam_eps": "adam_epsilon",
    "trainer.num_steps_per_rollout": "ppo_epochs num_minibatches mini_batches",
    "trainer.max_tokens_per_micro_batch": "max_tokens_per_gpu per_device_train_batch_size micro_batch_size "
    "ppo_max_token_len_per_gpu",
    "trainer.gradient_checkpointing": "activation_checkpointing recompute_activations",
    "critic.lr": "critic_learning_rate critic_lr",
    "critic.value_clip": "cliprange_value vf_clip",
    "critic.num_critic_only_steps": "critic_warmup",
    "eval.interval": "eval_steps eval_interval test_freq eval_every",
    "checkpoint.save_interval": "save_steps save_freq save_every",
    "checkpoint.load": "resume resume_from resume_from_checkpoint load_path",
    "run.name": "run_name experiment_name",
    "run.dir": "output_dir save_dir log_dir",
    "run.seed": "random_seed",
    "run.trackers": "report_to logger loggers",
    "run.project": "wandb_project project_name",
}

SYNONYMS: Mapping[str, str] = MappingProxyType(
    {other: ours for ours, others in _OTHERS_BY_OURS.items() for other in others.split()}
)
"""Last word of a name that others use -> our setting."""
