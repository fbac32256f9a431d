from .benchmark import MBEIR as MBEIR
from .evaluate import evaluate_mbeir as evaluate_mbeir, penalise_hubs as penalise_hubs
from .report import MbeirScore as MbeirScore, average_score as average_score, mbeir_results as mbeir_results
