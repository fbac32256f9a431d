from .sample import run_sample as run_sample
from .solar import run_solar as run_solar
