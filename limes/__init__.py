"""limes trains language models by reinforcement learning."""
