"""M-BEIR: layout, rows and a miniature."""
