"""Keep the first layers of an embedder, and train them to embed as the whole model does.

python examples/compress.py --model Qwen/Qwen3-VL-Embedding-2B --data photos.csv --out runs/compressed --layers 14 20

The output folder gets a model for each depth (`layers-14`), and a report that compares them with the whole model.
"""

from dataclasses import dataclass, field

from transformers import HfArgumentParser

from conjoin import CompressOptions, compress, load_model, load_pairs


@dataclass
class ScriptArguments:
    """What to compress, and on what."""

    model: str = field(metadata={"help": "an embedder or an MLLM retriever"})
    data: str = field(metadata={"help": "pairs of image and text: a folder, a CSV, a data set on the Hub ..."})
    out: str = field(metadata={"help": "where the models and the report go"})


def main() -> None:
    """Train each depth with the model as its own teacher, measure it on held-out pairs, and write the report."""
    script, options = HfArgumentParser((ScriptArguments, CompressOptions)).parse_args_into_dataclasses()
    model, processor = load_model(script.model)
    results = compress(model, processor, load_pairs(script.data, only="both"), script.out, options)
    print(f"{results.summary}\nwrote {results.save(script.out)}")


if __name__ == "__main__":
    main()
