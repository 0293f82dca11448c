"""One model on many ranks: sharded parameters, shared heads, shared tokens."""
