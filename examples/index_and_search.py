"""Encode a table into a collection, and search it by texts and pictures.

python examples/index_and_search.py --model openai/clip-vit-base-patch32 --data photos.csv --out runs/photos \
    --queries "a red apple" photo.jpg --where "id != '3'"

Run it again after the table changed: what is new or changed is encoded, what is gone is removed.
"""

from dataclasses import dataclass, field

from transformers import HfArgumentParser

from conjoin import encode_collection, load_encoder, load_pairs, search_items


@dataclass
class ScriptArguments:
    """What to encode, and what to search for."""

    model: str = field(metadata={"help": "a model on the Hub or in a folder"})
    data: str = field(metadata={"help": "a table or folder of pictures, as `load_pairs` reads it"})
    out: str = field(metadata={"help": "the folder of the collection"})
    queries: list[str] = field(metadata={"help": "texts, and paths of pictures"})
    where: str | None = field(default=None, metadata={"help": "a condition in SQL over id, text and kept columns"})
    k: int = field(default=10, metadata={"help": "results of a query"})


def main() -> None:
    """Bring the collection up to date, and print the best rows of each query with their cosines."""
    (script,) = HfArgumentParser(ScriptArguments).parse_args_into_dataclasses()
    encoder = load_encoder(script.model)
    rows = load_pairs(script.data, only="image")
    collection = encode_collection(rows, encoder, script.out, sync=True, show_progress=True)
    found = search_items(collection, encoder, script.queries, k=script.k, where=script.where)
    for query, hits in zip(script.queries, found, strict=True):
        print(query)
        for hit in hits:
            print(f"  {hit.score:.3f}  {hit.id}")


if __name__ == "__main__":
    main()
