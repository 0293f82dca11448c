"""From prompts to graded samples: submit, filter, refill, abort, evaluate; and samples from given answers."""

from limes.rollout.build import build_rollout_manager
from limes.rollout.conversations import Conversations, load_conversations
from limes.rollout.groups import NoGroupsLeft
from limes.rollout.manager import Report, RolloutManager
from limes.rollout.prompts import Prompts, load_all_prompts
from limes.rollout.sft import SftManager, build_sft_manager

__all__ = [
    "Conversations",
    "NoGroupsLeft",
    "Prompts",
    "Report",
    "RolloutManager",
    "SftManager",
    "build_rollout_manager",
    "build_sft_manager",
    "load_all_prompts",
    "load_conversations",
]
