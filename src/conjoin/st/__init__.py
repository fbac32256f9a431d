"""Parts for training in sentence-transformers."""
