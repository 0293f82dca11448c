"""From prompts to graded samples: submit, filter, refill, abort, evaluate."""

from limes.rollout.build import build_rollout_manager
from limes.rollout.groups import NoGroupsLeft
from limes.rollout.manager import Report, RolloutManager
from limes.rollout.prompts import Prompts, load_all_prompts

__all__ = ["NoGroupsLeft", "Prompts", "Report", "RolloutManager", "build_rollout_manager", "load_all_prompts"]
