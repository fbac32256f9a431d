"""One folder per model: configuration and forward. Hub code: copied into every checkpoint."""
