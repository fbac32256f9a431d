"""The commands of the program and what each does, known without importing them."""

COMMANDS = {
    "start": "make a table of products searchable, and open the search app",
    "demo": "train, encode, search and evaluate on the embedded sample",
    "train": "train a model by a recipe",
    "encode": "encode a dataset into a collection that can be searched",
    "index": "make searches of a large collection faster",
    "copy": "copy a collection to another folder, an object store or Milvus",
    "search": "search a collection by a text, an image, or both",
    "app": "search a collection in the browser",
    "serve": "serve embeddings and search over HTTP",
    "mine": "find hard negatives of every row of a dataset",
    "merge-adapter": "merge LoRA adapters into a stand-alone model folder",
    "export": "write a model as a folder that other programs load",
    "push": "push a model, a collection, a dataset, a metric or a search app to the Hub",
    "verify": "compare all files of collections, models and evaluations with their checksums",
    "evaluate": "evaluate a model on a benchmark",
    "mteb": "evaluate a model on tasks of MTEB",
    "data": "make a data set",
    "explain": "show which patches and words an image and a text share",
    "analyze": "show what each layer of an MLLM contributes and costs",
    "compress": "train the first layers of an MLLM or embedder to embed as the whole",
}
"""The module of a command has its name, with underscores."""
