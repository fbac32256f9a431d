"""The embedded sample: emoji drawn by two artists, with their names."""
