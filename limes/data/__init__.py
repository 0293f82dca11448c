"""Prompt sets, their rendering into token ids, and the cursor that draws from them."""

from limes.data.conversations import Conversation, EncodedConversations, encode_conversations
from limes.data.cursor import DataCursor
from limes.data.encode import EncodedPrompt, EncodedPrompts, encode_prompts
from limes.data.prompts import PromptSet, Row
from limes.data.render import PromptRenderer
from limes.data.sources import load_prompts

__all__ = [
    "Conversation",
    "DataCursor",
    "EncodedConversations",
    "EncodedPrompt",
    "EncodedPrompts",
    "PromptRenderer",
    "PromptSet",
    "Row",
    "encode_conversations",
    "encode_prompts",
    "load_prompts",
]
