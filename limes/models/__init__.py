"""Loading a model and its tokenizer, and what trainer and engine share of it."""
