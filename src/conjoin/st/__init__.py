"""Parts for training in sentence-transformers; its modules need the extra `st`."""
