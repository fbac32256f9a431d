"""The search app of this Space: its collection and its model lie beside this file."""

from conjoin.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["app", "collection", "--model", "model", "--host", "0.0.0.0", "--port", "7860"]))
