"""The models: configuration and forward. Hub code, copied into every checkpoint, but for the shortcuts."""
