"""The search app of this Space: its index, its model and its pictures lie beside this file."""

from conjoin.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["app", "index", "--model", "model", "--host", "0.0.0.0", "--port", "7860"]))
