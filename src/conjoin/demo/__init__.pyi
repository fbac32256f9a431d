from .sample import run_sample as run_sample
