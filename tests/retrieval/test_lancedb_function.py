"""LanceDB's own tables and searches, with any model of `load_encoder`."""

import io

import lancedb
import numpy as np
from lancedb.embeddings import get_registry
from lancedb.pydantic import LanceModel, Vector

from conjoin.retrieval import lancedb_function, load_encoder


def test_stock_lancedb_encodes_rows_and_queries(own_export, pictures, tmp_path):
    folder = str(own_export[0])
    model = get_registry().get("conjoin").create(name=folder, options={"device": "cpu"})
    assert isinstance(model, lancedb_function.EncoderFunction)

    class Row(LanceModel):
        picture: bytes = model.SourceField()
        vector: Vector(model.ndims()) = model.VectorField()

    class Words(LanceModel):
        words: str = model.SourceField()
        vector: Vector(model.ndims()) = model.VectorField()

    files = []
    for picture in pictures:
        picture.save(buffer := io.BytesIO(), "png")
        files.append(buffer.getvalue())
    texts = ["a red apple", "no-picture.png", "nothing"]
    database, encoder = lancedb.connect(tmp_path), load_encoder(folder, device="cpu")
    database.create_table("photos", schema=Row).add([{"picture": file} for file in files])
    database.create_table("words", schema=Words).add([{"words": text} for text in texts])
    for name, items in (("photos", pictures), ("words", [{"text": text} for text in texts])):
        table = lancedb.connect(tmp_path).open_table(name)  # the model is made again from what the table keeps
        vectors = encoder.encode_document(items)
        np.testing.assert_allclose(table.to_arrow()["vector"].to_pylist(), vectors, atol=1e-5)
        for query in ("a red apple", "photo.png", pictures[1]):
            asked = {"text": query} if isinstance(query, str) else query
            distances = 1 - vectors @ encoder.encode_query([asked])[0]
            found = [row["_distance"] for row in table.search(query).distance_type("cosine").limit(9).to_list()]
            np.testing.assert_allclose(found, np.sort(distances), atol=1e-5)
