"""TREC run files, as another tool reads them."""


def read_run(path):
    """By query the `(document id, score)` pairs, best first."""
    run = {}
    for line in path.read_text().splitlines():
        query, _, document, _, score, _ = line.split(" ")
        run.setdefault(query, []).append((document, float(score)))
    return run
