"""From the name of a model to its configuration, its tokenizer and its weights."""
