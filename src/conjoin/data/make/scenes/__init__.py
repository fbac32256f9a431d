"""Scenes: pictures of objects, and texts that name some of them, composed from the embedded sample."""
