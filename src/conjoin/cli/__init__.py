"""The `conjoin` program."""
