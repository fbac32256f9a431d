"""Reports of results: one HTML page, and plain text for the terminal."""
