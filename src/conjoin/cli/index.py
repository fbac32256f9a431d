"""`conjoin index`: faster searches of a large collection."""

from dataclasses import dataclass

from conjoin.cli.options import option
from conjoin.constants import INDEX_KINDS


@dataclass(kw_only=True)
class Options:
    """Index the vectors of COLLECTION and its kept columns, and measure the recall@10.

    That is the share of the ten nearest that a search finds. Without an index, a search compares with every vector.
    Rows that come later are found as well.

    Args:
        collection: A collection that `conjoin encode` wrote.
        kind: Lance's index of vectors; hnsw is faster, sq, pq and rq are smaller; none: columns only.
        probes: Partitions to look into.
        refine: Candidates to score again with their whole vectors, for each result.
        faiss: Index in memory with FAISS instead, by its factory string, such as "IVF4096,PQ64" or "HNSW32"; without
            one, clusters of float16 vectors. Build it again after each update.

    Example:
        conjoin index runs/photos --kind ivf_pq
    """

    collection: str
    kind: str = option("ivf_hnsw_sq", choices=("none", *INDEX_KINDS))
    probes: int = option(20, least=1)
    refine: int = option(10, least=1)
    faiss: str | None = option(nargs="?", const="")


def run(options: Options) -> None:
    """Run the command."""
    from conjoin.retrieval import Collection

    collection = Collection(options.collection)
    if options.faiss is not None:
        recall = collection.index_faiss(options.faiss or None)
        print(f"FAISS index of {len(collection)} vectors in {options.collection}, recall@10 {recall:.3f}")
    else:
        kind = None if options.kind == "none" else options.kind
        measured = collection.index(kind, probes=options.probes, refine=options.refine)
        print(f"{len(collection)} rows indexed" + ("" if measured is None else f" ({kind}), recall@10 {measured:.3f}"))
    print(f"next: conjoin search {options.collection} --text ...")
