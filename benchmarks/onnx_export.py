"""Items per second of PyTorch, of the ONNX export in float32, and of the export in 8 bits, on a CPU.

Without `--model`, the encoder has random weights and the size of `--size`. Within a run, the encoders take turns, with
the same number of threads. A row shows the median of the ratios to PyTorch in single turns, which other programs on the
machine affect less than wall time, and the similarity of the vectors to those of PyTorch. Items are prepared once;
only the model is timed.

    python benchmarks/onnx_export.py --model runs/demo/model --threads 2 --json onnx.json
    python benchmarks/onnx_export.py --size tiny --turns 1          # a quick test of the script

`--benchmark` compares float32 and 8 bits on the embedded sample instead: `conjoin evaluate EXPORT --benchmark emoji`.
"""
