"""A catalogue to a search page in one command."""
