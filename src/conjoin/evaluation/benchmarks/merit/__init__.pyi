from .benchmark import MERIT as MERIT
from .evaluate import MeritScores as MeritScores, evaluate_merit as evaluate_merit
from .report import merit_results as merit_results
